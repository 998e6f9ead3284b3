#!/usr/bin/env bash
# Compiles every *.cu under src for sm_90a. A kernel that spills registers, uses local memory or has its wgmma
# instructions serialised is an error, as is a file that does not compile.
#   scripts/check_cuda.sh [FOLDER]     FOLDER instead of src
# Without nvcc: an error in CI (CI set), else a note. CUTLASS headers: as scripts/find_cutlass.sh finds them.
set -uo pipefail
cd "$(dirname "$0")/.."

folder=${1:-src}
[[ -d $folder ]] || { echo "check_cuda: no folder $folder" >&2; exit 2; }
mapfile -t files < <(find "$folder" -name '*.cu' | sort)
if ((${#files[@]} == 0)); then
  echo "check_cuda: no CUDA files under $folder"
  exit 0
fi
if ! command -v nvcc >/dev/null; then
  echo "check_cuda: no nvcc on this machine for ${#files[@]} files" >&2
  [[ -z ${CI:-} ]]
  exit
fi

includes=(-Iinclude -Isrc)
cutlass=$(scripts/find_cutlass.sh) && includes+=("-I$cutlass")

log=$(mktemp)
trap 'rm -f "$log"' EXIT
status=0
for file in "${files[@]}"; do
  if ! nvcc -std=c++20 -arch=sm_90a -O3 --expt-relaxed-constexpr -Xptxas -v "${includes[@]}" -cubin -o /dev/null "$file" \
      >"$log" 2>&1; then
    printf '%s: does not compile\n' "$file"
    cat "$log"
    status=1
  elif grep -E '[1-9][0-9]* bytes (stack frame|spill stores|spill loads|lmem)|wgmma.*serializ' "$log"; then
    printf '%s: spills, local memory or serialised wgmma (above)\n' "$file"
    status=1
  else
    printf '%s: %s\n' "$file" "$(grep -c 'Compiling entry function' "$log") kernels, clean"
  fi
done
exit "$status"
