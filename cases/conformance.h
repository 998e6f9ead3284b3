// Holding one run of a case against the fp64 reference, the error bounds, the budgets and the hand-computed values.
#pragma once

#include <map>
#include <string>
#include <tuple>
#include <vector>

#include "cases/cases.h"
#include "cases/error_bound.h"
#include "cases/run.h"
#include "numerics/budgets.h"
#include "reference/reference.h"

namespace sparsemla::cases {

/// Sentences, one a failure; empty = conforms.
using Failures = std::vector<std::string>;

/// A case made once, with its exact results, to hold any number of runs against.
class Conformance {
 public:
  explicit Conformance(const Case& entry);

  [[nodiscard]] const Problem& problem() const noexcept { return problem_; }
  [[nodiscard]] const LaidOutProblem& laid_out() const noexcept { return laid_out_; }
  [[nodiscard]] const reference::ForwardResult& exact_forward() const noexcept { return forward_; }
  [[nodiscard]] const reference::BackwardResult& exact_backward() const noexcept { return backward_; }

  /// The reference against the values worked out by hand.
  [[nodiscard]] Failures check_reference() const;
  /// Runs forward and (for a case with a gradient) backward, and checks all outputs: the gaps around them unchanged,
  /// NaN and Inf where the reference has them, every row inside its bound, and for random inputs the whole-tensor
  /// budgets.
  [[nodiscard]] Failures check_run(const Options& options, DataType dq_dtype = DataType::kBFloat16);

  /// Parts of check_run, for outputs that come from elsewhere.
  [[nodiscard]] Failures check_forward(const ForwardOutputs& outputs, const Pipeline& pipeline);
  [[nodiscard]] Failures check_backward(const Gradients& gradients, const Pipeline& pipeline, DataType dq_dtype);

  /// Whether the whole-tensor budgets apply.
  [[nodiscard]] bool well_conditioned() const noexcept { return well_conditioned_; }
  /// Largest (error of a row) / (its bound) seen so far: how much of the worst case is used up.
  [[nodiscard]] double worst_ratio() const noexcept { return worst_ratio_; }

 private:
  struct Rows;
  const ErrorBounds& bounds_for(const Pipeline& pipeline, DataType dq_dtype);
  [[nodiscard]] bool is_well_conditioned() const;
  [[nodiscard]] Budget budget_of(Output output, DataType dtype, const Pipeline& pipeline,
                                 const std::vector<double>& exact) const;
  void check_budget(const Rows& rows, Failures& failures) const;
  void check_rows(const Rows& rows, Failures& failures);
  void check_residual(const ForwardOutputs& outputs, Failures& failures) const;

  const Case& entry_;
  Problem problem_;
  LaidOutProblem laid_out_;
  reference::ForwardResult forward_;
  reference::BackwardResult backward_;
  std::map<std::tuple<Operands, RowSum, bool, DataType>, ErrorBounds> bounds_;  // all that bounds depend on
  bool well_conditioned_ = false;
  double worst_ratio_ = 0;
};

/// The case without its gradient: cheaper to make, for a backend that has no backward. `entry` outlives it.
[[nodiscard]] Case forward_only(const Case& entry);

/// The pipeline that a call with these options runs.
[[nodiscard]] Pipeline pipeline_of(const Options& options);

}  // namespace sparsemla::cases
