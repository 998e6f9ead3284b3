#!/usr/bin/env bash
# Installs what the named groups need on Debian 12/13 and Ubuntu 24.04, if it is not there yet.
#   scripts/setup.sh [build] [cuda] [test] [lint] [fuzz] [plot] [rivals]        no name = build
# All but build and fuzz also prepare the Python environment .venv. cuda is the CUTLASS headers, which build takes along where
# nvcc is (the CUDA toolkit itself is for you to install); rivals is PyTorch, to compare speed with. Does nothing, and needs
# no rights, when everything is in place.
set -euo pipefail
cd "$(dirname "$0")/.."

# The formatter's output depends on its version, so every machine takes the same one.
readonly clang_format_version=14.0.6

declare -A packages=(
  [build]="g++ make cmake ninja-build libeigen3-dev libfmt-dev libcli11-dev nlohmann-json3-dev libdlpack-dev libgtest-dev libbenchmark-dev"
  [cuda]="python3 python3-venv"
  [test]="git python3 python3-venv"
  [lint]="git python3 python3-venv"
  [fuzz]="clang libclang-rt-dev"
  [plot]="python3 python3-venv"
  [rivals]="python3 python3-venv"
)
# A tool found under one of these names counts, however it was installed.
declare -A tools=([g++]=g++ [make]=make [cmake]=cmake [ninja-build]=ninja [python3]=python3 [git]=git [clang]=clang++)

say() { printf '%s\n' "$*" >&2; }

is_installed() { # package
  local tool=${tools[$1]:-}
  if [[ -n $tool ]]; then command -v "$tool" >/dev/null; return; fi
  if [[ $1 == python3-venv ]] && command -v python3 >/dev/null; then python3 -c 'import venv, ensurepip' 2>/dev/null; return; fi
  [[ $(dpkg-query -W -f '${Status}' "$1" 2>/dev/null) == "install ok installed" ]]
}

quietly() { # command...; shows its output only if it fails
  local log status=0
  log=$(mktemp)
  "$@" >"$log" 2>&1 </dev/null || status=$?
  if ((status != 0)); then
    say "failed ($status): $*"
    cat "$log" >&2
  fi
  rm -f "$log"
  return "$status"
}

install_packages() { # package...
  local missing=() package
  for package in "$@"; do is_installed "$package" || missing+=("$package"); done
  ((${#missing[@]} == 0)) && return
  local root=()
  if ((EUID != 0)); then
    if ! command -v sudo >/dev/null; then
      say "Please have an administrator install: ${missing[*]}"
      return 1
    fi
    root=(sudo)
  fi
  if ! command -v apt-get >/dev/null; then
    say "No apt-get here. Please install what these packages of Debian hold: ${missing[*]}"
    return 1
  fi
  say "Installing ${missing[*]}"
  quietly "${root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get update -qq
  quietly "${root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${missing[@]}"
}

# One environment for all Python parts, brought up to date when the list of a group changes.
install_python() { # stamp-name pip-argument...
  local stamp=.venv/.have-$1 wanted
  shift
  wanted=$(printf '%s\n' "$@"; for word in "$@"; do [[ -f $word ]] && cat "$word"; done; true)
  [[ -f $stamp && $(<"$stamp") == "$wanted" ]] && return
  if [[ ! -x .venv/bin/python ]] || ! .venv/bin/python -c 'import pip' 2>/dev/null; then
    say "Making the Python environment .venv"
    rm -rf .venv
    quietly python3 -m venv .venv
  fi
  say "Installing Python packages: $*"
  quietly .venv/bin/python -m pip install --quiet --disable-pip-version-check "$@"
  printf '%s' "$wanted" >"$stamp"
}

groups=("$@")
((${#groups[@]})) || groups=(build)
[[ " ${groups[*]} " == *" build "* ]] && command -v nvcc >/dev/null && groups+=(cuda)
wanted_packages=()
for group in "${groups[@]}"; do
  [[ -n ${packages[$group]:-} ]] || { say "setup.sh: unknown group '$group'"; exit 2; }
  read -ra words <<<"${packages[$group]}"
  wanted_packages+=("${words[@]}")
done
mapfile -t wanted_packages < <(printf '%s\n' "${wanted_packages[@]}" | sort -u)
install_packages "${wanted_packages[@]}"

for group in "${groups[@]}"; do
  case $group in
    # The package asks for Python bindings that no header needs.
    cuda) install_python cuda --no-deps "nvidia-cutlass==4.2.0.0" ;;
    test) install_python test -r tests/python/requirements.txt ;;
    lint) install_python lint "clang-format==$clang_format_version" ;;
    plot) install_python plot matplotlib ;;
    rivals) install_python rivals numpy "torch==2.13.0" ;;
  esac
done
