"""Bad tensors: exit code 2, one line that names the argument, no output file."""

import numpy as np
import pytest
from problems import make_iid
from tensor_file import numbers, to_bf16


def good():
    problem = make_iid(num_tokens=4, num_keys=20, topk=8, num_heads=3)
    return problem.with_tensors(
        topk_length=np.full(4, 8, np.int32), sink=np.zeros(3, np.float32), dlse=np.zeros((4, 3), np.float32),
        cu_seqlens_q=np.array([0, 2, 4], np.int32), cu_seqlens_k=np.array([0, 9, 20], np.int32))


def test_the_good_problem_is_accepted(program):
    """All the rejections below change one thing of it."""
    program.run(good(), "--backward")


def reject(program, problem, named, *options):
    return program.reject(named, "run", problem.save(program.new_path()), "-o", program.new_path(), *options)


RANK = {"q_latent": (4, 512), "q_rope": (4, 64), "kv_latent": (20, 2, 512), "k_rope": (64,), "indices": (4,),
        "topk_length": (4, 1), "sink": (3, 1), "dout": (4, 1, 3, 512), "dlse": (4,), "cu_seqlens_q": (3, 1),
        "cu_seqlens_k": (1, 3)}
SHAPE = {"q_latent": (4, 3, 511), "q_rope": (4, 3, 63), "kv_latent": (20, 576), "k_rope": (19, 64), "indices": (5, 8),
         "topk_length": (3,), "sink": (4,), "dout": (4, 3, 576), "dlse": (4, 2)}
DTYPE = {"q_latent": np.float32, "q_rope": np.float16, "kv_latent": np.float64, "k_rope": np.float32,
         "indices": np.int64, "topk_length": np.int64, "sink": np.float64, "dout": np.float32, "dlse": np.uint16,
         "cu_seqlens_q": np.int64, "cu_seqlens_k": np.int16}


@pytest.mark.parametrize("name", RANK)
def test_wrong_rank(program, name):
    tensor = np.zeros(RANK[name], good().tensors[name].dtype)
    reject(program, good().with_tensors(**{name: tensor}), name, "--backward")


@pytest.mark.parametrize("name", SHAPE)
def test_wrong_shape(program, name):
    tensor = np.zeros(SHAPE[name], good().tensors[name].dtype)
    reject(program, good().with_tensors(**{name: tensor}), name, "--backward")


@pytest.mark.parametrize("name", DTYPE)
def test_wrong_dtype(program, name):
    tensor = good().tensors[name]
    changed = to_bf16(tensor) if DTYPE[name] is np.uint16 else numbers(tensor).astype(DTYPE[name])
    reject(program, good().with_tensors(**{name: changed}), name, "--backward")


@pytest.mark.parametrize("heads", [0, 257])
def test_number_of_heads(program, heads):
    tensors = {"q_latent": np.zeros((4, heads, 512), np.uint16), "q_rope": np.zeros((4, heads, 64), np.uint16),
               "sink": None, "dout": None, "dlse": None}
    assert "heads" in reject(program, good().with_tensors(**tensors), "q_latent")


@pytest.mark.parametrize("name", ["q_latent", "kv_latent", "indices", "q_rope", "k_rope", "cu_seqlens_q",
                                  "cu_seqlens_k"])
def test_missing_tensor_or_half_of_a_pair(program, name):
    reject(program, good().with_tensors(**{name: None}), name)


def test_missing_dout(program):
    reject(program, good().with_tensors(dout=None), "dout", "--backward")
    reject(program, good().with_tensors(dout=None), "dout", "--backward", "--reference")


@pytest.mark.parametrize("fused, part", [("q", "q_latent"), ("kv", "kv_latent"), ("q", "q_rope"), ("kv", "k_rope")])
def test_fused_beside_its_part(program, fused, part):
    tensors = {"q": np.zeros((4, 3, 576), np.uint16), "kv": np.zeros((20, 576), np.uint16)}
    parts = {"q": ("q_latent", "q_rope"), "kv": ("kv_latent", "k_rope")}[fused]
    removed = {name: None for name in parts if name != part}
    reject(program, good().with_tensors(**{fused: tensors[fused]}, **removed), fused)


@pytest.mark.parametrize("fused, shape", [("q", (4, 3, 575)), ("q", (4, 576)), ("kv", (20, 2, 576)), ("kv", (20, 640))])
def test_bad_fused_tensor(program, fused, shape):
    parts = {"q": ("q_latent", "q_rope"), "kv": ("kv_latent", "k_rope")}[fused]
    changes = {name: None for name in parts} | {fused: np.zeros(shape, np.uint16)}
    reject(program, good().with_tensors(**changes), fused)


@pytest.mark.parametrize("name, other", [("q", "k"), ("k", "q")])
@pytest.mark.parametrize("points", [[0, 3, 2], [1, 2, 4], [-1, 2, 4], [0, 2, 21]])
def test_bad_cu_seqlens(program, name, other, points):
    changes = {f"cu_seqlens_{name}": np.array(points, np.int32), f"cu_seqlens_{other}": np.array([0, 2, 4], np.int32)}
    reject(program, good().with_tensors(**changes), f"cu_seqlens_{name}")


def test_cu_seqlens_of_different_lengths(program):
    reject(program, good().with_tensors(cu_seqlens_k=np.array([0, 20], np.int32)), "cu_seqlens")


def test_empty_cu_seqlens(program):
    empty = np.zeros(0, np.int32)
    reject(program, good().with_tensors(cu_seqlens_q=empty, cu_seqlens_k=empty), "cu_seqlens")


@pytest.mark.parametrize("name", ["softmax_scale", "sinks", "attn_sink", "Q"])
def test_unknown_tensor(program, name):
    """A tensor under a name that is not read would be dropped in silence, so it is refused."""
    reject(program, good().with_tensors(**{name: np.zeros(3, np.float32)}), name)


@pytest.mark.parametrize("text", ["", "fast", "nan", "inf", "0.1x"])
def test_bad_scale_in_the_metadata(program, text):
    problem = good()
    problem.metadata = {"softmax_scale": text}
    reject(program, problem, "softmax_scale")
