"""The program under test: $SPARSEMLA_BIN, or build/bin/sparsemla of this repository. It must exist."""

import os
import subprocess
from pathlib import Path

import pytest
import tensor_file

REPOSITORY = Path(__file__).resolve().parents[2]
TIMEOUT_SECONDS = 300


class Program:
    def __init__(self, path, folder):
        self.path, self.folder, self.count = path, folder, 0

    def call(self, *arguments):
        """Runs it; whatever comes, it must end by itself, not by a signal."""
        result = subprocess.run([str(self.path), *map(str, arguments)], capture_output=True, text=True, cwd=self.folder,
                                timeout=TIMEOUT_SECONDS, check=False)
        assert result.returncode >= 0, f"ended by signal {-result.returncode}: {arguments}\n{result.stderr}"
        return result

    def succeed(self, *arguments):
        result = self.call(*arguments)
        assert result.returncode == 0, f"exit code {result.returncode}: {arguments}\n{result.stderr}"
        return result

    def new_path(self, suffix=".safetensors"):
        self.count += 1
        return self.folder / f"file{self.count}{suffix}"

    def run(self, problem, *options):
        """Outputs of `run` on a problem: name -> array as stored."""
        source, target = problem.save(self.new_path()), self.new_path()
        self.succeed("run", source, "-o", target, *problem.options(), *options)
        return tensor_file.load(target)[0]

    def reject(self, named, *arguments):
        """The call must end with exit code 2, exactly one line on stderr that holds `named`, and no new file."""
        before = sorted(self.folder.rglob("*"))
        result = self.call(*arguments)
        assert result.returncode == 2, f"exit code {result.returncode}, want 2: {arguments}\n{result.stderr}"
        lines = result.stderr.splitlines()
        assert len(lines) == 1 and lines[0].strip(), f"want one line on stderr, found {len(lines)}:\n{result.stderr}"
        assert named in lines[0], f"the message does not name {named!r}: {lines[0]}"
        assert sorted(self.folder.rglob("*")) == before, "a file was left behind"
        return lines[0]


@pytest.fixture(scope="session")
def binary():
    path = Path(os.environ.get("SPARSEMLA_BIN", REPOSITORY / "build" / "bin" / "sparsemla")).resolve()
    if not os.access(path, os.X_OK):
        pytest.fail(f"{path}: found no program, want `make build` first or its path in SPARSEMLA_BIN")
    return path


@pytest.fixture
def program(binary, tmp_path):
    return Program(binary, tmp_path)


@pytest.fixture(scope="session")
def repository():
    return REPOSITORY
