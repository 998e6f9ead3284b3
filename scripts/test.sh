#!/usr/bin/env bash
# Every check of the release build. Needs `make build` and `scripts/setup.sh test`. Runs all parts even if one fails.
set -uo pipefail
cd "$(dirname "$0")/.."

failed=()
part() { # name command...
  local name=$1
  shift
  printf '\n== %s\n' "$name"
  "$@" || failed+=("$name")
}

part "C++ tests" scripts/ctest.sh release
part "Python tests" .venv/bin/python -m pytest -q -p no:cacheprovider tests/python
part "include arrows" python3 scripts/check_layers.py
part "repository rules" python3 scripts/check_repo.py

if ((${#failed[@]})); then
  printf '\nFAILED: %s\n' "$(IFS=,; printf '%s' "${failed[*]}")"
  exit 1
fi
printf '\nAll tests passed.\n'
