"""`sparsemla run`: layouts, features and outputs, against numpy_reference.py."""

import numpy as np
import pytest
import safetensors
import tensor_file
from comparison import (assert_bitwise_equal, assert_forward, assert_gradients, assert_gradients_to_magnitude,
                        assert_logarithms)
from numpy_reference import rel_l2
from problems import make_iid
from tensor_file import numbers, to_bf16

FORWARD_OUTPUTS = {"out": (np.uint16, (6, 3, 512)), "lse": (np.float32, (6, 3)), "max_logits": (np.float32, (6, 3))}
RESIDUAL = {"out_residual": (np.uint16, (6, 3, 512))}
GRADIENTS = {"dq_latent": (np.uint16, (6, 3, 512)), "dkv_latent": (np.float32, (50, 512))}
ROPE_GRADIENTS = {"dq_rope": (np.uint16, (6, 3, 64)), "dk_rope": (np.float32, (50, 64))}


def signature(outputs):
    return {name: (array.dtype.type, array.shape) for name, array in outputs.items()}


# What is written.


def test_inference_writes_forward_outputs(program):
    outputs = program.run(make_iid())
    assert signature(outputs) == FORWARD_OUTPUTS


def test_training_adds_the_residual(program):
    assert signature(program.run(make_iid(), "--training")) == FORWARD_OUTPUTS | RESIDUAL


@pytest.mark.parametrize("rope", [True, False])
def test_backward_adds_gradients_and_no_rope_tensor_without_rope(program, rope):
    outputs = program.run(make_iid(rope=rope), "--backward")
    expected = FORWARD_OUTPUTS | RESIDUAL | GRADIENTS | (ROPE_GRADIENTS if rope else {})
    assert signature(outputs) == expected


def test_backward_with_a_sink_adds_dsink(program):
    problem = make_iid().with_tensors(sink=np.array([0.5, -1, 2], np.float32))
    assert signature(program.run(problem, "--backward"))["dsink"] == (np.float32, (3,))


def test_grad_dtype_fp32(program):
    outputs = program.run(make_iid(), "--backward", "--grad-dtype", "fp32")
    assert outputs["dq_latent"].dtype == outputs["dq_rope"].dtype == np.float32


def test_output_can_be_read_by_the_safetensors_package(program):
    problem = make_iid()
    source, target = problem.save(program.new_path()), program.new_path()
    program.succeed("run", source, "-o", target, "--backward")
    theirs = {name: entry["data"] for name, entry in safetensors.deserialize(target.read_bytes())}
    ours, _ = tensor_file.load(target)
    assert {name: bytes(data) for name, data in theirs.items()} == {name: a.tobytes() for name, a in ours.items()}


def written_by_the_package(tensors):
    names = {np.dtype(np.uint16): "bfloat16", np.dtype(np.int32): "int32"}
    if hasattr(safetensors, "TensorSpec"):  # 0.8 and later
        described = {name: safetensors.TensorSpec(dtype=names[a.dtype], shape=list(a.shape), data_ptr=a.ctypes.data,
                                                  data_len=a.nbytes)
                     for name, a in tensors.items()}
    else:
        described = {name: {"dtype": names[a.dtype], "shape": a.shape, "data": a.tobytes()}
                     for name, a in tensors.items()}
    return bytes(safetensors.serialize(described, {"format": "pt"}))


def test_input_written_by_the_safetensors_package_is_read(program):
    problem = make_iid()
    source, target = program.new_path(), program.new_path()
    source.write_bytes(written_by_the_package(problem.tensors))
    program.succeed("run", source, "-o", target)
    assert_bitwise_equal(program.run(problem), tensor_file.load(target)[0])


def test_existing_output_is_replaced(program):
    problem, target = make_iid(), program.new_path()
    target.write_bytes(b"something else")
    program.succeed("run", problem.save(program.new_path()), "-o", target)
    assert_bitwise_equal(program.run(problem), tensor_file.load(target)[0])


# Values.


@pytest.mark.parametrize("rope", [True, False])
@pytest.mark.parametrize("options", [(), ("--training",), ("--rescale-threshold", "8"), ("--key-block", "7"),
                                     ("--walk", "first-to-last"), ("--row-sum", "unrounded"), ("--operands", "split"),
                                     ("--canonical",), ("--residual", "off"), ("--deterministic",)])
def test_forward_matches_the_reference(program, rope, options):
    problem = make_iid(rope=rope)
    assert_forward(program.run(problem, *options), problem.reference())


@pytest.mark.parametrize("rope", [True, False])
@pytest.mark.parametrize("options", [(), ("--deterministic",), ("--canonical",), ("--grad-dtype", "fp32"),
                                     ("--operands", "split"), ("--key-block", "7"), ("--threads", "1")])
def test_gradients_match_the_reference(program, rope, options):
    problem = make_iid(rope=rope)
    outputs = program.run(problem, "--backward", *options)
    assert_forward(outputs, problem.reference())
    assert_gradients(outputs, problem.reference(), problem.tensors)


def featured_problem(causal):
    """Holes, huge indices, short lengths, two documents, tokens past the last one, a sink and dlse together."""
    problem = make_iid(num_tokens=9, num_keys=50, topk=20, seed=4, causal=causal, softmax_scale=0.07)
    generator = np.random.default_rng(9)
    lists = generator.integers(-2, 24, (9, 20)).astype(np.int32)
    lists[0, 3:6] = [2147483647, -2147483648, 50]
    return problem.with_tensors(
        indices=lists, topk_length=np.array([20, 7, 0, -3, 99, 20, 1, 20, 20], np.int32),
        cu_seqlens_q=np.array([0, 5, 8], np.int32), cu_seqlens_k=np.array([0, 22, 28], np.int32),
        sink=np.array([0.3, -np.inf, 1.5], np.float32), dlse=generator.standard_normal((9, 3)).astype(np.float32))


@pytest.mark.parametrize("causal", [False, True])
def test_all_features_together(program, causal):
    problem = featured_problem(causal)
    reference = problem.reference()
    assert np.isneginf(reference.lse).any() and np.isfinite(reference.lse).any()
    outputs = program.run(problem, "--backward")
    assert_forward(outputs, reference)
    assert_gradients_to_magnitude(outputs, reference, problem.tensors)
    assert outputs["dsink"][1] == 0  # a sink of -inf


def test_causal_and_scale_are_not_ignored(program):
    """The same tensors without the options give another result, so the test above cannot pass by ignoring them."""
    problem = featured_problem(causal=True)
    wanted = program.run(problem)
    for change in ({"causal": False}, {"softmax_scale": None}):
        other = featured_problem(causal=change.get("causal", True))
        other.softmax_scale = change.get("softmax_scale", 0.07)
        lse = program.run(other)["lse"]
        both = np.isfinite(lse) & np.isfinite(wanted["lse"])
        assert np.abs(lse[both] - wanted["lse"][both]).max() > 0.01


def test_scale_in_the_metadata_counts_and_the_option_wins(program):
    problem = make_iid(softmax_scale=0.2)
    by_option = program.run(problem)
    problem.softmax_scale, problem.metadata = None, {"softmax_scale": "0.2"}
    assert_bitwise_equal(by_option, program.run(problem))
    problem.metadata = {"softmax_scale": "0.9"}
    assert_bitwise_equal(by_option, program.run(problem, "--softmax-scale", "0.2"))


def test_dlse_alone(program):
    """dout = 0: the gradient of the lse is scale * sum p k, and nothing may drop it."""
    problem = make_iid()
    problem = problem.with_tensors(dout=np.zeros_like(problem.tensors["dout"]), dlse=np.ones((6, 3), np.float32))
    outputs = program.run(problem, "--backward")
    assert_gradients(outputs, problem.reference(), problem.tensors)
    assert np.abs(numbers(outputs["dq_latent"])).max() > 0


def test_infinite_sinks(program):
    problem = make_iid()
    plain = program.run(problem, "--backward")
    outputs = program.run(problem.with_tensors(sink=np.array([-np.inf, np.inf, 3.4e38], np.float32)), "--backward")
    for name in ("out", "lse", "max_logits", "dq_latent", "dq_rope"):
        assert outputs[name][:, 0].tobytes() == plain[name][:, 0].tobytes(), f"{name}: -inf is not bitwise no sink"
    assert np.all(numbers(outputs["out"])[:, 1:] == 0) and np.all(outputs["dsink"] == 0)
    assert outputs["lse"].tobytes() == plain["lse"].tobytes(), "lse is over the keys alone"
    for name in ("dq_latent", "dkv_latent"):
        assert np.all(np.isfinite(numbers(outputs[name])))


@pytest.mark.parametrize("offset", [5000.0, -30000.0])
def test_large_scores(program, offset):
    """Only differences of scores matter. lse near L is an fp32 number, so the gradients' p is known to L * 2^-23."""
    problem = make_iid(num_tokens=2, num_keys=4, topk=4, num_heads=1, rope=False, softmax_scale=1.0)
    q, kv = np.zeros((2, 1, 512)), np.zeros((4, 512))
    q[..., 0], kv[:, 0], kv[:, 1] = 1, offset, 1  # an exact common part; column 1 makes the keys differ
    q[..., 1] = 0.5
    kv[:, 1] = [0, 1, -1, 2]
    problem = problem.with_tensors(q_latent=to_bf16(q), kv_latent=to_bf16(kv))
    reference = problem.reference()
    outputs = program.run(problem, "--backward")
    assert_logarithms(outputs, reference, relative=1e-6)
    assert rel_l2(numbers(outputs["out"]), reference.out) <= 2.9e-3
    _, magnitudes = reference.gradients(problem.tensors)
    for name in ("dq_latent", "dkv_latent"):
        difference = np.linalg.norm(numbers(outputs[name]) - reference.gradients(problem.tensors)[0][name])
        assert difference <= (4e-3 + abs(offset) * 2.0**-23) * np.linalg.norm(magnitudes[name]), name


def test_nan_in_an_unselected_row_changes_nothing(program):
    problem = make_iid(num_keys=50, topk=20)
    used = set(problem.tensors["indices"].ravel().tolist())
    unused = sorted(set(range(50)) - used)
    lists = problem.tensors["indices"].copy()
    if not unused:
        lists[lists == 7] = -1
        unused = [7]
    problem = problem.with_tensors(indices=lists)
    kv = problem.tensors["kv_latent"].copy()
    kv[unused] = 0x7FC0
    poisoned = problem.with_tensors(kv_latent=kv)
    assert_bitwise_equal(program.run(problem, "--backward"), program.run(poisoned, "--backward"))


def test_nan_in_a_selected_row_reaches_exactly_its_rows(program):
    problem = make_iid(num_keys=50, topk=20)
    kv = problem.tensors["kv_latent"].copy()
    kv[7, 3] = 0x7FC0
    hit = (problem.tensors["indices"] == 7).any(-1)
    assert hit.any() and not hit.all()
    outputs, clean = program.run(problem.with_tensors(kv_latent=kv)), program.run(problem)
    assert np.all(np.isnan(outputs["lse"][hit]))
    for name in ("out", "lse", "max_logits"):
        assert outputs[name][~hit].tobytes() == clean[name][~hit].tobytes(), name


def test_duplicates_count_twice(program):
    problem = make_iid(num_tokens=1, num_keys=2, topk=3, num_heads=1)
    zero = {name: np.zeros_like(problem.tensors[name]) for name in ("q_latent", "q_rope")}
    problem = problem.with_tensors(indices=np.array([[0, 0, 1]], np.int32), **zero)
    outputs = program.run(problem, "--backward")
    assert outputs["lse"][0, 0] == pytest.approx(np.log(3), abs=1e-6)
    v = numbers(problem.tensors["kv_latent"])
    assert rel_l2(numbers(outputs["out"])[0, 0], (2 * v[0] + v[1]) / 3) < 2.9e-3
    np.testing.assert_allclose(outputs["dkv_latent"][0], 2 * outputs["dkv_latent"][1], rtol=1e-5)


@pytest.mark.parametrize("sizes", [{"num_tokens": 0}, {"num_keys": 0}, {"topk": 0}])
def test_empty_axes(program, sizes):
    problem = make_iid(**({"num_tokens": 2, "num_keys": 5, "topk": 4} | sizes))
    outputs = program.run(problem, "--backward")
    reference = problem.reference()
    assert outputs["out"].shape == reference.out.shape and outputs["dkv_latent"].shape == (len(reference.k), 512)
    assert np.all(numbers(outputs["out"]) == 0) and np.all(np.isneginf(outputs["lse"]))
    assert np.all(outputs["dkv_latent"] == 0) and np.all(numbers(outputs["dq_latent"]) == 0)


# Layouts.


@pytest.mark.parametrize("rope", [True, False])
def test_fused_tensors(program, rope):
    problem = make_iid(rope=rope)
    t = problem.tensors
    separate = program.run(problem, "--backward")
    q = np.concatenate([t["q_latent"], t["q_rope"]], -1) if rope else t["q_latent"]
    kv = np.concatenate([t["kv_latent"], t["k_rope"]], -1) if rope else t["kv_latent"]
    apart = {"q_latent": None, "q_rope": None, "kv_latent": None, "k_rope": None}
    assert_bitwise_equal(separate, program.run(problem.with_tensors(**apart, q=q, kv=kv), "--backward"))
    assert_bitwise_equal(separate, program.run(problem.with_tensors(**apart, q=q, kv=kv[:, None]), "--backward"))
    with_axis = problem.with_tensors(**apart, q=q, kv=kv[:, None], indices=t["indices"][:, None])
    assert_bitwise_equal(separate, program.run(with_axis, "--backward"))


def test_only_the_queries_fused(program):
    problem = make_iid()
    q = np.concatenate([problem.tensors["q_latent"], problem.tensors["q_rope"]], -1)
    mixed = problem.with_tensors(q_latent=None, q_rope=None, q=q)
    assert_bitwise_equal(program.run(problem), program.run(mixed))


# --reference.


def test_reference_option_gives_fp64(program):
    problem = featured_problem(causal=True)
    outputs = program.run(problem, "--backward", "--reference")
    ours = problem.reference()
    expected, magnitudes = ours.gradients(problem.tensors)
    for name, value in {"out": ours.out, "lse": ours.lse, "max_logits": ours.max_logits}.items():
        np.testing.assert_allclose(numbers(outputs[name]), value, rtol=1e-10, atol=1e-12, err_msg=name)
    for name, gradient in expected.items():
        error, size = np.linalg.norm(numbers(outputs[name]) - gradient), np.linalg.norm(magnitudes[name])
        assert error <= 1e-10 * size, name
