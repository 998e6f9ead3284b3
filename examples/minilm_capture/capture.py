#!/usr/bin/env python3
"""Captures one attention layer of all-MiniLM-L6-v2 on a real text, in MLA form, as a safetensors file.

Any multi-head attention can be read as sparse MLA. Head h scores key x (the layer's input) as

    q_h . (Wk_h x + bk_h)  =  (Wk_h^T q_h) . x  +  q_h . bk_h

The last term is the same for every key of a (token, head), so the softmax does not see it and it is dropped. What
remains is an inner product of an absorbed query Wk_h^T q_h with a latent x that all heads share:

    kv_latent = x, zero-padded to 512 columns     q_latent[t,h] = Wk_h^T q_h[t]     softmax_scale = 1/sqrt(head_dim)

and there is no rope part. The attention output in this form is sum_j p_j x_j, to which the model applies Wv_h
afterwards, so a gradient enters as dout[t,h] = Wv_h^T g. Inference has no gradient g of its own: a seeded normal one is
drawn, sent through the model's Wv_h, and scaled to rms 1 over the model's columns.

Each token selects, among all tokens of the window (the model is bidirectional), the `topk` keys with the largest
attention summed over heads, strongest in slot 0.
"""

import argparse
import json
import math
import struct
import sys
from pathlib import Path

import numpy as np
from bert import MODEL_PACKAGE, Bert, model_directory, softmax

LATENT_DIM = 512
MAX_PROBABILITY_ERROR = 1e-5  # MLA form against the model's own attention, both in fp32


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0],
                                     formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--text", type=Path, required=True, help="plain text; its beginning is used")
    parser.add_argument("--out", type=Path, help="the safetensors file to write; without it only the report is printed")
    parser.add_argument("--layer", type=int, default=1, help="0 is the first; 1 is the most peaked")
    parser.add_argument("--keys", type=int, default=256, help="tokens in the window, 2..512")
    parser.add_argument("--tokens", type=int, default=128, help="query tokens, evenly spaced over the window")
    parser.add_argument("--topk", type=int, default=128,
                        help="above 64, or a walk in blocks of 64 keys never has a stale max")
    parser.add_argument("--seed", type=int, default=1, help="of the gradient")
    return parser.parse_args()


def check(arguments, bert):
    """Ends the program with one line and exit code 2 at the first argument out of range."""
    limits = {"layer": (0, bert.num_layers - 1), "keys": (2, bert.config["max_position_embeddings"]),
              "tokens": (1, arguments.keys), "topk": (1, arguments.keys)}
    for name, (low, high) in limits.items():
        value = getattr(arguments, name)
        if not low <= value <= high:
            fail(f"--{name}: found {value}, want {low}..{high}")
    if not arguments.text.is_file():
        fail(f"--text: found no file {arguments.text}, want a plain text")


def fail(message):
    print(f"capture.py: {message}", file=sys.stderr)
    sys.exit(2)


def report_peakedness(traces):
    """The weight of the strongest key of each (token, head), by layer: how peaked real attention is."""
    print("strongest weight of a (token, head)    median     p90   share > 0.5")
    for layer, trace in enumerate(traces):
        strongest = trace.p.max(-1)
        print(f"  layer {layer}                              {np.median(strongest):.3f}   "
              f"{np.quantile(strongest, 0.9):.3f}   {np.mean(strongest > 0.5):.3f}")


def report_selection(p, indices, layer):
    """p [H, T, S], indices [T, W]: what the selected keys hold, and how often slot 0 is also a head's own strongest."""
    kept = np.take_along_axis(p, indices[None], -1)
    share = kept.sum(-1)
    print(f"layer {layer}: {indices.shape[0]} tokens x {indices.shape[1]} of {p.shape[2]} keys; the selected keys hold "
          f"{share.mean():.3f} of the attention (median of a head {np.median(share):.3f}); slot 0 is the strongest key "
          f"of {np.mean(kept.argmax(-1) == 0):.3f} of all (token, head)")


def check_probabilities(absorbed, trace, bert, layer):
    """The MLA form must reproduce the model's own attention probabilities in fp32."""
    key_weight, key_bias = bert.projection(layer, "key")
    hidden = trace.hidden.astype(np.float32)
    scale = np.float32(1.0 / math.sqrt(bert.head_dim))
    k = np.einsum("hdc,nc->nhd", key_weight.astype(np.float32), hidden, optimize=True) + key_bias.astype(np.float32)
    own = softmax(np.einsum("nhd,mhd->hnm", trace.q.astype(np.float32), k, optimize=True) * scale)
    mla = softmax(np.einsum("nhc,mc->hnm", absorbed.astype(np.float32), hidden, optimize=True) * scale)
    difference = float(np.abs(own - mla).max())
    print(f"MLA form against the model's attention, fp32: largest difference of a probability {difference:.2e}")
    if not difference < MAX_PROBABILITY_ERROR:
        fail(f"layer {layer}: found a difference of {difference:.2e}, want below {MAX_PROBABILITY_ERROR:.0e}")


def pad_columns(x):
    return np.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, LATENT_DIM - x.shape[-1])])


def bfloat16_bits(x):
    """uint16 bit patterns, rounded to nearest, ties to even. Finite input."""
    bits = x.astype(np.float32).view(np.uint32).astype(np.uint64)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def make_gradient(shape, bert, layer, seed):
    """Wv_h^T g for a seeded normal g, rms 1. RandomState's stream is frozen, so every numpy draws the same."""
    value_weight, _ = bert.projection(layer, "value")
    g = np.random.RandomState(seed).standard_normal(shape)
    dout = np.einsum("hdc,nhd->nhc", value_weight, g, optimize=True)
    return dout / np.sqrt(np.mean(dout * dout))


def write_safetensors(path, tensors, metadata):
    """tensors: name -> (dtype of the format, array). Own writer: numpy has no bf16, and bytes must not vary by run."""
    header, offset = {"__metadata__": metadata}, 0
    for name, (dtype, array) in tensors.items():
        header[name] = {"dtype": dtype, "shape": list(array.shape), "data_offsets": [offset, offset + array.nbytes]}
        offset += array.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for _, array in tensors.values():
            file.write(np.ascontiguousarray(array).tobytes())


def main():
    arguments = parse_arguments()
    bert = Bert(model_directory())
    check(arguments, bert)
    ids = bert.token_ids(arguments.text.read_text(encoding="ascii", errors="replace"), arguments.keys)
    if len(ids) < arguments.keys:
        fail(f"--text: found {len(ids)} tokens, want at least --keys {arguments.keys}")
    traces = bert.traces(ids)
    report_peakedness(traces)

    trace = traces[arguments.layer]
    key_weight, _ = bert.projection(arguments.layer, "key")
    absorbed = np.einsum("hdc,nhd->nhc", key_weight, trace.q, optimize=True)
    check_probabilities(absorbed, trace, bert, arguments.layer)

    rows = np.arange(arguments.tokens) * arguments.keys // arguments.tokens
    summed = trace.p.sum(0)[rows]
    indices = np.argsort(-summed, axis=-1, kind="stable")[:, :arguments.topk].astype(np.int32)
    report_selection(trace.p[:, rows], indices, arguments.layer)
    if arguments.out is None:
        return

    dout = make_gradient(trace.q[rows].shape, bert, arguments.layer, arguments.seed)
    metadata = {"softmax_scale": repr(1.0 / math.sqrt(bert.head_dim)), "model": "all-MiniLM-L6-v2 (Apache-2.0)",
                "package": MODEL_PACKAGE, "layer": str(arguments.layer), "text": arguments.text.name,
                "seed": str(arguments.seed)}
    write_safetensors(arguments.out, {
        "q_latent": ("BF16", bfloat16_bits(pad_columns(absorbed[rows]))),
        "kv_latent": ("BF16", bfloat16_bits(pad_columns(trace.hidden))),
        "indices": ("I32", indices),
        "dout": ("BF16", bfloat16_bits(pad_columns(dout))),
    }, metadata)
    print(f"{arguments.out}: {arguments.out.stat().st_size} bytes, softmax_scale {metadata['softmax_scale']}")


if __name__ == "__main__":
    main()
