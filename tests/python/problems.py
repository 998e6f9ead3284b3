"""Small seeded problems in the program's file format."""

from dataclasses import dataclass, field

import numpy as np
import tensor_file
from numpy_reference import Attention


@dataclass
class Problem:
    tensors: dict  # name -> array as stored
    causal: bool = False
    softmax_scale: float | None = None
    metadata: dict = field(default_factory=dict)

    def options(self):
        """What the command line must say besides the file."""
        options = ["--causal"] if self.causal else []
        return options + ([f"--softmax-scale={self.softmax_scale!r}"] if self.softmax_scale is not None else [])

    def save(self, path):
        tensor_file.save(path, self.tensors, self.metadata)
        return path

    def reference(self):
        return Attention(self.tensors, self.causal, self.softmax_scale)

    def with_tensors(self, **changes):
        """A copy with tensors replaced, or removed where None is given."""
        tensors = {name: array for name, array in (self.tensors | changes).items() if array is not None}
        return Problem(tensors, self.causal, self.softmax_scale, dict(self.metadata))


def normal(generator, *shape):
    return tensor_file.to_bf16(generator.standard_normal(shape))


def distinct_lists(generator, num_tokens, num_keys, topk):
    """int32 [T, W]: distinct keys in random order, -1 past the number of keys."""
    lists = np.full((num_tokens, topk), -1, np.int32)
    for row in lists:
        keys = generator.permutation(num_keys)[:topk]
        row[:len(keys)] = keys
    return lists


def make_iid(num_tokens=6, num_keys=50, topk=40, num_heads=3, rope=True, gradient=True, seed=1, **kwargs):
    generator = np.random.default_rng(seed)
    tensors = {"q_latent": normal(generator, num_tokens, num_heads, 512),
               "kv_latent": normal(generator, num_keys, 512)}
    if rope:
        tensors |= {"q_rope": normal(generator, num_tokens, num_heads, 64), "k_rope": normal(generator, num_keys, 64)}
    tensors["indices"] = distinct_lists(generator, num_tokens, num_keys, topk)
    if gradient:
        tensors["dout"] = normal(generator, num_tokens, num_heads, 512)
    return Problem(tensors, **kwargs)


def make_peaked(beta, num_tokens=96, topk=64, num_heads=8, seed=1):
    """Each query leans on its own key by beta; that key stands in slot 0, then random earlier ones, then -1."""
    generator = np.random.default_rng(seed)
    k = tensor_file.from_bf16(normal(generator, num_tokens, 576))
    q = generator.standard_normal((num_tokens, num_heads, 576)) + beta * k[:, None, :]
    lists = np.full((num_tokens, topk), -1, np.int32)
    for token, row in enumerate(lists):
        keys = np.concatenate([[token], generator.permutation(token)[:topk - 1]])
        row[:len(keys)] = keys
    tensors = {"q_latent": tensor_file.to_bf16(q[..., :512]), "q_rope": tensor_file.to_bf16(q[..., 512:]),
               "kv_latent": tensor_file.to_bf16(k[:, :512]), "k_rope": tensor_file.to_bf16(k[:, 512:]),
               "indices": lists, "dout": normal(generator, num_tokens, num_heads, 512)}
    return Problem(tensors)
