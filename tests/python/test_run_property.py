"""`sparsemla run` on random shapes, holes, lengths, documents, sinks and pipelines."""

import tempfile
from pathlib import Path

import numpy as np
from comparison import assert_forward, assert_gradients_to_magnitude
from conftest import Program
from hypothesis import given, settings
from hypothesis import strategies as st
from problems import Problem, normal

SHAPES = st.fixed_dictionaries({
    "num_tokens": st.integers(1, 9), "num_keys": st.integers(1, 40), "topk": st.integers(1, 70),
    "num_heads": st.integers(1, 20), "rope": st.booleans(), "causal": st.booleans(), "sink": st.booleans(),
    "lengths": st.booleans(), "dlse": st.booleans(), "num_documents": st.integers(0, 3),
    "hole_share": st.sampled_from([0.0, 0.3, 1.0]), "scale": st.sampled_from([None, 0.01, 0.5]),
    "seed": st.integers(0, 2**32 - 1)})
PIPELINES = st.fixed_dictionaries({
    "--rescale-threshold": st.sampled_from(["0", "8"]), "--key-block": st.sampled_from(["1", "5", "64", "128"]),
    "--walk": st.sampled_from(["first-to-last", "last-to-first"]), "--operands": st.sampled_from(["bf16", "split"]),
    "--threads": st.sampled_from(["1", "2"])})


def split_points(generator, total, parts):
    """Ascending from 0; may leave elements after the last, and may repeat."""
    return np.concatenate([[0], np.sort(generator.integers(0, total + 1, parts))]).astype(np.int32)


def build(shape):
    generator = np.random.default_rng(shape["seed"])
    tokens, keys, heads = shape["num_tokens"], shape["num_keys"], shape["num_heads"]
    lists = generator.integers(0, keys, (tokens, shape["topk"])).astype(np.int32)
    bad = generator.choice(np.array([-1, -2147483648, 2147483647, keys, -7], np.int32), lists.shape)
    tensors = {"q_latent": normal(generator, tokens, heads, 512), "kv_latent": normal(generator, keys, 512),
               "indices": np.where(generator.random(lists.shape) < shape["hole_share"], bad, lists).astype(np.int32),
               "dout": normal(generator, tokens, heads, 512)}
    if shape["rope"]:
        tensors |= {"q_rope": normal(generator, tokens, heads, 64), "k_rope": normal(generator, keys, 64)}
    if shape["sink"]:
        tensors["sink"] = generator.standard_normal(heads).astype(np.float32) * 3
    if shape["lengths"]:
        tensors["topk_length"] = generator.integers(-2, shape["topk"] + 3, tokens).astype(np.int32)
    if shape["dlse"]:
        tensors["dlse"] = generator.standard_normal((tokens, heads)).astype(np.float32)
    if shape["num_documents"]:
        tensors["cu_seqlens_q"] = split_points(generator, tokens, shape["num_documents"])
        tensors["cu_seqlens_k"] = split_points(generator, keys, shape["num_documents"])
    return Problem(tensors, shape["causal"], shape["scale"])


@settings(max_examples=150, deadline=None, derandomize=True, database=None)
@given(shape=SHAPES, pipeline=PIPELINES)
def test_matches_the_reference(binary, shape, pipeline):
    problem = build(shape)
    options = [word for pair in pipeline.items() for word in pair]
    with tempfile.TemporaryDirectory() as folder:
        outputs = Program(binary, Path(folder)).run(problem, "--backward", *options)
    reference = problem.reference()
    assert_forward(outputs, reference)
    assert_gradients_to_magnitude(outputs, reference, problem.tensors)
