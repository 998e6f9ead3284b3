#include "plan/plan.h"

#include <fmt/format.h>

#include "core/sizes.h"
#include "sparsemla/error.h"

namespace sparsemla {
namespace {

Pipeline choose_pipeline(const Backend& backend, const Options& options, bool has_residual, Plan& plan) {
  if (options.pipeline) {
    plan.reasons.emplace_back("pipeline: as asked for");
    return *options.pipeline;
  }
  return backend.default_pipeline(options.purpose, has_residual, plan.reasons);
}

void check_residual(const Pipeline& pipeline, bool has_residual, bool backward) {
  if (pipeline.residual == has_residual) return;
  if (has_residual) throw Error("out_residual", "a tensor", "nothing, since the pipeline has no residual");
  throw Error("out_residual", "nothing",
              backward ? "the forward's out_residual, or a pipeline without residual"
                       : "bfloat16 [T, H, 512], or a pipeline without residual, or purpose inference");
}

double count_flops(const Sizes& sizes, bool backward) {
  const double forward_width = static_cast<double>(sizes.score_dim() + kLatentDim);
  const double width = backward ? 3.0 * static_cast<double>(sizes.score_dim()) + 2.0 * kLatentDim : forward_width;
  return 2.0 * static_cast<double>(sizes.num_tokens) * static_cast<double>(sizes.num_heads) *
         static_cast<double>(sizes.topk) * width;
}

/// All but what the backend fills in.
Plan begin_plan(const Backend& backend, const AttentionInputs& inputs, const Options& options, bool backward,
                bool has_residual) {
  Plan plan;
  plan.backward = backward;
  plan.backend = backend.name;
  plan.reasons.push_back(options.backend.empty()
                             ? fmt::format("backend: the tensors are on {}", to_string(inputs.q_latent.device))
                             : "backend: as asked for");
  plan.pipeline = choose_pipeline(backend, options, has_residual, plan);
  check_residual(plan.pipeline, has_residual, backward);
  plan.flops = count_flops(sizes_of(inputs), backward);
  return plan;
}

}  // namespace

Plan make_plan(const ForwardArguments& arguments, const Options& options) {
  const Backend& backend = select_backend(options, arguments.q_latent.device);
  Plan plan = begin_plan(backend, arguments, options, false, arguments.out_residual.defined());
  backend.complete_forward(plan, arguments, options);
  return plan;
}

Plan make_plan(const BackwardArguments& arguments, const Options& options) {
  const Backend& backend = select_backend(options, arguments.q_latent.device);
  Plan plan = begin_plan(backend, arguments, options, true, arguments.out_residual.defined());
  backend.complete_backward(plan, arguments, options);
  return plan;
}

}  // namespace sparsemla
