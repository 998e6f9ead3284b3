#!/usr/bin/env bash
# Runs the C++ tests of a built preset: scripts/ctest.sh PRESET [ctest argument...]
# On a terminal with a progress line; elsewhere what fails is shown, with its output, and the closing lines.
set -euo pipefail
cd "$(dirname "$0")/.."

preset=${1:?usage: ctest.sh PRESET [ctest argument...]}
shift
run=(ctest --preset "$preset" --parallel "${JOBS:-$(nproc)}" "$@")
# Kernels that randomise addresses more than gcc 12's ThreadSanitizer expects make it stop at once with "unexpected
# memory mapping"; a run without that randomisation works on all.
if [[ $preset == tsan ]] && setarch "$(uname -m)" --addr-no-randomize true 2>/dev/null; then
  run=(setarch "$(uname -m)" --addr-no-randomize "${run[@]}")
fi
if [[ -t 1 ]]; then
  exec "${run[@]}" --progress
fi
"${run[@]}" | { grep --text --line-buffered -vE '^ +Start +[0-9]+: | Passed +[0-9.]+ sec$' || true; }
