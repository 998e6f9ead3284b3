"""`sparsemla audit`: its JSON, its verdict, and the judgement of a candidate."""

import json
import math

import numpy as np
import pytest
import tensor_file
from problems import make_iid, make_peaked
from tensor_file import numbers, to_bf16

SETUP = {"tokens", "keys", "topk", "heads", "latent_dim", "rope_dim", "beta", "seed", "softmax_scale", "backend",
         "self_weight_median", "self_weight_p90"}
FORWARD = {"out_rel_l2", "row_gain_rms", "row_gain_p99", "row_gain_max", "lse_max_abs"}
DIFFERENCE = {"out_rel_l2", "row_gain_rms", "noise_floor", "ratio"}
GRADIENT_ERRORS = {"dq_rope_rel_l2", "dq_latent_rel_l2", "dk_rope_rel_l2", "dkv_latent_rel_l2", "dq_row_p99",
                   "dq_row_p999"}
# Lists longer than a key block of 64, or lazy and exact are the same.
SMALL = ["--peaked", "--tokens", "160", "--keys", "160", "--topk", "96", "--heads", "4", "--beta", "0.25",
         "--seed", "3"]
MEDIUM = ["--peaked", "--tokens", "192", "--keys", "192", "--topk", "96", "--heads", "16", "--beta", "0.25"]


def audit(program, *options, expect=0):
    """The JSON of an audit that ends with `expect`."""
    target = program.new_path(".json")
    result = program.call("audit", *options, "--json", target)
    assert result.returncode == expect, f"exit code {result.returncode}, want {expect}\n{result.stderr}"
    return json.loads(target.read_text())


def finite(entry, keys):
    for key in keys:
        assert isinstance(entry[key], (int, float)) and math.isfinite(entry[key]) and entry[key] >= 0, (key, entry)


@pytest.fixture(scope="module")
def small_report(binary, tmp_path_factory):
    from conftest import Program

    return audit(Program(binary, tmp_path_factory.mktemp("audit")), *SMALL, "--pipelines", "lazy,exact", "--orders",
                 "first,last,ascending,random", "--gradients")


# JSON.


def test_setup_and_floors(small_report):
    setup = small_report["setup"]
    assert SETUP <= setup.keys()
    asked = {"tokens": 160, "keys": 160, "topk": 96, "heads": 4, "latent_dim": 512, "rope_dim": 64, "seed": 3}
    assert {key: setup[key] for key in asked} == asked
    assert setup["beta"] == pytest.approx(0.25) and setup["softmax_scale"] == pytest.approx(1 / 24)
    assert setup["backend"] == "cpu" and 0 < setup["self_weight_median"] <= setup["self_weight_p90"] <= 1
    # One bf16 rounding of normal data; plain fractions, not percent.
    assert small_report["floors"]["out_rel_l2"] == pytest.approx(1.66e-3, rel=0.05)
    assert 0 < small_report["floors"]["row_gain_rms"] < 5e-4


def test_forward_entries(small_report):
    forward = small_report["forward"]
    expected = {(p, o) for p in ("lazy", "exact") for o in ("first", "last", "ascending", "random")}
    assert len(forward) == len(expected) and {(e["pipeline"], e["order"]) for e in forward} == expected
    for entry in forward:
        finite(entry, FORWARD)
        assert entry["row_gain_rms"] <= entry["row_gain_p99"] <= entry["row_gain_max"]
        assert 1e-3 < entry["out_rel_l2"] < 4e-3
        if "row_gain_histogram" in entry:
            histogram = entry["row_gain_histogram"]
            assert len(histogram["edges"]) == len(histogram["counts"]) + 1
            assert histogram["edges"] == sorted(histogram["edges"]) and sum(histogram["counts"]) == 160 * 4


def test_order_differences(small_report):
    differences = {entry["pipeline"]: entry for entry in small_report["order_difference"]}
    assert differences.keys() == {"lazy", "exact"}
    for entry in differences.values():
        finite(entry, DIFFERENCE)
        assert {"first", "last"} == set(entry["orders"]) and entry["bitwise_equal"] is False
        assert entry["ratio"] == pytest.approx(entry["row_gain_rms"] / entry["noise_floor"], rel=1e-6)
    assert differences["lazy"]["ratio"] > 3 * differences["exact"]["ratio"]


def test_gradient_entries(small_report):
    gradients = small_report["gradients"]
    combinations = {(e["pipeline"], e["order"], e["residual"], e["operands"]) for e in gradients}
    assert len(combinations) == len(gradients)
    assert combinations == {(p, o, r, s) for p in ("lazy", "exact") for o in ("first", "last", "ascending", "random")
                            for r in (True, False) for s in ("bf16", "split")}
    for entry in gradients:
        finite(entry, GRADIENT_ERRORS)
        assert entry["dq_row_p99"] <= entry["dq_row_p999"] and entry["dq_latent_rel_l2"] < 1


def test_verdict(small_report):
    verdict = small_report["verdict"]
    assert isinstance(verdict["passed"], bool) and verdict["passed"] == (verdict["failures"] == [])
    assert all(isinstance(failure, str) and failure for failure in verdict["failures"])


def test_without_gradients_the_list_is_empty(program):
    assert audit(program, *SMALL)["gradients"] == []


def test_json_on_stdout_is_nothing_but_json(program):
    result = program.succeed("audit", *SMALL, "--json", "-")
    assert SETUP <= json.loads(result.stdout)["setup"].keys()


def test_table_names_pipelines_and_orders(program):
    table = program.succeed("audit", *SMALL, "--pipelines", "lazy,exact", "--orders", "first,last").stdout
    for word in ("lazy", "exact", "first", "last"):
        assert word in table


def test_same_figures_for_any_thread_count(program):
    one, two = (audit(program, *SMALL, "--gradients", "--threads", threads) for threads in ("1", "2"))
    assert one == two


def test_seed_and_beta_count(program):
    base = audit(program, *SMALL)
    assert audit(program, *SMALL[:-1], "4")["forward"] != base["forward"]
    sharper = audit(program, *SMALL[:-4], "--beta", "0.4", "--seed", "3")
    assert sharper["setup"]["self_weight_median"] > base["setup"]["self_weight_median"]


def test_canonical_is_bitwise_equal_over_orders(program):
    (difference,) = audit(program, *SMALL, "--pipelines", "canonical")["order_difference"]
    assert difference["bitwise_equal"] is True and difference["ratio"] == 0


# The verdict.


def test_check_passes_the_exact_pipeline(program):
    report = audit(program, *MEDIUM, "--pipelines", "exact", "--gradients", "--check")
    assert report["verdict"] == {"passed": True, "failures": []}


def test_check_fails_the_lazy_pipeline(program):
    report = audit(program, *MEDIUM, "--pipelines", "lazy", "--check", expect=1)
    assert report["verdict"]["passed"] is False and report["verdict"]["failures"]
    without_check = audit(program, *MEDIUM, "--pipelines", "lazy")
    assert without_check["verdict"] == report["verdict"], "--check changes the exit code alone"


# A file as input.


def test_input_file(program):
    problem = make_peaked(0.25)
    report = audit(program, problem.save(program.new_path()), "--gradients")
    setup = report["setup"]
    assert (setup["tokens"], setup["keys"], setup["topk"], setup["heads"]) == (96, 96, 64, 8)
    assert {entry["pipeline"] for entry in report["forward"]} >= {"exact"} and report["gradients"]


def test_input_without_rope_has_no_rope_errors(program):
    report = audit(program, make_iid(rope=False).save(program.new_path()), "--gradients")
    assert report["setup"]["rope_dim"] == 0
    for entry in report["gradients"]:
        assert entry.get("dq_rope_rel_l2") is None and entry.get("dk_rope_rel_l2") is None
        finite(entry, {"dq_latent_rel_l2", "dkv_latent_rel_l2"})


def test_gradients_without_dout_are_rejected(program):
    source = make_iid(gradient=False).save(program.new_path())
    program.reject("dout", "audit", source, "--gradients")


def test_file_and_generated_problem_together_are_rejected(program):
    program.reject("audit", "audit", make_iid().save(program.new_path()), "--peaked")


# Candidates: what some other kernel made of the same inputs.


@pytest.fixture
def judged(program):
    """(judge, outputs): judge(candidate tensors, *options, expect) -> JSON, for one problem."""
    problem = make_peaked(0.25)
    source = problem.save(program.new_path())
    forward = problem.reference()
    gradients, _ = forward.gradients(problem.tensors)
    ideal = {"out": to_bf16(forward.out), "lse": forward.lse.astype(np.float32)}
    ideal |= {name: to_bf16(value) if name.startswith("dq") else value.astype(np.float32)
              for name, value in gradients.items()}

    def judge(tensors, *options, expect=0):
        candidate = program.new_path()
        tensor_file.save(candidate, tensors)
        return audit(program, source, "--candidate", candidate, "--check", *options, expect=expect)

    return judge, ideal


def candidate_entries(report, section):
    return [entry for entry in report[section] if "candidate" in entry["pipeline"]]


def test_ideal_candidate_passes(judged):
    judge, ideal = judged
    report = judge(ideal)
    assert report["verdict"]["passed"] is True
    (forward,), (gradient,) = candidate_entries(report, "forward"), candidate_entries(report, "gradients")
    assert forward["out_rel_l2"] == pytest.approx(report["floors"]["out_rel_l2"], rel=1e-6)
    assert forward["row_gain_rms"] == pytest.approx(report["floors"]["row_gain_rms"], rel=1e-6)
    assert gradient["dq_latent_rel_l2"] == pytest.approx(1.66e-3, rel=0.05) and gradient["dkv_latent_rel_l2"] < 1e-6


def test_forward_alone_is_judged(judged):
    judge, ideal = judged
    assert candidate_entries(judge({"out": ideal["out"]}), "forward")
    assert judge({"out": ideal["out"]})["verdict"]["passed"] is True


def test_an_output_of_run_is_a_candidate(program):
    problem = make_peaked(0.25)
    source, target = problem.save(program.new_path()), program.new_path()
    program.succeed("run", source, "-o", target, "--backward")
    report = audit(program, source, "--candidate", target, "--check")
    assert report["verdict"]["passed"] is True and candidate_entries(report, "gradients")


def test_lazy_candidate_fails_on_row_gain(program):
    """What the audit exists for: a kernel whose element-wise error looks like rounding but scales whole rows."""
    problem = make_peaked(0.25)
    source, target = problem.save(program.new_path()), program.new_path()
    program.succeed("run", source, "-o", target, "--rescale-threshold", "8", "--key-block", "8")
    report = audit(program, source, "--candidate", target, "--check", expect=1)
    assert any("gain" in failure for failure in report["verdict"]["failures"])


@pytest.mark.parametrize("factor", [1.01, 0.99, -1.0])
def test_scaled_output_fails(judged, factor):
    judge, ideal = judged
    bad = ideal | {"out": to_bf16(factor * numbers(ideal["out"]))}
    report = judge(bad, expect=1)
    assert report["verdict"]["passed"] is False
    assert any("out" in failure or "gain" in failure for failure in report["verdict"]["failures"])


@pytest.mark.parametrize("name", ["dq_latent", "dq_rope", "dkv_latent", "dk_rope"])
def test_wrong_gradient_fails_by_name(judged, name):
    judge, ideal = judged
    scaled = 1.02 * numbers(ideal[name])
    bad = ideal | {name: to_bf16(scaled) if name.startswith("dq") else scaled.astype(np.float32)}
    report = judge(bad, expect=1)
    assert any(name in failure for failure in report["verdict"]["failures"])


def test_lse_in_another_unit_fails(judged):
    judge, ideal = judged
    bad = ideal | {"lse": (ideal["lse"] / math.log(2)).astype(np.float32)}
    assert any("lse" in failure for failure in judge(bad, expect=1)["verdict"]["failures"])


@pytest.mark.parametrize("bits", [0x7FC0, 0x7F80, 0xFF80])
def test_one_non_finite_element_fails(judged, bits):
    judge, ideal = judged
    out = ideal["out"].copy()
    out[5, 2, 100] = bits
    assert judge(ideal | {"out": out}, expect=1)["verdict"]["passed"] is False


def test_one_row_of_zeros_fails(judged):
    judge, ideal = judged
    out = ideal["out"].copy()
    out[40, 3] = 0
    assert judge(ideal | {"out": out}, expect=1)["verdict"]["passed"] is False


def test_without_check_the_exit_code_is_0_but_the_verdict_stands(program):
    problem = make_peaked(0.25)
    candidate = program.new_path()
    tensor_file.save(candidate, {"out": np.zeros((96, 8, 512), np.uint16)})
    report = audit(program, problem.save(program.new_path()), "--candidate", candidate)
    assert report["verdict"]["passed"] is False


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_candidate_in_a_wider_type(program, dtype):
    problem = make_peaked(0.25)
    candidate = program.new_path()
    tensor_file.save(candidate, {"out": problem.reference().out.astype(dtype)})
    report = audit(program, problem.save(program.new_path()), "--candidate", candidate, "--check")
    assert candidate_entries(report, "forward")[0]["out_rel_l2"] < 1e-6


@pytest.mark.parametrize("tensors, named", [
    ({"out": np.zeros((96, 8, 511), np.uint16)}, "out"), ({"out": np.zeros((96, 7, 512), np.uint16)}, "out"),
    ({"out": np.zeros((96, 8, 512), np.int32)}, "out"), ({"lse": np.zeros((96, 8), np.float32)}, "out"),
    ({"out": np.zeros((96, 8, 512), np.uint16), "dq_latent": np.zeros((96, 8, 5), np.uint16)}, "dq_latent"),
    ({"out": np.zeros((96, 8, 512), np.uint16), "dsink": np.zeros(8, np.float32)}, "dsink")])
def test_bad_candidate_is_rejected(program, tensors, named):
    source, candidate = make_peaked(0.25).save(program.new_path()), program.new_path()
    tensor_file.save(candidate, tensors)
    program.reject(named, "audit", source, "--candidate", candidate, "--json", program.new_path(".json"))
