#include "numerics/budgets.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <numbers>
#include <string>

#include "sparsemla/error.h"

namespace sparsemla {
namespace {

// ---------------------------------------------------------------------------------------------------------------------
// What one rounding to nearest costs, relative to the value. With s = spacing of the format in [1, 2) and m the value's
// place in its binade, the error is uniform in +-s/2: rms s / sqrt(12) / m.

double spacing(DataType dtype) noexcept {
  switch (dtype) {
    case DataType::kBFloat16:
      return 0x1p-7;
    case DataType::kFloat16:
      return 0x1p-10;
    case DataType::kFloat32:
      return 0x1p-23;
    default:
      return 0;
  }
}

/// rms over values spread evenly over the binade in the logarithm, E[1/m^2] = 3 / (8 ln 2): what a tensor of many
/// values shows. 1.66e-3 for bf16, the floor in docs/numerics.md. (Normal values give 1.655e-3 to 1.663e-3, by their
/// sigma's place in its binade.)
double rounding_rms(DataType dtype) { return spacing(dtype) * std::sqrt(3 / (8 * std::numbers::ln2) / 12); }

/// The same as a sample of n normal values may show it. A squared rounding error has a relative variance of 4.4 there
/// (fourth moment 3 * 9/5, less 1), so the root of the mean of n varies by sqrt(4.4 / n) / 2. Four times that is
/// allowed, which one of 30,000 samples exceeds: the tests hold some thousands against it. 6.6 % at 4096 values.
double sampled_rounding_rms(DataType dtype, std::int64_t num_values) {
  return rounding_rms(dtype) * (1 + 2 * std::sqrt(4.4 / static_cast<double>(num_values)));
}

/// rms at m = 1, where it is largest: P and dS may have few dominant values, all of one size. 2.26e-3 for bf16.
double largest_rounding_rms(DataType dtype) { return spacing(dtype) / std::sqrt(12.0); }

/// The largest error of one rounding: half the spacing, at m = 1.
double largest_rounding(DataType dtype) noexcept { return spacing(dtype) / 2; }

/// Independent errors add in quadrature.
double together(double a, double b, double c = 0) { return std::sqrt(a * a + b * b + c * c); }

/// hi + lo: lo's rounding is relative to what hi's rounding left over.
double squared_if_split(double rounding, Operands operands) noexcept {
  return operands == Operands::kSplit ? rounding * rounding : rounding;
}

// ---------------------------------------------------------------------------------------------------------------------
// docs/numerics.md, "Gradient error".

/// Split operands, iid: "<= .02" for fp32 gradients. What is left is dpsum's residual and the fp32 arithmetic.
constexpr double kSplitGradient = 2e-4;
/// "dq row p99.9 0.90 %" at beta 0.4.
constexpr double kDqRowP999 = 9.0e-3;

/// A figure of the table is printed to so many digits; "no worse" is below the next half digit.
constexpr double percent(double printed, double half_digit) { return (printed + half_digit) / 100; }

struct TableRow {
  double beta;
  double self_weight_median;  // measured at setup P with the fp64 reference
  GradientBudget bf16;        // "no worse" than the best known; explicit at beta 0.6
  GradientBudget split;       // dq in bf16
  double split_dq_in_fp32;
};

const std::array<TableRow, 3>& table() {
  constexpr double kHalf = 0.0005;
  static const std::array<TableRow, 3> rows = {{
      {0,
       0,
       {percent(.237, kHalf), percent(.216, kHalf), percent(.168, kHalf), percent(.166, kHalf)},
       {percent(.170, 0), percent(.170, 0), percent(.02, 0), percent(.02, 0)},
       kSplitGradient},
      {0.4,
       0.80,
       {percent(.237, kHalf), percent(.236, kHalf), percent(.167, kHalf), percent(.134, kHalf), percent(.44, .005),
        percent(.90, .005)},
       {percent(.170, 0), percent(.170, 0), percent(.03, 0), percent(.03, 0)},
       kSplitGradient},
      {0.6,
       0.998,
       {percent(.255, 0), percent(.255, 0), percent(.185, 0), percent(.110, 0)},
       {percent(.175, 0), percent(.175, 0), percent(.05, 0), percent(.01, 0)},
       // "then it meets the .02 too" is said of the iid and beta 0.4 rows; here .175 leaves sqrt(.175^2 - .166^2) over
       // the rounding to bf16.
       5.5e-4},
  }};
  return rows;
}

GradientBudget row_budget(const TableRow& row, Operands operands, DataType dq_dtype) {
  GradientBudget result = operands == Operands::kSplit ? row.split : row.bf16;
  if (dq_dtype == DataType::kFloat32 && operands == Operands::kSplit)
    result.dq_rope = result.dq_latent = row.split_dq_in_fp32;
  return result;
}

GradientBudget larger(const GradientBudget& a, const GradientBudget& b) noexcept {
  return {std::max(a.dq_rope, b.dq_rope),       std::max(a.dq_latent, b.dq_latent),
          std::max(a.dk_rope, b.dk_rope),       std::max(a.dkv_latent, b.dkv_latent),
          std::max(a.dq_row_p99, b.dq_row_p99), std::max(a.dq_row_p999, b.dq_row_p999)};
}

/// The row whose `column` is `position`, or the larger of the two that it lies between.
std::optional<GradientBudget> look_up(double TableRow::*column, double position, Operands operands, DataType dq_dtype) {
  if (dq_dtype != DataType::kBFloat16 && dq_dtype != DataType::kFloat32)
    throw Error("dq_dtype", to_string(dq_dtype), "bfloat16 or float32");
  constexpr double kSame = 1e-9;
  const auto& rows = table();
  for (std::size_t i = 0; i < rows.size(); ++i) {
    const double here = rows[i].*column;
    if (std::abs(position - here) < kSame) return row_budget(rows[i], operands, dq_dtype);
    if (i > 0 && position > rows[i - 1].*column && position < here)
      return larger(row_budget(rows[i - 1], operands, dq_dtype), row_budget(rows[i], operands, dq_dtype));
  }
  return std::nullopt;
}

// ---------------------------------------------------------------------------------------------------------------------
// Conformance.

/// fp32 sums of 576 products: roundings of random sign grow as sqrt(576) units of 2^-24 of a sum that stays below 16.
constexpr double kScoreMaxAbs = 24 * 16 * 0x1p-24;

void require_dtype(Output output, DataType dtype) {
  const bool is_dq = output == Output::kDqLatent || output == Output::kDqRope;
  const bool ok = output == Output::kOut ? dtype == DataType::kBFloat16
                  : is_dq                ? dtype == DataType::kBFloat16 || dtype == DataType::kFloat32
                                         : dtype == DataType::kFloat32;
  if (!ok) throw Error(to_string(output), to_string(dtype), "a dtype that this output can have");
}

Budget out_budget(DataType dtype, const Pipeline& pipeline, std::int64_t num_values) {
  Budget result;
  // Rounded: P as an operand, then out. In one row a single key may hold all the weight, and its p be as far off as can
  // be.
  const double p_rms = squared_if_split(largest_rounding_rms(pipeline.p_dtype), pipeline.operands);
  const double p_max = squared_if_split(largest_rounding(pipeline.p_dtype), pipeline.operands);
  result.rel_l2 = together(p_rms, sampled_rounding_rms(dtype, num_values));
  result.row_p999 = together(p_max, largest_rounding_rms(dtype));
  return result;
}

/// What dpsum adds without the residual: the rounding of out. On well-conditioned inputs it is not amplified.
double dpsum_rounding(const Pipeline& pipeline) { return pipeline.residual ? 0 : rounding_rms(DataType::kBFloat16); }

Budget gradient_budget_of(Output output, DataType dtype, const Pipeline& pipeline, std::int64_t num_values) {
  const bool split = pipeline.operands == Operands::kSplit;
  // Rounded: P and dS as operands, each relative to its own part of the sum; then the gradient itself.
  const double operand = split ? kSplitGradient : largest_rounding_rms(DataType::kBFloat16);
  Budget result;
  result.rel_l2 = together(operand, sampled_rounding_rms(dtype, num_values), dpsum_rounding(pipeline));
  const bool is_dq = output == Output::kDqLatent || output == Output::kDqRope;
  if (is_dq) result.row_p999 = kDqRowP999;
  // A key may be selected by one row only, with P and dS both as far off as can be.
  if (!is_dq && !split && pipeline.residual)
    result.row_p999 = together(largest_rounding(DataType::kBFloat16), largest_rounding(DataType::kBFloat16));
  return result;
}

/// dsink = -sum exp(sink - lse_total) * dpsum, and dpsum = dout . (out + residual) carries the rounding of P that is in
/// out, and without the residual that of out. It has one number a head only: the ratio of two sums of 16 squares is
/// above 4, its root above 2, once in 250 times (F distribution).
Budget dsink_budget(const Pipeline& pipeline) {
  const double p = squared_if_split(largest_rounding_rms(pipeline.p_dtype), pipeline.operands);
  // "dpsum: its error falls from 0.166 % to 0.0023 %" with the residual.
  Budget result;
  result.rel_l2 = 2 * together(p, 2.3e-5, dpsum_rounding(pipeline));
  return result;
}

}  // namespace

std::string_view to_string(Output output) noexcept {
  constexpr std::array<std::string_view, 8> kNames = {"out",     "lse",        "max_logits", "dq_latent",
                                                      "dq_rope", "dkv_latent", "dk_rope",    "dsink"};
  return kNames[static_cast<std::size_t>(output)];
}

Budget budget(Output output, DataType dtype, std::string_view backend, const Pipeline& pipeline,
              std::int64_t num_values) {
  // The formulas hold for operands as the pipeline says and fp32 accumulation with round to nearest. A backend gets its
  // row when it has been measured against them.
  if (backend != "cpu") throw Error("backend", backend, "cpu, the one with budgets");
  require_dtype(output, dtype);
  if (num_values < 1) throw Error("num_values", std::to_string(num_values), "at least 1");
  Budget result;
  switch (output) {
    case Output::kOut:
      return out_budget(dtype, pipeline, num_values);
    case Output::kLse:
      result.max_abs = kScoreMaxAbs;
      // The sum of rounded p is off by at most as much as each p.
      if (pipeline.row_sum == RowSum::kRounded) result.max_abs += largest_rounding(pipeline.p_dtype);
      return result;
    case Output::kMaxLogits:
      result.max_abs = kScoreMaxAbs;
      return result;
    case Output::kDsink:
      return dsink_budget(pipeline);
    default:
      return gradient_budget_of(output, dtype, pipeline, num_values);
  }
}

double max_out_rel_l2_over_floor(Operands operands) noexcept {
  // Split: "it must come down to within 1 % of the floor". Else P's rounding is at most as large as that of out, and
  // independent of it (1.94e-3 against 1.66e-3 on iid inputs).
  return operands == Operands::kSplit ? 1.01 : std::numbers::sqrt2;
}

std::optional<GradientBudget> gradient_budget_at_setup_p(double beta, Operands operands, DataType dq_dtype) {
  return look_up(&TableRow::beta, beta, operands, dq_dtype);
}

std::optional<GradientBudget> gradient_budget(double self_weight_median, Operands operands, DataType dq_dtype) {
  return look_up(&TableRow::self_weight_median, self_weight_median, operands, dq_dtype);
}

}  // namespace sparsemla
