"""Sparse MLA attention in fp64 numpy, token by token, from docs/math.md: a second reference beside the C++ one.

Tensors are a dictionary named as in the program's files, as stored (bf16 = uint16 bits). Besides each gradient,
gradients() returns its *magnitude*: the root of the sum of the squares of what was added up before anything cancelled.
Independent rounding errors have that size times a unit roundoff, also where the gradient itself is 0. The copies of a
key that a list names m times round alike, so together they count as one term m times as large.
"""

import math

import numpy as np
from tensor_file import numbers


def documents(tensors, num_tokens, num_keys):
    """[(first token, end, first key, end)]; one document without cu_seqlens."""
    if "cu_seqlens_q" not in tensors:
        return [(0, num_tokens, 0, num_keys)]
    q, k = tensors["cu_seqlens_q"], tensors["cu_seqlens_k"]
    return [(int(q[b]), int(q[b + 1]), int(k[b]), int(k[b + 1])) for b in range(len(q) - 1)]


def selected_keys(tensors, num_tokens, num_keys, causal):
    """For each token the keys (rows of kv_latent) of its valid slots, duplicates kept."""
    chosen = [np.zeros(0, np.int64)] * num_tokens
    for first_token, end_token, first_key, end_key in documents(tensors, num_tokens, num_keys):
        for token in range(first_token, end_token):
            slots = tensors["indices"][token].astype(np.int64)
            if "topk_length" in tensors:
                slots = slots[:max(0, int(tensors["topk_length"][token]))]
            limit = end_key - first_key
            if causal:  # bottom-right aligned: the document's last token sees all its keys
                limit = min(limit, (token - first_token) + 1 + (end_key - first_key) - (end_token - first_token))
            chosen[token] = first_key + slots[(slots >= 0) & (slots < limit)]
    return chosen


class Attention:
    """The forward of one problem, kept for its gradients."""

    def __init__(self, tensors, causal=False, softmax_scale=None):
        self.q_latent, self.kv_latent = numbers(tensors["q_latent"]), numbers(tensors["kv_latent"])
        self.has_rope = "q_rope" in tensors
        self.q, self.k = self.q_latent, self.kv_latent
        if self.has_rope:
            self.q = np.concatenate([self.q_latent, numbers(tensors["q_rope"])], -1)
            self.k = np.concatenate([self.kv_latent, numbers(tensors["k_rope"])], -1)
        self.scale = 1.0 / math.sqrt(self.q.shape[-1]) if softmax_scale is None else float(softmax_scale)
        num_tokens, num_heads, latent_dim = self.q_latent.shape
        self.sink = numbers(tensors["sink"]) if "sink" in tensors else np.full(num_heads, -np.inf)
        self.has_sink = "sink" in tensors
        self.keys = selected_keys(tensors, num_tokens, len(self.k), causal)
        self.out = np.zeros((num_tokens, num_heads, latent_dim))
        self.lse = np.full((num_tokens, num_heads), -np.inf)
        self.max_logits = np.full((num_tokens, num_heads), -np.inf)
        self.sink_share = np.zeros((num_tokens, num_heads))  # exp(sink - lse_total)
        self.p_keys = [None] * num_tokens  # [H, n]: softmax over the keys alone
        for token in range(num_tokens):
            if len(self.keys[token]):
                self._forward(token)

    def _forward(self, token):
        logits = self.scale * (self.q[token] @ self.k[self.keys[token]].T)
        largest = logits.max(-1)
        exponentials = np.exp(logits - largest[:, None])
        total = exponentials.sum(-1)
        self.max_logits[token] = largest
        self.lse[token] = largest + np.log(total)
        self.p_keys[token] = exponentials / total[:, None]
        # exp(sink - logaddexp(lse, sink)) written so that sink = +-inf gives 1 and 0 instead of NaN
        with np.errstate(over="ignore"):
            self.sink_share[token] = 1.0 / (1.0 + np.exp(self.lse[token] - self.sink))
        p = self.p_keys[token] * (1.0 - self.sink_share[token])[:, None]
        self.out[token] = p @ self.kv_latent[self.keys[token]]

    def gradients(self, tensors):
        """(gradients, magnitudes) of sum(dout * out) + sum(dlse * lse): dictionaries of fp64 arrays."""
        dout = numbers(tensors["dout"])
        dlse = numbers(tensors["dlse"]) if "dlse" in tensors else np.zeros(self.lse.shape)
        latent_dim = self.q_latent.shape[-1]
        dq, dq_square = np.zeros(self.q.shape), np.zeros(self.q.shape)
        dk, dk_square = np.zeros(self.k.shape), np.zeros(self.k.shape)
        dsink, dsink_square = np.zeros(self.sink.shape), np.zeros(self.sink.shape)
        for token, keys in enumerate(self.keys):
            if not len(keys):
                continue
            q, k, v = self.q[token], self.k[keys], self.kv_latent[keys]
            p = self.p_keys[token] * (1.0 - self.sink_share[token])[:, None]
            dp = dout[token] @ v.T
            dpsum = (dout[token] * self.out[token]).sum(-1)
            p_dlse = self.p_keys[token] * dlse[token][:, None]
            ds = self.scale * (p * (dp - dpsum[:, None]) + p_dlse)
            _, position, counts = np.unique(keys, return_inverse=True, return_counts=True)
            copies = counts[position]
            dpsum_square = dpsum**2 + (copies * p**2 * dp**2).sum(-1)  # of its sum over keys, too
            ds_square = copies * self.scale**2 * (p**2 * (dp**2 + dpsum_square[:, None]) + p_dlse**2)
            dq[token] = ds @ k
            dq_square[token] = ds_square @ k**2
            # np.add.at adds once for every occurrence: a duplicate index is two keys.
            np.add.at(dk, keys, ds.T @ q)
            np.add.at(dk_square, keys, ds_square.T @ q**2)
            np.add.at(dk[:, :latent_dim], keys, p.T @ dout[token])
            np.add.at(dk_square[:, :latent_dim], keys, (copies * p**2).T @ dout[token]**2)
            dsink -= self.sink_share[token] * dpsum
            dsink_square += self.sink_share[token] ** 2 * dpsum_square
        return (self._named(dq, dk, dsink),
                self._named(np.sqrt(dq_square), np.sqrt(dk_square), np.sqrt(dsink_square)))

    def _named(self, dq, dk, dsink):
        latent_dim = self.q_latent.shape[-1]
        named = {"dq_latent": dq[..., :latent_dim], "dkv_latent": dk[:, :latent_dim]}
        if self.has_rope:
            named |= {"dq_rope": dq[..., latent_dim:], "dk_rope": dk[:, latent_dim:]}
        if self.has_sink:
            named["dsink"] = dsink
        return named


def rel_l2(value, reference):
    """||value - reference|| / ||reference||; 0 when both are zero."""
    error, size = np.linalg.norm(value - reference), np.linalg.norm(reference)
    return 0.0 if error == 0 else error / size if size > 0 else math.inf
