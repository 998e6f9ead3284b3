"""`sparsemla run`: what each pipeline option changes in the numbers, and what must never change them."""

import numpy as np
import pytest
from comparison import assert_bitwise_equal
from numpy_reference import rel_l2
from problems import make_iid, make_peaked
from tensor_file import numbers, to_bf16

BF16_ROUNDING = 1.66e-3


def row_gain_rms(stored_out, reference):
    """The coherent part of each row's error: <out - ref, ref> / <ref, ref>, rms over rows."""
    error, out = numbers(stored_out) - reference.out, reference.out
    gain = (error * out).sum(-1) / (out * out).sum(-1)
    return np.sqrt((gain**2).mean())


def dq_error(outputs, problem):
    gradients, _ = problem.reference().gradients(problem.tensors)
    names = ("dq_latent", "dq_rope")
    return rel_l2(np.concatenate([numbers(outputs[name]) for name in names], -1),
                  np.concatenate([gradients[name] for name in names], -1))


@pytest.fixture(scope="module")
def peaked():
    problem = make_peaked(0.25)
    reference = problem.reference()
    return problem, reference, row_gain_rms(to_bf16(reference.out), reference)


def test_lazy_max_met_last_shows_and_met_first_does_not(program, peaked):
    """The dominant key is in slot 0. Walked last to first with a threshold of 8, it keeps a stale max."""
    problem, reference, ideal = peaked

    def gain(threshold, walk):
        outputs = program.run(problem, "--rescale-threshold", threshold, "--walk", walk, "--key-block", "8")
        return row_gain_rms(outputs["out"], reference)

    assert gain("8", "last-to-first") > 5 * ideal, "the threshold or the walk is ignored"
    assert gain("8", "first-to-last") < 2 * ideal
    assert gain("0", "last-to-first") < 2 * ideal


@pytest.mark.parametrize("option", ["--training", "--backward"])
def test_training_takes_the_exact_max(program, peaked, option):
    problem, reference, ideal = peaked
    assert row_gain_rms(program.run(problem, option)["out"], reference) < 2 * ideal


def test_key_block_changes_a_lazy_walk(program, peaked):
    problem, _, _ = peaked
    blocks = [program.run(problem, "--rescale-threshold", "8", "--key-block", block)["out"].tobytes()
              for block in ("8", "64")]
    assert blocks[0] != blocks[1]


def test_rounded_row_sum_changes_lse(program, peaked):
    """Summing the rounded p moves lse by up to 2^-9; summing the unrounded one keeps it at fp32 accuracy."""
    problem, reference, _ = peaked
    error = {mode: np.abs(numbers(program.run(problem, "--rescale-threshold", "8", "--row-sum", mode)["lse"])
                          - reference.lse).max() for mode in ("unrounded", "rounded")}
    assert error["unrounded"] < 2e-5 < 1e-4 < error["rounded"] < 2.0**-8


def test_split_operands_leave_only_the_output_rounding(program):
    problem = make_iid(num_tokens=4, num_keys=300, topk=256, num_heads=8)
    reference = problem.reference()
    gradients, _ = reference.gradients(problem.tensors)
    split = program.run(problem, "--backward", "--operands", "split", "--grad-dtype", "fp32")
    rounded = program.run(problem, "--backward", "--operands", "bf16", "--grad-dtype", "fp32")
    assert rel_l2(numbers(split["out"]), reference.out) < 1.03 * BF16_ROUNDING
    assert rel_l2(numbers(rounded["out"]), reference.out) > 1.08 * BF16_ROUNDING
    for name, gradient in gradients.items():
        assert rel_l2(numbers(split[name]), gradient) < 2e-4, name
        assert rel_l2(numbers(rounded[name]), gradient) > 5e-4, name


def test_fp32_dq_is_the_same_before_its_rounding(program):
    problem = make_iid()
    wide, narrow = (program.run(problem, "--backward", "--grad-dtype", dtype) for dtype in ("fp32", "bf16"))
    for name in ("dq_latent", "dq_rope"):
        error = np.abs(numbers(narrow[name]) - numbers(wide[name]))
        assert 0 < error.max() and np.all(error <= 2.0**-8 * np.abs(numbers(wide[name])))
    assert_bitwise_equal(wide, narrow, ["out", "lse", "dkv_latent", "dk_rope"])


def test_residual_repairs_dq_on_peaked_attention(program):
    problem = make_peaked(0.4)
    on, off = (dq_error(program.run(problem, "--backward", "--residual", state), problem) for state in ("on", "off"))
    assert on < 2.9e-3
    assert off > 2 * on, "without the residual the error must show, or the option is ignored"


def test_residual_is_what_rounding_took_from_out(program):
    problem = make_iid()
    reference = problem.reference()
    outputs = program.run(problem, "--training", "--operands", "split")
    out, residual = numbers(outputs["out"]), numbers(outputs["out_residual"])
    half_ulp = 2.0 ** (np.frexp(out)[1] - 9)  # bf16 has 8 significant bits
    assert np.all(np.abs(residual) <= half_ulp) and np.abs(residual).max() > 0
    assert rel_l2(out + residual, reference.out) < 0.02 * rel_l2(out, reference.out)


def test_residual_off_writes_none(program):
    assert "out_residual" not in program.run(make_iid(), "--training", "--residual", "off")


@pytest.mark.parametrize("options", [(), ("--rescale-threshold", "8"), ("--operands", "split"), ("--deterministic",)])
def test_bitwise_the_same_for_any_thread_count_and_again(program, options):
    problem = make_iid(num_tokens=17, num_keys=90, topk=70, num_heads=5)
    first = program.run(problem, "--backward", "--threads", "1", *options)
    for threads in ("2", "3", "1"):
        assert_bitwise_equal(first, program.run(problem, "--backward", "--threads", threads, *options))


def permuted(problem, seed):
    generator = np.random.default_rng(seed)
    lists = np.stack([generator.permutation(row) for row in problem.tensors["indices"]])
    return problem.with_tensors(indices=lists)


def hostile_problem():
    """Holes, duplicates, values out of range, equal and huge scores."""
    problem = make_iid(num_tokens=8, num_keys=60, topk=80, num_heads=2, softmax_scale=2.0)
    lists = np.random.default_rng(8).integers(-5, 66, (8, 80)).astype(np.int32)
    kv = problem.tensors["kv_latent"].copy()
    kv[10:20] = kv[10]
    return problem.with_tensors(indices=lists, kv_latent=kv, sink=np.array([1.0, -2.0], np.float32))


@pytest.mark.parametrize("make", [make_iid, hostile_problem, lambda: make_peaked(0.4)])
def test_canonical_is_bitwise_the_same_for_any_order(program, make):
    problem = make()
    first = program.run(problem, "--backward", "--canonical")
    for seed in range(5):
        assert_bitwise_equal(first, program.run(permuted(problem, seed), "--backward", "--canonical"))


def test_without_canonical_the_order_shows(program):
    """Otherwise the test above proves nothing."""
    problem = make_peaked(0.4)
    first, second = (program.run(permuted(problem, seed), "--backward") for seed in (1, 2))
    assert first["dq_latent"].tobytes() != second["dq_latent"].tobytes()


@pytest.mark.parametrize("threshold", ["0", "0.5", "8", "64", "127.9"])
def test_every_safe_threshold_runs(program, threshold):
    problem = make_iid()
    outputs = program.run(problem, "--rescale-threshold", threshold)
    assert rel_l2(numbers(outputs["out"]), problem.reference().out) < 2.9e-3
