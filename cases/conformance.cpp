#include "cases/conformance.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "sparsemla/numerics.h"

namespace sparsemla::cases {
namespace {

Tensor matrix(const std::vector<double>& values, std::int64_t width) {
  const auto count = static_cast<std::int64_t>(values.size());
  return Tensor::contiguous(values.data(), DataType::kFloat64, {width > 0 ? count / width : 0, width});
}

/// Half the spacing of bf16 numbers around x.
double half_ulp(double x) {
  if (x == 0.0) return 0x1p-134;
  int exponent = 0;
  std::frexp(x, &exponent);  // |x| in [2^(exponent-1), 2^exponent)
  return std::ldexp(1.0, std::max(exponent - 1, -126) - 8);
}

void compare_by_hand(const char* name, const std::vector<double>& hand, const std::vector<double>& exact,
                     Failures& failures) {
  if (hand.empty()) return;
  if (hand.size() != exact.size()) {
    failures.push_back(fmt::format("{}: {} values by hand, {} in the reference", name, hand.size(), exact.size()));
    return;
  }
  double largest = 0;
  for (const double x : hand) largest = std::isfinite(x) ? std::max(largest, std::abs(x)) : largest;
  for (std::size_t i = 0; i < hand.size(); ++i) {
    const bool equal = hand[i] == exact[i] || std::abs(hand[i] - exact[i]) <= 1e-11 * (largest + 1.0);
    if (equal) continue;
    failures.push_back(fmt::format("{}[{}]: {} by hand, {} in the reference", name, i, hand[i], exact[i]));
    return;
  }
}

}  // namespace

/// One output, as rows of `width`.
struct Conformance::Rows {
  Output output;
  Budget budget;  // whole-tensor limits; none unless the inputs are well-conditioned
  std::vector<double> found;
  const std::vector<double>& exact;
  const std::vector<double>& bounds;
  std::int64_t width;
};

Pipeline pipeline_of(const Options& options) {
  if (options.pipeline) return *options.pipeline;
  Pipeline pipeline = Pipeline::training();
  pipeline.residual = options.purpose == Purpose::kTraining;
  return pipeline;
}

Case forward_only(const Case& entry) {
  Case result = entry;
  result.tags &= ~static_cast<std::uint32_t>(kBackward);
  result.expect = {};  // it may state gradients
  result.make = [&entry] {
    Problem problem = entry.make();
    problem.dout.clear();
    problem.dlse.clear();
    return problem;
  };
  return result;
}

Conformance::Conformance(const Case& entry)
    : entry_(entry),
      problem_(entry.make()),
      laid_out_(problem_, entry.layout),
      forward_(reference::forward(laid_out_.inputs())) {
  if (entry.has(kBackward)) backward_ = reference::backward(laid_out_.inputs(), laid_out_.dout(), laid_out_.dlse());
  well_conditioned_ = is_well_conditioned();
}

/// What budgets.h asks of inputs: random ones with |softmax_scale * score| below 16 and weights up to 0.8, at least 32
/// valid slots in every row (the row percentiles of a small case are its worst rows) and at least 64 rows.
bool Conformance::is_well_conditioned() const {
  if (!entry_.has(kRandom) || forward_.lse.size() < 64) return false;
  for (std::int64_t token = 0; token < problem_.num_tokens; ++token) {
    if (valid_keys(problem_, token).size() < 32) return false;
  }
  for (std::size_t row = 0; row < forward_.lse.size(); ++row) {
    const double max = forward_.max_logits[row];
    if (std::abs(max) >= 16.0 || max - forward_.lse[row] > std::log(0.8)) return false;
  }
  return true;
}

/// Zeros (rows of keys that no list selects) are exact and not part of the sample.
Budget Conformance::budget_of(Output output, DataType dtype, const Pipeline& pipeline,
                              const std::vector<double>& exact) const {
  if (!well_conditioned_) return {};
  const auto num_values = static_cast<std::int64_t>(exact.size()) - std::count(exact.begin(), exact.end(), 0.0);
  return num_values > 0 ? budget(output, dtype, "cpu", pipeline, num_values) : Budget{};
}

void Conformance::check_budget(const Rows& rows, Failures& failures) const {
  const Tensor found = matrix(rows.found, rows.width);
  const Tensor exact = matrix(rows.exact, rows.width);
  const auto check = [&](const char* metric, double value, double limit) {
    if (value <= limit) return;
    failures.push_back(fmt::format("{}: {} {:.4g}, budget {:.4g}", to_string(rows.output), metric, value, limit));
  };
  if (std::isfinite(rows.budget.rel_l2)) check("rel_l2", rel_l2(found, exact), rows.budget.rel_l2);
  if (std::isfinite(rows.budget.row_p999)) check("row p99.9", row_error(found, exact).p999, rows.budget.row_p999);
  if (std::isfinite(rows.budget.max_abs)) check("max abs", max_abs_difference(found, exact), rows.budget.max_abs);
}

Failures Conformance::check_reference() const {
  Failures failures;
  if (!entry_.expect) return failures;
  const Expectation hand = entry_.expect(problem_);
  compare_by_hand("out", hand.out, forward_.out, failures);
  compare_by_hand("lse", hand.lse, forward_.lse, failures);
  compare_by_hand("max_logits", hand.max_logits, forward_.max_logits, failures);
  compare_by_hand("dq_latent", hand.dq_latent, backward_.dq_latent, failures);
  compare_by_hand("dq_rope", hand.dq_rope, backward_.dq_rope, failures);
  compare_by_hand("dkv_latent", hand.dkv_latent, backward_.dkv_latent, failures);
  compare_by_hand("dk_rope", hand.dk_rope, backward_.dk_rope, failures);
  compare_by_hand("dsink", hand.dsink, backward_.dsink, failures);
  return failures;
}

const ErrorBounds& Conformance::bounds_for(const Pipeline& pipeline, DataType dq_dtype) {
  const auto key = std::tuple(pipeline.operands, pipeline.row_sum, pipeline.residual, dq_dtype);
  auto found = bounds_.find(key);
  if (found == bounds_.end()) found = bounds_.emplace(key, error_bounds(problem_, pipeline, dq_dtype)).first;
  return found->second;
}

void Conformance::check_rows(const Rows& rows, Failures& failures) {
  const auto fail = [&](std::size_t row, const std::string& text) {
    failures.push_back(fmt::format("{} row {}: {}", to_string(rows.output), row, text));
  };
  if (rows.found.size() != rows.exact.size()) return fail(0, "size differs from the reference");
  if (rows.width == 0 || rows.exact.empty()) return;
  const std::int64_t mismatches =
      count_nonfinite_mismatch(matrix(rows.found, rows.width), matrix(rows.exact, rows.width));
  if (mismatches != 0) return fail(0, fmt::format("{} elements are NaN or Inf on one side only", mismatches));
  check_budget(rows, failures);
  const auto width = static_cast<std::size_t>(rows.width);
  for (std::size_t row = 0; row < rows.exact.size() / width; ++row) {
    double squares = 0;
    bool finite = true;
    for (std::size_t i = row * width; i < (row + 1) * width; ++i) {
      if (!std::isfinite(rows.exact[i])) {
        finite = false;
        continue;
      }
      squares += (rows.found[i] - rows.exact[i]) * (rows.found[i] - rows.exact[i]);
    }
    const double error = std::sqrt(squares);
    const double bound = rows.bounds[row];
    if (!finite) continue;  // NaN and Inf coincide, that is all there is to say
    if (error > 0) worst_ratio_ = std::max(worst_ratio_, error / bound);
    if (!(error <= bound) || !std::isfinite(bound)) {
      return fail(row, fmt::format("off by {:.3g}, bound {:.3g} (first value {:.6g}, exact {:.6g})", error, bound,
                                   rows.found[row * width], rows.exact[row * width]));
    }
  }
}

void Conformance::check_residual(const ForwardOutputs& outputs, Failures& failures) const {
  if (!outputs.out_residual.defined()) return;
  const std::vector<double> out = packed_values(outputs.out.tensor());
  const std::vector<double> residual = packed_values(outputs.out_residual.tensor());
  for (std::size_t i = 0; i < out.size(); ++i) {
    if (!std::isfinite(forward_.out[i])) continue;
    if (std::abs(residual[i]) <= half_ulp(out[i])) continue;
    failures.push_back(fmt::format("out_residual[{}] = {} beside out = {}: above half an ulp, {}", i, residual[i],
                                   out[i], half_ulp(out[i])));
    return;
  }
}

Failures Conformance::check_forward(const ForwardOutputs& outputs, const Pipeline& pipeline) {
  Failures failures;
  const ErrorBounds& bounds = bounds_for(pipeline, DataType::kBFloat16);
  const auto check = [&](Output output, const OwnedTensor& found, const std::vector<double>& exact,
                         const std::vector<double>& bound, std::int64_t width) {
    const Budget limits = budget_of(output, found.tensor().dtype, pipeline, exact);
    check_rows({output, limits, packed_values(found.tensor()), exact, bound, width}, failures);
  };
  check(Output::kOut, outputs.out, forward_.out, bounds.out, kLatentDim);
  check(Output::kLse, outputs.lse, forward_.lse, bounds.lse, 1);
  check(Output::kMaxLogits, outputs.max_logits, forward_.max_logits, bounds.max_logits, 1);
  check_residual(outputs, failures);
  if (!outputs.gaps_untouched()) failures.emplace_back("forward wrote outside its outputs");
  return failures;
}

Failures Conformance::check_backward(const Gradients& gradients, const Pipeline& pipeline, DataType dq_dtype) {
  Failures failures;
  const ErrorBounds& bounds = bounds_for(pipeline, dq_dtype);
  const auto check = [&](Output output, const OwnedTensor& found, const std::vector<double>& exact,
                         const std::vector<double>& bound, std::int64_t width) {
    if (!found.defined()) return;
    const Budget limits = budget_of(output, found.tensor().dtype, pipeline, exact);
    check_rows({output, limits, packed_values(found.tensor()), exact, bound, width}, failures);
  };
  check(Output::kDqLatent, gradients.dq_latent, backward_.dq_latent, bounds.dq_latent, kLatentDim);
  check(Output::kDqRope, gradients.dq_rope, backward_.dq_rope, bounds.dq_rope, kRopeDim);
  check(Output::kDkvLatent, gradients.dkv_latent, backward_.dkv_latent, bounds.dkv_latent, kLatentDim);
  check(Output::kDkRope, gradients.dk_rope, backward_.dk_rope, bounds.dk_rope, kRopeDim);
  check(Output::kDsink, gradients.dsink, backward_.dsink, bounds.dsink, 1);
  if (!gradients.gaps_untouched()) failures.emplace_back("backward wrote outside its gradients");
  return failures;
}

Failures Conformance::check_run(const Options& options, DataType dq_dtype) {
  const Pipeline pipeline = pipeline_of(options);
  const ForwardOutputs outputs = run_forward(laid_out_.inputs(), options, entry_.layout);
  Failures failures = check_forward(outputs, pipeline);
  if (!entry_.has(kBackward)) return failures;
  const Gradients gradients =
      run_backward(laid_out_.inputs(), outputs, laid_out_.dout(), laid_out_.dlse(), options, dq_dtype, entry_.layout);
  const Failures more = check_backward(gradients, pipeline, dq_dtype);
  failures.insert(failures.end(), more.begin(), more.end());
  return failures;
}

}  // namespace sparsemla::cases
