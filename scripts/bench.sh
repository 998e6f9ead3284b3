#!/usr/bin/env bash
# Speed of forward and backward beside a large Eigen product in the same run, and beside eager PyTorch where torch is
# installed (scripts/setup.sh rivals). Needs `make build`. Results stay in build/bench.
set -euo pipefail
cd "$(dirname "$0")/.."

out=build/bench
mkdir -p "$out"
build/bin/attention_bench --benchmark_out="$out/attention.json" --benchmark_out_format=json "$@"

for python in .venv/bin/python python3; do
  if "$python" -c 'import torch' 2>/dev/null; then
    printf '\nEager PyTorch, the same sizes:\n'
    "$python" bench/eager_pytorch.py | tee "$out/eager_pytorch.jsonl"
    exit
  fi
done
printf '\nEager PyTorch: skipped, torch is not installed (scripts/setup.sh rivals)\n'
