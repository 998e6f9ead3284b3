#!/usr/bin/env bash
# Configures and builds a preset of CMakePresets.json, quietly: the log appears if something fails.
#   scripts/build.sh PRESET [target...]
# JOBS = compilers at a time (default: all cores). On a terminal ninja shows its progress line.
set -euo pipefail
cd "$(dirname "$0")/.."

preset=${1:?usage: build.sh PRESET [target...]}
shift
targets=()
(($#)) && targets=(--target "$@")
log=$(mktemp)
trap 'rm -f "$log"' EXIT

run_logged() { # what command...
  local what=$1 started=$SECONDS
  shift
  if ! "$@" >"$log" 2>&1 </dev/null; then
    cat "$log" >&2
    printf '%s (%s) failed\n' "$what" "$preset" >&2
    exit 1
  fi
  printf '%s (%s): %d s\n' "$what" "$preset" $((SECONDS - started))
}

# shellcheck disable=SC2086 — EXTRA_CMAKE_ARGUMENTS is a list of words
run_logged configure cmake --preset "$preset" ${EXTRA_CMAKE_ARGUMENTS:-}
build=(cmake --build --preset "$preset" --parallel "${JOBS:-$(nproc)}" "${targets[@]}")
if [[ -t 1 ]]; then
  "${build[@]}"
else
  run_logged build "${build[@]}"
fi
