#!/usr/bin/env bash
# Prints the folder that holds cute/ and cutlass/: CUTLASS_INCLUDE if it is set, else that of the Python package
# nvidia-cutlass (scripts/setup.sh cuda), in .venv or wherever python3 looks. Exit 1, and why on stderr: there is none.
set -uo pipefail
cd "$(dirname "$0")/.."

folder=${CUTLASS_INCLUDE:-}
for python in .venv/bin/python python3; do
  [[ -n $folder ]] && break
  folder=$("$python" -c 'import importlib.util as u, os; s = u.find_spec("cutlass_library"); print(os.path.join(os.path.dirname(s.origin), "source", "include") if s else "")' 2>/dev/null)
done
if [[ -z $folder ]]; then
  echo "no CUTLASS headers (set CUTLASS_INCLUDE, or scripts/setup.sh cuda)" >&2
elif [[ ! -f $folder/cute/tensor.hpp ]]; then
  echo "no cute/tensor.hpp in $folder" >&2
else
  printf '%s\n' "$folder"
  exit 0
fi
exit 1
