"""The checkers of scripts/ fail on what they are there for: one planted violation each, beside a clean tree that passes."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
SCRIPTS = REPOSITORY / "scripts"

CLEAN_TREE = {
    "include/sparsemla/tensor.h": "#include <array>\n#include <dlpack/dlpack.h>\n",
    "include/sparsemla/attention.h": '#include <vector>\n#include "sparsemla/tensor.h"\n',
    "src/core/sizes.h": '#include "sparsemla/tensor.h"\n',
    "src/validate/validate.h": '#include "core/sizes.h"\n#include "sparsemla/attention.h"\n',
    "src/plan/plan.h": '#include "dispatch/registry.h"\n',
    "src/dispatch/registry.h": '#include "backends/backend.h"\n',
    "src/backends/backend.h": '#include "sparsemla/attention.h"\n',
    "src/backends/cpu/forward.cpp": '#include <Eigen/Core>\n#include "backends/backend.h"\n#include "core/sizes.h"\n',
    "src/backends/sm90/forward.cu": '#include <cute/tensor.hpp>\n#include <cuda_bf16.h>\n#include "core/sizes.h"\n',
    "src/api/attention.cpp": '#include "validate/validate.h"\n#include "plan/plan.h"\n#include "dispatch/registry.h"\n',
    "reference/reference.cpp": '#include "reference/reference.h"\n#include "sparsemla/attention.h"\n',
    "reference/reference.h": "#include <vector>\n",
    "numerics/metrics.cpp": '#include "numerics/parallel.h"\n/* #include "core/sizes.h" */\n// #include "core/sizes.h"\n',
    "numerics/parallel.h": "#include <thread>\n",
    "device/memory.cpp": '#include <cuda_runtime_api.h>\n#include "sparsemla/tensor.h"\n',
    "tests/cuda/stream_test.cpp": '#include <cuda_runtime.h>\n#include "core/sizes.h"\n',
    "tests/plan_test.cpp": '#include <gtest/gtest.h>\n#include "plan/plan.h"\n#include "core/sizes.h"\n',
}


def write_tree(root, files):
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text if isinstance(text, bytes) else text.encode())


def run_checker(script, root):
    command = [sys.executable, SCRIPTS / script, "--root", root]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    return result.returncode, result.stdout + result.stderr


def test_clean_tree_has_no_layer_violations(tmp_path):
    write_tree(tmp_path, CLEAN_TREE)
    assert run_checker("check_layers.py", tmp_path) == (0, f"check_layers: {len(CLEAN_TREE)} files, 0 violations\n")


def test_a_tree_without_sources_is_no_pass(tmp_path):
    assert run_checker("check_layers.py", tmp_path)[0] == 1
    assert run_checker("check_repo.py", tmp_path)[0] == 1


@pytest.mark.parametrize(
    ("path", "line"),
    [
        ("include/sparsemla/tensor.h", "#include <cuda_runtime.h>"),
        ("include/sparsemla/tensor.h", "#include <Eigen/Core>"),
        ("include/sparsemla/tensor.h", "#include <torch/extension.h>"),
        ("include/sparsemla/tensor.h", "#include <cute/tensor.hpp>"),
        ("include/sparsemla/tensor.h", "#include <fmt/format.h>"),
        ("include/sparsemla/tensor.h", '#include "core/sizes.h"'),
        ("src/core/sizes.h", '#include "backends/cpu/forward.h"'),
        ("src/core/sizes.h", '#include "plan/plan.h"'),
        ("src/core/sizes.h", "#include <cuda_bf16.h>"),
        ("src/backends/cpu/forward.cpp", '#include "backends/sm90/config.h"'),
        ("src/backends/cpu/forward.cpp", '#include "../sm90/forward.cu"'),
        ("src/backends/cpu/forward.cpp", '#include "dispatch/registry.h"'),
        ("src/backends/cpu/forward.cpp", '#include "validate/validate.h"'),
        ("src/backends/cpu/forward.cpp", "#include <cutlass/cutlass.h>"),
        ("src/backends/cpu/forward.cpp", "  #  include <cuda/atomic>"),
        ("src/plan/plan.h", '#include "backends/cpu/forward.h"'),
        ("src/plan/plan.h", '#include "api/attention.h"'),
        ("src/api/attention.cpp", '#include "backends/backend.h"'),
        ("reference/reference.cpp", '#include "backends/cpu/forward.h"'),
        ("reference/reference.cpp", '#include "core/sizes.h"'),
        ("reference/reference.cpp", '#include "../src/core/sizes.h"'),
        ("reference/reference.cpp", '#include "numerics/parallel.h"'),
        ("numerics/metrics.cpp", '#include "backends/cpu/forward.h"'),
        ("numerics/metrics.cpp", '#include "src/core/sizes.h"'),
        ("tests/plan_test.cpp", "#include <cute/tensor.hpp>"),
        ("tests/plan_test.cpp", "#include <cuda_runtime.h>"),
        ("tests/cuda/stream_test.cpp", "#include <cute/tensor.hpp>"),
        ("device/memory.cpp", "#include <cutlass/cutlass.h>"),
        ("device/memory.cpp", '#include "core/sizes.h"'),
        ("helpers/more.h", "#include <vector>"),
    ],
)
def test_layer_violation_is_found(tmp_path, path, line):
    write_tree(tmp_path, CLEAN_TREE | {path: CLEAN_TREE.get(path, "") + line + "\n"})
    status, output = run_checker("check_layers.py", tmp_path)
    assert status == 1, f"{line} in {path} passed"
    assert path in output
    assert output.endswith("1 violations\n")


def test_circle_among_the_middle_layers_is_found(tmp_path):
    write_tree(tmp_path, CLEAN_TREE | {"src/dispatch/registry.h": '#include "plan/plan.h"\n'})
    status, output = run_checker("check_layers.py", tmp_path)
    assert status == 1
    assert "src/dispatch -> src/plan -> src/dispatch" in output


CLEAN_TEXTS = [
    "see cuFE#676",
    "| 27 | cuFE#421, #405 | sink |",
    "vllm#36616, #36524 / #44550 and deepseek-ai/FlashMLA#106",
    'color = "#004488"; other = "#1f77b4"',
    "cd $(mktemp -d) && ls src/home/x ./tmp/a $HOME/work/a https://example.org/home/user",
    "an issue of 3 columns; #if 0; $#; ${#1}; a ##1",
]


def slash(path):
    """A path that stands nowhere in this file, which is checked like any other."""
    return "/" + path


DIRTY_TEXTS = [
    f"cp {slash('work')}/main/a b",
    f"see {slash('root')}/.pyenv",
    f'path = "{slash("home")}/me/x"',
    f"{slash('tmp')}/result.txt",
    "fixed in " + "#" + "12",
    "as " + "issue" + " 2 asks",
    "(" + "Issue" + " #" + "2)",
    "cuFE#1 differs from what " + "#" + "3 says",
    "pip install --index-url https://" + "pypi" + ".org/simple",
]


@pytest.mark.parametrize("text", CLEAN_TEXTS)
def test_clean_text_passes(tmp_path, text):
    write_tree(tmp_path, {"notes.md": text + "\n"})
    assert run_checker("check_repo.py", tmp_path) == (0, "check_repo: 1 files, 0 violations\n")


@pytest.mark.parametrize("text", DIRTY_TEXTS)
def test_dirty_text_is_found(tmp_path, text):
    write_tree(tmp_path, {"notes.md": "clean\n" + text + "\n"})
    status, output = run_checker("check_repo.py", tmp_path)
    assert status == 1, f"passed: {text}"
    assert output.startswith("notes.md:2: ")


def test_sizes(tmp_path):
    longest = "line\n" * 500
    write_tree(tmp_path, {"a.py": longest, "long.md": longest * 2, "limit.bin": b"\0" * 4 * 1024 * 1024})
    assert run_checker("check_repo.py", tmp_path)[0] == 0
    write_tree(tmp_path, {"b.cpp": longest + "line\n"})
    assert "b.cpp: 501 lines" in run_checker("check_repo.py", tmp_path)[1]
    write_tree(tmp_path, {"b.cpp": longest, "data.bin": b"\0" * (4 * 1024 * 1024 + 1)})
    status, output = run_checker("check_repo.py", tmp_path)
    assert (status, output.count("data.bin: 4194305 bytes")) == (1, 1)


@pytest.mark.parametrize("is_repository", [True, False])
def test_ignored_files_do_not_count(tmp_path, is_repository):
    if is_repository:
        subprocess.run(["git", "init", "-q", tmp_path], check=True)
    write_tree(tmp_path, {".gitignore": "/build/\n__pycache__/\n*.tmp/\n", "build/log.txt": DIRTY_TEXTS[0],
                          "a/__pycache__/b.txt": DIRTY_TEXTS[0], "c.tmp/d.txt": DIRTY_TEXTS[0]})
    assert run_checker("check_repo.py", tmp_path)[0] == 0
    write_tree(tmp_path, {"new.txt": DIRTY_TEXTS[0]})
    assert run_checker("check_repo.py", tmp_path)[0] == 1, "a file git would add counts before it is added"


def check_cuda(folder, **environment):
    command = ["bash", SCRIPTS / "check_cuda.sh", folder]
    result = subprocess.run(command, capture_output=True, text=True, check=False, env=os.environ | environment)
    return result.returncode, result.stdout + result.stderr


def test_cuda_check_without_files_says_so(tmp_path):
    status, output = check_cuda(tmp_path)
    assert (status, "no CUDA files" in output) == (0, True)


def test_cuda_check_needs_nvcc_in_ci(tmp_path):
    write_tree(tmp_path, {"src/a.cu": "__global__ void kernel() {}\n"})
    bare = tmp_path / "bin"
    bare.mkdir()
    for tool in "bash", "dirname", "find", "sort":
        (bare / tool).symlink_to(shutil.which(tool))
    assert check_cuda(tmp_path / "src", PATH=str(bare), CI="true")[0] == 1
    assert check_cuda(tmp_path / "src", PATH=str(bare), CI="")[0] == 0


CLEAN_KERNEL = "__global__ void scale(float* x) { x[threadIdx.x] *= 2.0f; }\n"
LOCAL_MEMORY_KERNEL = """__global__ void local(float* x, int n) {
  float values[64];
  for (int i = 0; i < 64; ++i) values[i] = x[i];
  for (int i = 0; i < n; ++i) values[(n * i) % 64] += values[i % 64];
  x[0] = values[n];
}
"""


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="no nvcc on this machine")
@pytest.mark.parametrize(
    ("text", "status"), [(CLEAN_KERNEL, 0), (LOCAL_MEMORY_KERNEL, 1), ("#error not yet\n", 1)], ids=["clean", "local", "broken"]
)
def test_cuda_check_refuses_local_memory(tmp_path, text, status):
    write_tree(tmp_path, {"a.cu": CLEAN_KERNEL, "b.cu": text})
    found, output = check_cuda(tmp_path)
    assert found == status, output


@pytest.mark.parametrize(
    ("line", "status"),
    [
        ("    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads", 0),
        ("    16 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads", 1),
        ("    0 bytes stack frame, 100 bytes spill stores, 104 bytes spill loads", 1),
        ("ptxas info    : Used 255 registers, 40 bytes lmem", 1),
        ("ptxas info    : (C7510) Potential Performance Loss: wgmma.mma_async instructions are serialized due to", 1),
    ],
)
def test_cuda_check_reads_what_ptxas_says(tmp_path, line, status):
    write_tree(tmp_path, {"src/a.cu": "", "bin/nvcc": f"#!/bin/sh\necho '{line}'\n"})
    (tmp_path / "bin/nvcc").chmod(0o755)
    path = f"{tmp_path / 'bin'}:{os.environ['PATH']}"
    assert check_cuda(tmp_path / "src", PATH=path)[0] == status


def test_readme_call_is_what_the_consumer_test_compiles():
    readme = (REPOSITORY / "README.md").read_text(encoding="utf-8")
    source = (REPOSITORY / "tests" / "consumer" / "main.cpp").read_text(encoding="utf-8")
    shown = readme.split("```cpp\n")[1].split("```")[0].strip().splitlines()
    compiled = source.split("// [readme]\n")[1].rstrip().splitlines()
    assert [line.strip() for line in compiled] == [line.strip() for line in shown if not line.startswith("#include")]
