#!/usr/bin/env python3
"""Checks what belongs in the repository. Exit 0: clean. Exit 1: violations, one a line.

- No absolute path of someone's machine, no host of a package registry.
- No number of our own tracker. A report of another project is named in one word with it, as in cuFE#676; further
  numbers of the same list may follow on the line.
- Source files of at most 500 lines, no file above 4 MiB.

Looks at the files git tracks or would add; in a plain folder (an unpacked archive), at those that .gitignore leaves.
"""

import argparse
import fnmatch
import re
import subprocess
import sys
from pathlib import Path

MAX_LINES = 500
MAX_BYTES = 4 * 1024 * 1024
SOURCE_SUFFIXES = {".h", ".hpp", ".cuh", ".inl", ".c", ".cc", ".cpp", ".cu", ".py", ".sh", ".cmake"}

MACHINE_PATH = re.compile(r"(?<![\w./$})~-])/(?:work|farm|tmp|home|root|mnt|Users)/[\w.]")
REGISTRY_HOST = re.compile(r"\b(?:pypi\.org|files\.pythonhosted\.org|(?:deb|security|snapshot)\.debian\.org|archive\.ubuntu\.com)\b")
TRACKER_WORD = re.compile(r"\b(?:issue|ticket)s?\s+(?:no\.?\s*)?#?\d+", re.IGNORECASE)
# One to four digits: longer ones are colours, or numbers that only a large project has.
TRACKER_NUMBER = re.compile(r"(?<![\w#$&{/-])#\d{1,4}\b")
# What may stand before a further number: "project#1, #2 / #3 and ".
PEER_LIST = re.compile(r"[\w.-]*[A-Za-z][\w./-]*#\d+(?:\s*(?:,|/|;|and|or|\||\s)\s*#\d+)*\s*(?:,|/|;|and|or|\|)?\s*$")


def is_ignored(name: str, patterns: list[str]) -> bool:
    """Whether a folder or file of the path matches a pattern. The few forms that .gitignore here has: /name/, name/, name."""
    parts = name.split("/")
    return any(fnmatch.fnmatch(part, pattern.strip("/"))
               for pattern in patterns for part in (parts[:1] if pattern.startswith("/") else parts))


def listed_files(root: Path) -> list[str]:
    command = ["git", "-C", str(root), "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    try:
        listing = subprocess.run(command, check=True, capture_output=True).stdout.decode()
        names = {name for name in listing.split("\0") if name}
    except (OSError, subprocess.CalledProcessError):
        ignore = root / ".gitignore"
        patterns = [".git/"] + (ignore.read_text().split() if ignore.is_file() else [])
        found = (p.relative_to(root).as_posix() for p in root.rglob("*"))
        names = {name for name in found if not is_ignored(name, patterns)}
    return sorted(name for name in names if (root / name).is_file() and not (root / name).is_symlink())


def check_line(line: str) -> list[str]:
    problems = []
    if match := MACHINE_PATH.search(line):
        problems.append(f"a path of one machine: {line[match.start() :].split()[0]}")
    if match := REGISTRY_HOST.search(line):
        problems.append(f"names a registry host: {match.group()}")
    if match := TRACKER_WORD.search(line):
        problems.append(f"a number of the tracker: {match.group()}")
    for match in TRACKER_NUMBER.finditer(line):
        if not PEER_LIST.search(line[: match.start()]):
            problems.append(f"a number of the tracker, or a report without its project: {match.group()}")
    return problems


def check_file(root: Path, name: str) -> list[str]:
    data = (root / name).read_bytes()
    violations = []
    if len(data) > MAX_BYTES:
        violations.append(f"{name}: {len(data)} bytes, at most {MAX_BYTES}")
    if b"\0" in data[:8192] or name.endswith(".safetensors"):
        return violations
    lines = data.decode("utf-8", errors="replace").splitlines()
    if Path(name).suffix in SOURCE_SUFFIXES and len(lines) > MAX_LINES:
        violations.append(f"{name}: {len(lines)} lines, at most {MAX_LINES}")
    for number, line in enumerate(lines, start=1):
        violations += [f"{name}:{number}: {problem}" for problem in check_line(line)]
    return violations


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--root", type=Path, default=Path(__file__).parent.parent)
    root = parser.parse_args().root.resolve()
    names = listed_files(root)
    violations = [violation for name in names for violation in check_file(root, name)]
    for violation in violations:
        print(violation)
    print(f"check_repo: {len(names)} files, {len(violations)} violations")
    return 1 if violations or not names else 0


if __name__ == "__main__":
    sys.exit(main())
