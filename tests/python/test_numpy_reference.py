"""The reference used here, held against finite differences and the operation's identities."""

import numpy as np
import pytest
from numpy_reference import Attention
from problems import make_iid

STEP = 1e-5


def fp64_problem(causal=False):
    """Every feature at once, in fp64 so that a step of 1e-5 is not rounded away."""
    problem = make_iid(num_tokens=5, num_keys=7, topk=5, num_heads=2, seed=3)
    generator = np.random.default_rng(5)
    shapes = {name: problem.tensors[name].shape
              for name in ("q_latent", "q_rope", "kv_latent", "k_rope", "dout")} | {"sink": (2,), "dlse": (5, 2)}
    tensors = problem.tensors | {name: generator.standard_normal(shape) for name, shape in shapes.items()}
    tensors["indices"] = np.array([[0, 0, 1, -1, 2], [3, 9, 1, 0, -7], [2, 1, 0, 3, 3], [-1] * 5, [1, 3, 0, 2, 1]],
                                  np.int32)
    tensors["topk_length"] = np.array([5, 9, 3, 5, 4], np.int32)
    tensors["cu_seqlens_q"] = np.array([0, 2, 5], np.int32)
    tensors["cu_seqlens_k"] = np.array([0, 3, 7], np.int32)
    return tensors, causal


def loss(tensors, causal):
    forward = Attention(tensors, causal, 0.3)
    finite = np.isfinite(forward.lse)
    return (tensors["dout"] * forward.out).sum() + (tensors["dlse"] * np.where(finite, forward.lse, 0.0)).sum()


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", ["q_latent", "q_rope", "kv_latent", "k_rope", "sink"])
def test_gradient_matches_finite_differences(name, causal):
    tensors, causal = fp64_problem(causal)
    gradients, magnitudes = Attention(tensors, causal, 0.3).gradients(tensors)
    gradient = gradients["d" + name]
    assert np.linalg.norm(gradient) > 0 and np.all(magnitudes["d" + name] >= 0)
    generator = np.random.default_rng(11)
    for _ in range(4):
        direction = generator.standard_normal(gradient.shape)
        moved = [loss(tensors | {name: tensors[name] + sign * STEP * direction}, causal) for sign in (1, -1)]
        assert (moved[0] - moved[1]) / (2 * STEP) == pytest.approx((gradient * direction).sum(), rel=1e-6)


def test_zero_query_gives_the_mean_and_the_log_of_the_count():
    tensors, _ = fp64_problem()
    tensors["q_latent"], tensors["q_rope"] = np.zeros((5, 2, 512)), np.zeros((5, 2, 64))
    del tensors["sink"]
    forward = Attention(tensors)
    # Token 0: slots 0, 0, 1, 2 of document 0. A duplicate counts twice.
    np.testing.assert_allclose(forward.lse[0], np.log(4))
    np.testing.assert_allclose(forward.out[0, 1], tensors["kv_latent"][[0, 0, 1, 2]].mean(0))
    # Token 4 is in document 1, whose keys begin at row 3.
    np.testing.assert_allclose(forward.out[4, 0], tensors["kv_latent"][[4, 6, 3, 5]].mean(0))
    # Token 3 has no valid slot.
    assert np.all(forward.out[3] == 0) and np.all(np.isneginf(forward.lse[3]))
