// The operation in fp64, written beside its formulas. It shares no code with the library: its own dtype decoding, its
// own index rule. It includes only include/.
#pragma once

#include <cstdint>
#include <vector>

#include "sparsemla/attention.h"

namespace sparsemla::reference {

/// Row-major, contiguous. Empty rows: out 0, lse -inf, max_logits -inf.
struct ForwardResult {
  std::vector<double> out;         // [T, H, D]
  std::vector<double> lse;         // [T, H]
  std::vector<double> max_logits;  // [T, H]
};

struct BackwardResult {
  std::vector<double> dq_latent;   // [T, H, D]
  std::vector<double> dq_rope;     // [T, H, R]; empty without rope
  std::vector<double> dkv_latent;  // [S, D]
  std::vector<double> dk_rope;     // [S, R]; empty without rope
  std::vector<double> dsink;       // [H]; empty without sink
};

/// Float inputs may be bf16, fp16, fp32 or fp64, of any latent and rope width (the widths are read off the shapes), any
/// strides. `num_threads` 0 = all cores.
[[nodiscard]] ForwardResult forward(const AttentionInputs& inputs, int num_threads = 0);
/// Gradients of sum(dout * out) + sum(dlse * lse), from its own forward pass. `dout` [T,H,D], `dlse` [T,H] or
/// undefined.
[[nodiscard]] BackwardResult backward(const AttentionInputs& inputs, const Tensor& dout, const Tensor& dlse = {},
                                      int num_threads = 0);

}  // namespace sparsemla::reference
