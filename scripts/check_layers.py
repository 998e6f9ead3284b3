#!/usr/bin/env python3
"""Checks that includes follow the architecture. Exit 0: clean. Exit 1: violations, one a line.

- Public headers (include/) include only one another, standard headers and <dlpack/dlpack.h>.
- In src/ arrows go down: api -> validate, plan, dispatch -> backends -> core; between the three in the middle they make
  no circle. Backends do not include each other.
- Each other folder includes only the folders listed for it in MAY_INCLUDE, and the insides of src/ are for src/ and the
  tests alone. A folder that is in no list is a violation, so that a new one cannot slip past.
- Only src/backends/sm90 includes CuTe and CUTLASS; CUDA headers also device/ and tests/cuda.
"""

import argparse
import re
import sys
from pathlib import Path

SOURCE_SUFFIXES = {".h", ".hpp", ".cuh", ".inl", ".c", ".cc", ".cpp", ".cu"}

# Folder -> what it may include besides itself, the public headers and third parties. "src" = every folder inside it.
MAY_INCLUDE = {
    "include": set(),
    "src/api": {"src/validate", "src/plan", "src/dispatch", "src/core"},
    "src/validate": {"src/plan", "src/dispatch", "src/core"},
    "src/plan": {"src/validate", "src/dispatch", "src/core"},
    "src/dispatch": {"src/validate", "src/plan", "src/backends", "src/core"},
    "src/backends": {"src/core"},
    "src/core": set(),
    "reference": set(),
    "numerics": set(),
    "io": set(),
    "device": set(),
    "cases": {"numerics", "reference", "device"},
    "audit": {"numerics", "reference", "cases", "io", "device"},
    "cli": {"numerics", "reference", "cases", "io", "audit", "device"},
    "bench": {"numerics", "reference", "cases", "io", "audit", "device"},
    "examples": {"numerics", "io"},
    "tests": {"src", "numerics", "reference", "cases", "io", "audit", "cli", "device"},
    "python": {"numerics", "reference", "io"},
}
MIDDLE = {"src/validate", "src/plan", "src/dispatch"}
KERNEL_FOLDERS = ("src/backends/sm90/",)
KERNEL_HEADER = re.compile(r"^(cute|cutlass|cub|thrust)(/|$)")
CUDA_FOLDERS = (*KERNEL_FOLDERS, "device/", "tests/cuda/")
CUDA_HEADER = re.compile(r"^(cuda|cooperative_groups)(/|$)|^(cuda|cooperative_groups|nv_)\w*\.h$")
PUBLIC_HEADER_MAY_USE = {"dlpack/dlpack.h", "stddef.h", "stdint.h"}  # besides C++ standard headers, which have no dot

INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]*([<"])([^">]+)[">]', re.MULTILINE)
BLOCK_COMMENT = re.compile(r"/\*.*?\*/", re.DOTALL)


def folder_of(path: str) -> str:
    """The folder of MAY_INCLUDE that a path (relative to the root, with /) belongs to, or "" for none."""
    parts = path.split("/")
    for length in (2, 1):
        folder = "/".join(parts[:length])
        if len(parts) > length and folder in MAY_INCLUDE:
            return folder
    return ""


def backend_of(path: str) -> str:
    """"cpu" for src/backends/cpu/forward.cpp; "" for a file outside a backend's own folder."""
    parts = path.split("/")
    return parts[2] if parts[:2] == ["src", "backends"] and len(parts) > 3 else ""


def resolve(root: Path, includer: str, name: str) -> str:
    """The project file that the include means, relative to the root, or "" for a third party's."""
    for base in (root / includer).parent, root, root / "include", root / "src":
        candidate = base / name
        if candidate.is_file() and candidate.resolve().is_relative_to(root):
            return candidate.resolve().relative_to(root).as_posix()
    # Not there yet, or generated: judge it by its first folder, so that the rules hold all the same.
    first = name.split("/")[0]
    if first == "sparsemla":
        return f"include/{name}"
    for prefix in "", "src/":
        if "/" in name and f"{prefix}{first}" in MAY_INCLUDE:
            return prefix + name
    return ""


def may_include(folder: str, target: str) -> bool:
    allowed = MAY_INCLUDE[folder] | {folder, "include"}
    return target in allowed or (target.startswith("src/") and "src" in allowed)


def check_third_party(path: str, folder: str, bracket: str, name: str) -> str:
    if folder == "include" and name not in PUBLIC_HEADER_MAY_USE and (bracket == '"' or "." in name or "/" in name):
        return "a public header includes only public and standard headers"
    for header, folders in (KERNEL_HEADER, KERNEL_FOLDERS), (CUDA_HEADER, CUDA_FOLDERS):
        if header.match(name) and not path.startswith(folders):
            return f"only {' '.join(folders)} may include it"
    return ""


def check_project(path: str, folder: str, target: str) -> str:
    target_folder = folder_of(target)
    if not target_folder:
        return f"{target} is in a folder without a rule"
    if not may_include(folder, target_folder):
        return f"{folder} may not include {target_folder}"
    if backend_of(path) and backend_of(target) and backend_of(path) != backend_of(target):
        return "backends do not include each other"
    return ""


def circle(arrows: set[tuple[str, str]]) -> list[str]:
    """A cycle among the middle folders, as the list of its folders, or [] if there is none."""

    def walk(trail: list[str]) -> list[str]:
        for source, target in sorted(arrows):
            if source != trail[-1]:
                continue
            if target in trail:
                return [*trail[trail.index(target) :], target]
            if found := walk([*trail, target]):
                return found
        return []

    for start in sorted(MIDDLE):
        if found := walk([start]):
            return found
    return []


def source_files(root: Path) -> list[str]:
    names = []
    for top in sorted(root.iterdir()):
        if not top.is_dir() or top.name.startswith(".") or top.name == "build":
            continue
        names += [p.relative_to(root).as_posix() for p in sorted(top.rglob("*")) if p.suffix in SOURCE_SUFFIXES]
    return names


def check(root: Path) -> tuple[list[str], int]:
    root = root.resolve()
    violations = []
    arrows = set()
    files = source_files(root)
    for path in files:
        folder = folder_of(path)
        if not folder:
            violations.append(f"{path}: its folder has no rule; give it one in MAY_INCLUDE of this script")
            continue
        text = (root / path).read_text(encoding="utf-8", errors="replace")
        text = BLOCK_COMMENT.sub(lambda match: re.sub(r"[^\n]", " ", match.group()), text)
        for match in INCLUDE.finditer(text):
            bracket, name = match.groups()
            target = resolve(root, path, name)
            problem = check_project(path, folder, target) if target else check_third_party(path, folder, bracket, name)
            if problem:
                line = text.count("\n", 0, match.start()) + 1
                violations.append(f'{path}:{line}: includes "{name}": {problem}')
            elif target and {folder, folder_of(target)} <= MIDDLE and folder != folder_of(target):
                arrows.add((folder, folder_of(target)))
    if cycle := circle(arrows):
        violations.append(f"src: a circle of includes: {' -> '.join(cycle)}")
    return violations, len(files)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--root", type=Path, default=Path(__file__).parent.parent)
    violations, num_files = check(parser.parse_args().root)
    for violation in violations:
        print(violation)
    print(f"check_layers: {num_files} files, {len(violations)} violations")
    return 1 if violations or num_files == 0 else 0


if __name__ == "__main__":
    sys.exit(main())
