"""How far the program's outputs may stand from the fp64 reference, and why.

One rounding to bf16 makes a relative L2 error of about 1.66e-3. `out` is rounded once and is made of p rounded once,
independently, which adds at most as much again: 1.66e-3 * sqrt(2) = 2.35e-3; under the lazy max the dominant p is
rounded too, coherently for its row, but still to the same precision. dq likewise (dS, then dq), dkv and dk once less.
The bounds are those sums and a quarter more for the small samples of these tests.
"""

import numpy as np
from numpy_reference import rel_l2
from tensor_file import numbers

OUT_REL_L2 = 2.9e-3
DQ_REL_L2 = 2.9e-3
DKV_REL_L2 = 2.1e-3
DSINK_REL_L2 = 2.1e-3
# Relative to a gradient's magnitude before cancellation (numpy_reference.py), where the gradient itself may be 0. The
# part that dpsum adds comes from an `out` whose p were rounded.
GRADIENT_TO_MAGNITUDE = 4e-3
# fp32 dot products of 576 terms, and an lse near L has spacing 6e-8 * L.
LSE_ABSOLUTE, LSE_RELATIVE = 2e-5, 1e-6

GRADIENT_BOUND = {"dq_latent": DQ_REL_L2, "dq_rope": DQ_REL_L2, "dkv_latent": DKV_REL_L2, "dk_rope": DKV_REL_L2,
                  "dsink": DSINK_REL_L2}


def assert_bitwise_equal(a, b, names=None):
    """The same dtypes and bytes, of all tensors of `a` or of those named."""
    for name in names or a:
        assert a[name].dtype == b[name].dtype and a[name].tobytes() == b[name].tobytes(), name


def assert_logarithms(outputs, reference, absolute=LSE_ABSOLUTE, relative=LSE_RELATIVE):
    """lse and max_logits: the same infinities, and finite values close."""
    for name, expected in (("lse", reference.lse), ("max_logits", reference.max_logits)):
        value = numbers(outputs[name])
        assert value.shape == expected.shape, name
        assert np.array_equal(np.isfinite(value), np.isfinite(expected)), f"{name}: infinities stand elsewhere"
        assert np.array_equal(value[~np.isfinite(expected)], expected[~np.isfinite(expected)]), name
        np.testing.assert_allclose(value, expected, rtol=relative, atol=absolute, err_msg=name)


def assert_forward(outputs, reference, out_bound=OUT_REL_L2):
    assert_logarithms(outputs, reference)
    out = numbers(outputs["out"])
    assert out.shape == reference.out.shape and np.all(np.isfinite(out))
    empty = np.isneginf(reference.lse)
    assert np.all(out[empty] == 0), "a row without valid slots must be 0"
    assert rel_l2(out, reference.out) <= out_bound


def assert_gradients(outputs, reference, tensors, bounds=GRADIENT_BOUND):
    """For problems whose gradients do not cancel to nothing."""
    expected, _ = reference.gradients(tensors)
    for name, gradient in expected.items():
        value = numbers(outputs[name])
        assert value.shape == gradient.shape and np.all(np.isfinite(value)), name
        error = rel_l2(value, gradient)
        assert error <= bounds[name], f"{name}: rel_l2 {error:.2e}, want <= {bounds[name]:.2e}"


def assert_gradients_to_magnitude(outputs, reference, tensors, bound=GRADIENT_TO_MAGNITUDE):
    """For any problem. Where nothing is added up, the gradient must be exactly 0."""
    expected, magnitudes = reference.gradients(tensors)
    for name, gradient in expected.items():
        value = numbers(outputs[name])
        assert value.shape == gradient.shape and np.all(np.isfinite(value)), name
        assert np.all(value[magnitudes[name] == 0] == 0), f"{name}: not 0 where no slot adds to it"
        error, size = np.linalg.norm(value - gradient), np.linalg.norm(magnitudes[name])
        assert error <= bound * size, f"{name}: {error:.2e} against a magnitude of {size:.2e}, want <= {bound:.0e}"
