#!/usr/bin/env bash
# Packs what a machine with a Hopper device needs to test and time this build, without a compiler or a package there:
# build/bundle with the device tests, the program, the libraries they load, and run.sh.
#   scripts/device_bundle.sh [--sanitizer]     --sanitizer: kernels with line numbers, for run.sh sanitize
# For any x86-64 processor with AVX2. Needs `scripts/setup.sh build` and nvcc. Then, there:
#   build/bundle/run.sh test [FILTER]                 the device tests (a GoogleTest filter)
#   build/bundle/run.sh sanitize TOOL [FILTER]        the same under compute-sanitizer: memcheck, racecheck, synccheck
#   build/bundle/run.sh bench [ARGUMENT...]           sparsemla bench --device cuda
#   build/bundle/run.sh cli ARGUMENT...               the program
set -euo pipefail
cd "$(dirname "$0")/.."

build=build/bundle-build
flags=
case ${1:-} in
  '') ;;
  --sanitizer) build=build/bundle-sanitizer flags=-lineinfo ;;
  *) echo "usage: device_bundle.sh [--sanitizer]" >&2; exit 2 ;;
esac
bundle=build/bundle
readonly max_mib=60

log=$(mktemp)
trap 'rm -f "$log"' EXIT
quietly() { "$@" >"$log" 2>&1 || { cat "$log" >&2; exit 1; }; }
# The programs look beside themselves for libraries. LD_LIBRARY_PATH would hand those to compute-sanitizer too.
quietly cmake --preset release -B "$build" -DSPARSEMLA_CUDA=ON -DSPARSEMLA_CPU_ARCH=x86-64-v3 "-DCMAKE_CUDA_FLAGS=$flags" \
  '-DCMAKE_BUILD_RPATH=$ORIGIN/../lib'
programs=(cuda_test sparsemla)
targets=(cuda_test sparsemla_cli)
# A test of the backend that runs with and without a device.
if cmake --build "$build" --target help | grep -q '^sm90_complete_test:'; then
  programs+=(sm90_complete_test)
  targets+=(sm90_complete_test)
fi
quietly cmake --build "$build" --parallel "${JOBS:-$(nproc)}" --target "${targets[@]}"

rm -rf "$bundle"
mkdir -p "$bundle/bin" "$bundle/lib"
for program in "${programs[@]}"; do strip -o "$bundle/bin/$program" "$build/bin/$program"; done
# The C library belongs to the machine there, all else comes along.
ldd "$bundle"/bin/* | awk '$2 == "=>" && $3 ~ /^\// && $1 !~ /^(libc|libm|libdl|librt|libpthread)\.so/ { print $3 }' | sort -u |
  xargs -r -I{} cp -L {} "$bundle/lib/"

cat >"$bundle/run.sh" <<'RUN'
#!/usr/bin/env bash
# run.sh test [FILTER] | sanitize TOOL [FILTER] | bench [ARGUMENT...] | cli ARGUMENT...
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
export SPARSEMLA_REQUIRE_DEVICE=1

# Folders of Python packages that may hold libcublas, where the loader does not know of one.
python_cuda_folders() {
  python3 -c 'import glob, site, sys
folders = set(site.getsitepackages() + [site.getusersitepackages()] + sys.path)
print(":".join(sorted({f.rsplit("/", 1)[0] for p in folders if p for f in glob.glob(p + "/nvidia/*/lib/libcublas.so.*")})))' 2>/dev/null || true
}

mode=${1:-}
shift || true
case $mode in
  test)
    [[ -n ${1:-} || ! -x $here/bin/sm90_complete_test ]] || "$here/bin/sm90_complete_test" --gtest_brief=1
    "$here/bin/cuda_test" --gtest_brief=1 --gtest_filter="${1:-*}"
    ;;
  sanitize)
    tool=${1:?usage: run.sh sanitize TOOL [FILTER]}
    # Large tensors and 4096-token problems take hours under a tool, and show it nothing that small ones do not.
    compute-sanitizer --tool "$tool" --error-exitcode 9 --print-limit 20 \
      "$here/bin/cuda_test" --gtest_brief=1 --gtest_filter="${2:-CudaShapes.*:CudaCalls.*:*CudaForwardCases*}"
    ;;
  bench)
    folders=$(python_cuda_folders)
    [[ -z $folders ]] || export LD_LIBRARY_PATH=$folders${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
    "$here/bin/sparsemla" bench --device cuda "$@"
    ;;
  cli) "$here/bin/sparsemla" "$@" ;;
  *) sed -n 2p "$0" >&2; exit 2 ;;
esac
RUN
chmod +x "$bundle/run.sh"

kib=$(du -sk "$bundle" | cut -f1)
printf '%s: %s, %d.%d MiB\n' "$bundle" "${programs[*]}" $((kib / 1024)) $((kib % 1024 * 10 / 1024))
if ((kib > max_mib * 1024)); then
  echo "device_bundle: more than $max_mib MiB" >&2
  exit 1
fi
