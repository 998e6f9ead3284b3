"""The captured transformer layer under tests/data, and the program on it."""

import json

import numpy as np
import pytest
import tensor_file
from comparison import assert_forward, assert_gradients_to_magnitude
from problems import Problem
from tensor_file import numbers

MAX_BYTES = 4_000_000


@pytest.fixture(scope="module")
def captured(repository):
    path = repository / "tests" / "data" / "minilm_layer1.safetensors"
    assert path.stat().st_size <= MAX_BYTES
    tensors, metadata = tensor_file.load(path)
    return path, tensors, metadata


def test_layout(captured):
    _, tensors, metadata = captured
    assert {name: (a.dtype, a.shape) for name, a in tensors.items()} == {
        "q_latent": (np.uint16, (128, 12, 512)), "kv_latent": (np.uint16, (256, 512)),
        "indices": (np.int32, (128, 128)), "dout": (np.uint16, (128, 12, 512))}
    assert float(metadata["softmax_scale"]) == pytest.approx(32**-0.5, rel=1e-7)
    for name in ("q_latent", "kv_latent", "dout"):
        assert np.all(tensors[name][..., 384:] == 0) and np.all(np.isfinite(numbers(tensors[name])))


def test_lists_are_the_true_top_keys_strongest_first(captured):
    """Attention of the rounded tensors over all keys, summed over heads, descends along each list up to rounding."""
    _, tensors, metadata = captured
    logits = float(metadata["softmax_scale"]) * np.einsum("thd,sd->ths", numbers(tensors["q_latent"]),
                                                         numbers(tensors["kv_latent"]), optimize=True)
    p = np.exp(logits - logits.max(-1, keepdims=True))
    summed = (p / p.sum(-1, keepdims=True)).sum(1)  # [T, S]
    lists = tensors["indices"]
    assert all(len(set(row)) == 128 for row in lists.tolist()) and lists.min() >= 0 and lists.max() < 256
    along = np.take_along_axis(summed, lists.astype(np.int64), -1)
    rounding = 0.02  # of a weight: logits near 15, whose terms were rounded by up to 2^-9 each; 0.012 was seen
    assert np.all(along[:, 1:] <= along[:, :-1] * (1 + rounding))
    left_out = np.sort(summed, -1)[:, -129]
    assert np.all(left_out <= along[:, -1] * (1 + rounding))
    assert np.median(along[:, 0]) / 12 > 0.15, "real attention is peaked; this would not be"


def test_run_matches_the_reference(program, captured):
    path, tensors, metadata = captured
    problem = Problem(tensors, softmax_scale=float(metadata["softmax_scale"]))
    target = program.new_path()
    program.succeed("run", path, "-o", target, "--backward", *problem.options())
    outputs, _ = tensor_file.load(target)
    reference = problem.reference()
    assert_forward(outputs, reference)
    assert_gradients_to_magnitude(outputs, reference, tensors)


def test_audit_passes(program, captured):
    path, _, metadata = captured
    scale = metadata["softmax_scale"]
    program.succeed("audit", path, "--softmax-scale", scale, "--gradients", "--check", "--pipelines", "exact")


def test_the_stale_max_shows_on_real_data(program, captured):
    """The strongest key in slot 0, met last: what the audit is for, or `make demo` would show nothing."""
    path, _, _ = captured
    report = json.loads(program.succeed("audit", path, "--pipelines", "lazy,exact", "--json", "-").stdout)
    gain = {entry["pipeline"]: entry["row_gain_rms"] for entry in report["order_difference"]}
    assert gain["lazy"] > 5 * gain["exact"] > 0
