#!/bin/sh
# Builds the fuzzer and runs it for SECONDS from the seed corpus. Fails on any finding; the input that caused it stays in
# the build folder, and safetensors_fuzz FILE repeats it.
#   tests/fuzz/run.sh SECONDS          BUILD_DIR (default build/fuzz) and CXX (default clang++) may be set
set -eu
case "${1:-}" in
  '' | *[!0-9]* | 0) echo "usage: $0 SECONDS (1 or more)" >&2; exit 2 ;;
esac
here=$(CDPATH='' cd -- "$(dirname -- "$0")" && pwd)
build=${BUILD_DIR:-$here/../../build/fuzz}
cmake -S "$here" -B "$build" -DCMAKE_CXX_COMPILER="${CXX:-clang++}" -DCMAKE_BUILD_TYPE=None
cmake --build "$build"
corpus=$(mktemp -d)
trap 'rm -rf "$corpus"' EXIT
trap 'exit 130' INT TERM
cp "$here"/corpus/* "$corpus"
"$build/safetensors_fuzz" -max_total_time="$1" -max_len=4096 -timeout=10 -rss_limit_mb=2048 -print_final_stats=1 \
  -dict="$here/safetensors.dict" -artifact_prefix="$build/" "$corpus"
