#!/usr/bin/env python3
"""Sparse MLA attention as one would write it in eager PyTorch on a CPU: the rival that bench/ compares against.

    gather the selected rows -> q.k product -> softmax -> p.v product          (backward: autograd)

Two variants, both from the same bf16 inputs:
  bf16   products in bf16, softmax in fp32 on the bf16 scores, p rounded to bf16
  fp32   everything upcast to fp32 first
and "best", the fastest measured in each direction. It is generous to the rival: every index is valid, so there is no
masking, and neither lse nor the maximum is returned. Each timed call starts from the inputs in memory; output buffers
come from PyTorch's allocator, warm after the untimed calls. FLOP counts are those of the library's own benchmark:
2*T*H*W*(576+512) forward, 2*T*H*W*(2*576+2*512+576) backward (five products, of which the first recomputes the
scores, so a rival that keeps P is credited with a product it does not do).

Prints one JSON object per line: {name, threads, forward_seconds, forward_gflops, backward_seconds, backward_gflops,
torch_version, cpu_capability, repeats, ...}. Progress goes to stderr.
"""

import argparse
import json
import math
import os
import resource
import statistics
import sys
import time

import torch

LATENT_DIM = 512
ROPE_DIM = 64
FORWARD_COLUMNS = 2 * LATENT_DIM + ROPE_DIM  # per (token, head, slot): scores 576, p.v 512
BACKWARD_COLUMNS = 2752  # scores 576, dp 512, dq 576, dk 576, dv 512


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0],
                                     formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--keys", type=int, default=4096)
    parser.add_argument("--topk", type=int, default=2048)
    parser.add_argument("--heads", type=int, default=128)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--repeats", type=int, default=5, help="timed calls; the median is reported")
    parser.add_argument("--warmup", type=int, default=1, help="untimed calls before them")
    parser.add_argument("--variants", default="bf16,fp32", help="comma-separated: bf16, fp32")
    parser.add_argument("--no-backward", action="store_true")
    parser.add_argument("--token-chunks", default="0", metavar="N,...",
                        help="tokens per pass (0 = all at once); each value is measured, gradients add up over the "
                             "passes. Small passes stay in cache and spare the allocator, which eager code seldom does")
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    for name in ("tokens", "keys", "topk", "heads", "threads", "repeats"):
        if getattr(arguments, name) < 1:
            parser.error(f"--{name}: found {getattr(arguments, name)}, want at least 1")
    if arguments.topk > arguments.keys:
        parser.error(f"--topk: found {arguments.topk}, want at most --keys {arguments.keys}")
    unknown = set(arguments.variants.split(",")) - {"bf16", "fp32"}
    if unknown:
        parser.error(f"--variants: found {sorted(unknown)[0]!r}, want bf16 or fp32")
    try:
        arguments.token_chunks = [int(chunk) for chunk in arguments.token_chunks.split(",")]
    except ValueError:
        parser.error(f"--token-chunks: found {arguments.token_chunks!r}, want integers separated by commas")
    if min(arguments.token_chunks) < 0:
        parser.error(f"--token-chunks: found {min(arguments.token_chunks)}, want at least 0")
    return arguments


def make_inputs(arguments):
    """q [T,H,576], kv [S,576], dout [T,H,512] bf16 normal; indices [T,W] int64, distinct in each row."""
    generator = torch.Generator().manual_seed(arguments.seed)

    def normal(*shape):
        return torch.randn(*shape, generator=generator).to(torch.bfloat16)

    q = normal(arguments.tokens, arguments.heads, LATENT_DIM + ROPE_DIM)
    kv = normal(arguments.keys, LATENT_DIM + ROPE_DIM)
    dout = normal(arguments.tokens, arguments.heads, LATENT_DIM)
    indices = torch.stack([torch.randperm(arguments.keys, generator=generator)[:arguments.topk]
                           for _ in range(arguments.tokens)])
    return q, kv, indices, dout


def attend(q, kv, indices, compute_dtype):
    """out [T,H,512] bf16, eagerly, with products in compute_dtype."""
    num_tokens, topk = indices.shape
    selected = kv.index_select(0, indices.reshape(-1)).view(num_tokens, topk, kv.shape[1]).to(compute_dtype)
    scores = torch.einsum("thd,twd->thw", q.to(compute_dtype), selected)
    p = torch.softmax(scores.float() * (1.0 / math.sqrt(kv.shape[1])), dim=-1).to(compute_dtype)
    return torch.einsum("thw,twd->thd", p, selected[..., :LATENT_DIM]).to(torch.bfloat16)


def time_forward(inputs, compute_dtype, chunk):
    q, kv, indices, _ = inputs
    start = time.perf_counter()
    with torch.no_grad():
        outputs = [attend(q[begin:begin + chunk], kv, indices[begin:begin + chunk], compute_dtype)
                   for begin in range(0, q.shape[0], chunk)]
    elapsed = time.perf_counter() - start
    return elapsed, outputs


def time_backward(inputs, compute_dtype, chunk):
    """Seconds in backward() alone; the forward that records the graph is not counted."""
    q, kv, indices, dout = inputs
    kv_leaf = kv.detach().requires_grad_()
    q_leaf = q.detach().requires_grad_()
    elapsed = 0.0
    for begin in range(0, q.shape[0], chunk):
        part = slice(begin, begin + chunk)
        out = attend(q_leaf[part], kv_leaf, indices[part], compute_dtype)
        start = time.perf_counter()
        out.backward(dout[part])
        elapsed += time.perf_counter() - start
        del out
    return elapsed, (q_leaf.grad, kv_leaf.grad)


def median_seconds(function, arguments, label):
    for _ in range(arguments.warmup):
        function()
    seconds = [function()[0] for _ in range(arguments.repeats)]
    print(f"{label}: median {statistics.median(seconds):.3f} s, min {min(seconds):.3f}, max {max(seconds):.3f} "
          f"over {arguments.repeats}", file=sys.stderr, flush=True)
    return statistics.median(seconds)


def measure(variant, token_chunk, inputs, arguments):
    dtype = torch.bfloat16 if variant == "bf16" else torch.float32
    chunk = token_chunk or arguments.tokens
    slots = arguments.tokens * arguments.heads * arguments.topk
    name = f"eager_pytorch_{variant}" + (f"_chunk{token_chunk}" if token_chunk else "")
    result = {"name": name, "threads": arguments.threads}
    forward = median_seconds(lambda: time_forward(inputs, dtype, chunk), arguments, f"{name} forward")
    result |= {"forward_seconds": forward, "forward_gflops": 2 * slots * FORWARD_COLUMNS / forward / 1e9}
    if not arguments.no_backward:
        backward = median_seconds(lambda: time_backward(inputs, dtype, chunk), arguments, f"{name} backward")
        result |= {"backward_seconds": backward, "backward_gflops": 2 * slots * BACKWARD_COLUMNS / backward / 1e9}
    # The process's peak so far, so a later variant's figure includes an earlier, larger one.
    result["peak_memory_bytes"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return result


def best_of(results):
    best = {"name": "eager_pytorch_best", "threads": results[0]["threads"]}
    for direction in ("forward", "backward"):
        key = f"{direction}_seconds"
        if key in results[0]:
            fastest = min(results, key=lambda entry: entry[key])
            best |= {key: fastest[key], f"{direction}_gflops": fastest[f"{direction}_gflops"],
                     f"{direction}_variant": fastest["name"]}
    return best


def main():
    arguments = parse_arguments()
    torch.set_num_threads(arguments.threads)
    conditions = {
        "tokens": arguments.tokens, "keys": arguments.keys, "topk": arguments.topk, "heads": arguments.heads,
        "repeats": arguments.repeats, "torch_version": torch.__version__,
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
    }
    inputs = make_inputs(arguments)
    results = [measure(variant, chunk, inputs, arguments)
               for chunk in arguments.token_chunks for variant in arguments.variants.split(",")]
    for result in results + [best_of(results)]:
        print(json.dumps(result | conditions), flush=True)


if __name__ == "__main__":
    main()
