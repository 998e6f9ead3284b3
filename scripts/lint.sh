#!/usr/bin/env bash
# Formatting, include arrows, repository rules, shell syntax. --fix rewrites the C++ files instead of complaining.
set -uo pipefail
cd "$(dirname "$0")/.."

status=0
mapfile -t sources < <(git ls-files --cached --others --exclude-standard -- '*.h' '*.hpp' '*.c' '*.cpp' '*.cu' '*.cuh')
if ((${#sources[@]} == 0)); then
  echo "lint: no C++ files listed by git" >&2
  exit 1
fi
if [[ ${1:-} == --fix ]]; then
  exec .venv/bin/clang-format -i "${sources[@]}"
fi
.venv/bin/clang-format --dry-run -Werror "${sources[@]}" || status=1
printf 'clang-format: %d files\n' "${#sources[@]}"
python3 scripts/check_layers.py || status=1
python3 scripts/check_repo.py || status=1
mapfile -t scripts < <(git ls-files --cached --others --exclude-standard -- '*.sh' .ci/run)
for script in "${scripts[@]}"; do bash -n "$script" || status=1; done
exit "$status"
