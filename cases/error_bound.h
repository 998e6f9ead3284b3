// How far a right kernel may be from the exact answer, row by row: a running error analysis of the operation.
//
// Whole-tensor budgets need well-conditioned inputs and drown one wrong row among many right ones. These bounds hold
// for any input. With u = 2^-8 (bf16: half an ulp at worst), v = 2^-24 (fp32), x = softmax_scale * score, and o the
// rounding of P and dS as operands (u, or 2^-16 when split):
//
//   x_j     off by dx_j = v (64 |scale| |q| |k_j| + 4 |x_j|)
//   p_j     relatively by 2 max dx + 4v (1 + |x_j - max|), then o; the row sum by their mean, plus v a term
//   out     sum_j P_j |v_j| (o + ...), plus u |out|
//   P_j     in the backward: relatively by dx_j + err lse + 4v (|x_j| + |lse| + |lse_total|), since an fp32 lse of size
//           3e4 has a spacing of .002
//   dpsum   (o + ...) sum_j P_j |dP_j|, plus u sum_d |dout_d out_d| without the residual, 2^-16 of it with one
//   dS_j    |dS_j| (o + ...) + |scale| P_j (err dP + err dpsum)
//   dq, dk  sums of err dS times |k|, |q|; dkv_latent also of err P times |dout|; dsink of P_sink times err dpsum
//
// All are worst cases: a right kernel stays at about a third of them.
#pragma once

#include <vector>

#include "numerics/problem.h"

namespace sparsemla::cases {

/// L2 bounds of the error of each row (lse, max_logits, dsink: of each element). A row whose exact value is not finite
/// has a bound that is NaN or Inf.
struct ErrorBounds {
  std::vector<double> out;         // [T*H]
  std::vector<double> lse;         // [T*H]
  std::vector<double> max_logits;  // [T*H]
  std::vector<double> dq_latent;   // [T*H]
  std::vector<double> dq_rope;     // [T*H]
  std::vector<double> dkv_latent;  // [S]
  std::vector<double> dk_rope;     // [S]
  std::vector<double> dsink;       // [H]
};

/// For a forward and a backward with this pipeline, dq rounded to `dq_dtype`. Gradient bounds are empty without dout.
[[nodiscard]] ErrorBounds error_bounds(const Problem& problem, const Pipeline& pipeline,
                                       DataType dq_dtype = DataType::kBFloat16);

/// The valid keys of a token as rows of kv_latent, in slot order, repeats kept. Written from the contract, apart from
/// both the library's and the reference's rule.
[[nodiscard]] std::vector<std::int64_t> valid_keys(const Problem& problem, std::int64_t token);

}  // namespace sparsemla::cases
