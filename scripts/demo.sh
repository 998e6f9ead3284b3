#!/usr/bin/env bash
# The main job on real and on made data. Needs `make build`. Results stay in build/demo.
set -euo pipefail
cd "$(dirname "$0")/.."

sparsemla=build/bin/sparsemla
out=build/demo
mkdir -p "$out"

title() { printf '\n== %s\n' "$*"; }

title "This machine"
"$sparsemla" info

for capture in tests/data/minilm_*.safetensors; do
  name=$(basename "$capture" .safetensors)
  # 16-key blocks: a list of 128 slots is only two 64-key blocks, which leaves a walk little to differ by.
  title "A captured layer ($name): what rounding does to outputs and gradients"
  "$sparsemla" audit "$capture" --pipelines lazy+key=16,exact+key=16 --gradients --json "$out/$name.json"
done

title "Order test: the same lists with the strongest key met first and met last"
"$sparsemla" audit --preset order --json "$out/order.json"

for python in .venv/bin/python python3; do
  if "$python" -c 'import matplotlib' 2>/dev/null; then
    title "Plot"
    "$python" scripts/plot_audit.py "$out/order.json" -o "$out/order.png"
    printf '%s\n' "$out/order.png"
    break
  fi
done
if [[ ! -f $out/order.png ]]; then
  printf '\nFor a plot as well: scripts/setup.sh plot && make demo\n'
fi
