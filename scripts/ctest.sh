#!/usr/bin/env bash
# Runs the C++ tests of a built preset: scripts/ctest.sh PRESET [ctest argument...]
# On a terminal with a progress line; elsewhere what fails is shown, with its output, and the closing lines. Tests of a
# device that is not there are counted in one line instead of listed.
set -euo pipefail
cd "$(dirname "$0")/.."

preset=${1:?usage: ctest.sh PRESET [ctest argument...]}
shift
results=$(mktemp)
trap 'rm -f "$results"' EXIT
run=(ctest --preset "$preset" --parallel "${JOBS:-$(nproc)}" --output-junit "$results" "$@")
# Kernels that randomise addresses more than gcc 12's ThreadSanitizer expects make it stop at once with "unexpected
# memory mapping"; a run without that randomisation works on all.
if [[ $preset == tsan ]] && setarch "$(uname -m)" --addr-no-randomize true 2>/dev/null; then
  run=(setarch "$(uname -m)" --addr-no-randomize "${run[@]}")
fi

report_skipped() {
  local count
  count=$(grep -cE '<testcase name="cuda/[^"]*".* status="notrun"' "$results" || true)
  ((count == 0)) || printf 'cuda: %d tests skipped (no device, or not the one they need)\n' "$count"
}

status=0
if [[ -t 1 ]]; then
  "${run[@]}" --progress || status=$?
else
  "${run[@]}" | { grep --text --line-buffered -vE '^ +Start +[0-9]+: | Passed +[0-9.]+ sec$|cuda/.*\*\*\*Skipped|^\s+[0-9]+ - cuda/.*\(Skipped\)$' || true; } || status=$?
fi
report_skipped
exit "$status"
