#include "plan/plan.h"

#include <fmt/format.h>

#include "core/sizes.h"
#include "sparsemla/error.h"

namespace sparsemla {
namespace {

Pipeline choose_pipeline(const Options& options, bool has_residual, Plan& plan) {
  if (options.pipeline) {
    plan.reasons.emplace_back("pipeline: as asked for");
    return *options.pipeline;
  }
  Pipeline pipeline = Pipeline::training();
  if (options.purpose == Purpose::kInference) {
    // For 0 to 3 % of the CPU backend's time; why: docs/decisions/004-cpu-inference-exact.md.
    pipeline.residual = has_residual;
    plan.reasons.emplace_back(
        "pipeline: exact max, for at most a few percent of the time; inference equals training bitwise");
  } else {
    plan.reasons.emplace_back("pipeline: exact max and residual, since gradients will be taken");
  }
  return pipeline;
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

}  // namespace

Plan make_plan(const AttentionInputs& inputs, const Options& options, bool backward, bool has_residual) {
  const Backend& backend = select_backend(options, inputs.q_latent.device);
  Plan plan;
  plan.backward = backward;
  plan.backend = backend.name;
  plan.reasons.push_back(options.backend.empty()
                             ? fmt::format("backend: the tensors are on {}", to_string(inputs.q_latent.device))
                             : "backend: as asked for");
  plan.pipeline = choose_pipeline(options, has_residual, plan);
  check_residual(plan.pipeline, has_residual, backward);
  plan.flops = count_flops(sizes_of(inputs), backward);
  backend.complete(plan, inputs, options);
  return plan;
}

}  // namespace sparsemla
