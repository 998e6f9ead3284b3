// Error budgets: what a right kernel may at most be off by, as a table of output x dtype x backend x pipeline, and the
// limits that the audit judges by. Every number is derived from a format or stands in docs/numerics.md; the comments in
// budgets.cpp say which.
#pragma once

#include <cstdint>
#include <limits>
#include <optional>
#include <string_view>

#include "sparsemla/numerics.h"
#include "sparsemla/pipeline.h"
#include "sparsemla/tensor.h"

namespace sparsemla {

enum class Output : std::uint8_t {
  kOut,
  kLse,
  kMaxLogits,
  kDqLatent,
  kDqRope,
  kDkvLatent,
  kDkRope,
  kDsink,
};

/// "out", "lse", "max_logits", "dq_latent", "dq_rope", "dkv_latent", "dk_rope", "dsink".
[[nodiscard]] std::string_view to_string(Output output) noexcept;

/// Upper limits, +inf where a metric has none.
struct Budget {
  double rel_l2 = std::numeric_limits<double>::infinity();    // rel_l2()
  double row_p999 = std::numeric_limits<double>::infinity();  // row_error().p999
  double max_abs = std::numeric_limits<double>::infinity();   // max_abs_difference()
};

/// For well-conditioned inputs: iid or mildly peaked (weights up to about 0.8), |scale * score| below 16, at least 32
/// valid slots in most rows (with one slot dS is exactly zero, and a relative error means nothing), at least 64 rows.
/// `dtype` is that of the output tensor, `backend` a name of backends(), `num_values` how many elements the tensor has:
/// the mean over few roundings scatters, and a small tensor is allowed for that.
/// Errors: a dtype that the output cannot have, a backend without a table, num_values below 1.
[[nodiscard]] Budget budget(Output output, DataType dtype, std::string_view backend, const Pipeline& pipeline,
                            std::int64_t num_values);

// ---------------------------------------------------------------------------------------------------------------------
// The audit. All limits are for the figures of one run, as plain fractions.

/// row_gain(out).rms over Floors::row_gain_rms, for each order.
inline constexpr double kMaxRowGainOverIdeal = 2.0;
/// Of the difference of two orders: row gain rms over its own noise floor.
inline constexpr double kMaxOrderGainOverNoiseFloor = 2.0;
/// Gradient errors of two orders: larger / smaller - 1.
inline constexpr double kMaxOrderGradientSpread = 0.05;
/// The residual test (beta 0.4): error with the residual over error without it, and over that of an ideal pipeline
/// (exact dpsum, P and dS rounded once).
inline constexpr double kMaxResidualOverNone = 0.6;
inline constexpr double kMaxResidualOverIdeal = 1.5;

/// rel_l2(out) over Floors::out_rel_l2: 1.01 with split operands, sqrt(2) else.
[[nodiscard]] double max_out_rel_l2_over_floor(Operands operands) noexcept;

/// rel_l2 of each gradient; percentiles over rows of dq.
struct GradientBudget {
  double dq_rope = 0;
  double dq_latent = 0;
  double dk_rope = 0;
  double dkv_latent = 0;
  double dq_row_p99 = std::numeric_limits<double>::infinity();
  double dq_row_p999 = std::numeric_limits<double>::infinity();
};

/// The "ours must be" column of docs/numerics.md at setup P (T = S = 4096, W 2048), exact max, residual on. For a beta
/// between two rows of the table: the larger limit of the two. nullopt for beta < 0 or above the table's last row, 0.6.
/// `dq_dtype` kBFloat16 or kFloat32. Errors: another dtype.
[[nodiscard]] std::optional<GradientBudget> gradient_budget_at_setup_p(double beta, Operands operands,
                                                                       DataType dq_dtype);

/// The same table for any input, by the median weight of the rows' dominant key: setup P's medians are 0 (iid), 0.80
/// (beta 0.4) and 0.998 (beta 0.6). nullopt above the last: there the gradients themselves vanish.
[[nodiscard]] std::optional<GradientBudget> gradient_budget(double self_weight_median, Operands operands,
                                                            DataType dq_dtype);

}  // namespace sparsemla
