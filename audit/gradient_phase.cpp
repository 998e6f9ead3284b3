// Gradients: each pipeline and order with the residual on and off and operands bf16 and split.
#include <fmt/format.h>

#include <cmath>
#include <limits>
#include <utility>

#include "audit/experiment.h"
#include "device/call.h"

namespace sparsemla::audit {
namespace {

/// The reference's gradients as tensors; those that do not exist stay undefined.
Gradients views_of(const reference::BackwardResult& result, const ProblemSizes& sizes, bool has_sink) {
  const auto view = [](const std::vector<double>& data, std::initializer_list<std::int64_t> shape) {
    return Tensor::contiguous(data.data(), DataType::kFloat64, shape);
  };
  Gradients gradients;
  gradients.dq_latent = view(result.dq_latent, {sizes.num_tokens, sizes.num_heads, kLatentDim});
  gradients.dkv_latent = view(result.dkv_latent, {sizes.num_keys, kLatentDim});
  if (sizes.rope_dim > 0) {
    gradients.dq_rope = view(result.dq_rope, {sizes.num_tokens, sizes.num_heads, kRopeDim});
    gradients.dk_rope = view(result.dk_rope, {sizes.num_keys, kRopeDim});
  }
  if (has_sink) {
    gradients.dsink = view(result.dsink, {sizes.num_heads});
  }
  return gradients;
}

/// Fills `errors` and the count of non-finite mismatches with whatever `value` has.
void measure(const Gradients& value, const Gradients& reference, int threads, GradientEntry& entry) {
  const auto error_of = [&](const Tensor& tensor, const Tensor& expected) -> std::optional<double> {
    if (!tensor.defined()) return std::nullopt;
    entry.nonfinite_mismatches += count_nonfinite_mismatch(tensor, expected, threads);
    const double error = rel_l2(tensor, expected, threads);
    // NaN is for a reference that is not finite itself. Beside a finite one it comes from squares that overflow.
    const bool overflows = std::isnan(error) && !std::isnan(rel_l2(expected, expected, threads));
    return overflows ? std::numeric_limits<double>::infinity() : error;
  };
  entry.errors.dq_latent = error_of(value.dq_latent, reference.dq_latent);
  entry.errors.dq_rope = error_of(value.dq_rope, reference.dq_rope);
  entry.errors.dkv_latent = error_of(value.dkv_latent, reference.dkv_latent);
  entry.errors.dk_rope = error_of(value.dk_rope, reference.dk_rope);
  entry.errors.dsink = error_of(value.dsink, reference.dsink);
  if (!value.dq_latent.defined()) return;
  const RowError rows = value.dq_rope.defined() ? row_error_joined(value.dq_latent, reference.dq_latent, value.dq_rope,
                                                                   reference.dq_rope, threads)
                                                : row_error(value.dq_latent, reference.dq_latent, threads);
  entry.errors.dq_row_p99 = rows.p99;
  entry.errors.dq_row_p999 = rows.p999;
}

Gradients views_of(const GradientBuffers& buffers) {
  return {buffers.dq_latent.view(), buffers.dq_rope.view(), buffers.dkv_latent.view(), buffers.dk_rope.view(),
          buffers.dsink.view()};
}

Options options_for(const Experiment& experiment, Pipeline pipeline, Operands operands, bool residual) {
  pipeline.operands = operands;
  pipeline.residual = residual;
  return audit::options_for(experiment.request, pipeline);
}

/// One forward with the residual serves both backward passes: with it and without.
void audit_operands(Experiment& experiment, const PipelineChoice& choice, SlotOrder order, Operands operands,
                    const Gradients& reference, Steps& steps) {
  const Subject& subject = experiment.subject;
  const AuditRequest& request = experiment.request;
  const char* operands_name = operands == Operands::kSplit ? "split" : "bf16";
  const std::string label = fmt::format("{} {} {}", choice.name, to_string(order), operands_name);
  const std::vector<std::int32_t> lists = ordered_lists(experiment, order, choice.pipeline.walk);
  const AttentionInputs inputs = subject.with_indices(lists);

  steps.begin("training forward " + label);
  const ForwardRun run = allocate_forward(subject.sizes, true);
  device::forward_on(request.device, forward_arguments(inputs, run),
                     options_for(experiment, choice.pipeline, operands, true));

  const GradientBuffers buffers = allocate_gradients(subject.sizes, subject.inputs.sink.defined(), request.grad_dtype);
  for (const bool residual : {true, false}) {
    steps.begin(fmt::format("backward {} residual {}", label, residual ? "on" : "off"));
    device::backward_on(request.device, backward_arguments(inputs, subject, run, buffers, residual),
                        options_for(experiment, choice.pipeline, operands, residual));
    GradientEntry entry;
    entry.pipeline = choice.name;
    entry.order = to_string(order);
    entry.residual = residual;
    entry.operands = operands;
    entry.dq_in_fp32 = request.grad_dtype == DataType::kFloat32;
    entry.judged = choice.judged && residual == choice.pipeline.residual;
    measure(views_of(buffers), reference, request.options.num_threads, entry);
    experiment.report.gradients.push_back(std::move(entry));
  }
}

void audit_candidate(Experiment& experiment, const Gradients& reference, Steps& steps) {
  const CandidateFile& candidate = *experiment.candidate;
  steps.begin("gradients of the candidate");
  GradientEntry entry;
  entry.pipeline = kCandidateName;
  entry.order = kGivenOrder;
  entry.dq_in_fp32 = candidate.dq_latent.dtype == DataType::kFloat32 || candidate.dq_latent.dtype == DataType::kFloat64;
  measure({candidate.dq_latent, candidate.dq_rope, candidate.dkv_latent, candidate.dk_rope, candidate.dsink}, reference,
          experiment.request.options.num_threads, entry);
  experiment.report.gradients.push_back(std::move(entry));
}

bool judges_candidate(const Experiment& experiment) {
  return experiment.candidate != nullptr && experiment.candidate->has_gradients();
}

}  // namespace

int count_gradient_steps(const Experiment& experiment) {
  const AuditRequest& request = experiment.request;
  const int grid = request.gradients ? static_cast<int>(request.pipelines.size() * request.orders.size()) * 6 : 0;
  const int candidate = judges_candidate(experiment) ? 1 : 0;
  return grid + candidate > 0 ? 1 + grid + candidate : 0;
}

void run_gradient_phase(Experiment& experiment, Steps& steps) {
  const AuditRequest& request = experiment.request;
  const Subject& subject = experiment.subject;
  if (count_gradient_steps(experiment) == 0) return;
  steps.begin("fp64 reference, backward");
  const reference::BackwardResult result =
      reference::backward(subject.inputs, subject.dout, subject.dlse, request.options.num_threads);
  const Gradients reference = views_of(result, subject.sizes, subject.inputs.sink.defined());
  if (request.gradients) {
    for (const PipelineChoice& choice : request.pipelines) {
      for (const SlotOrder order : request.orders) {
        audit_operands(experiment, choice, order, Operands::kBf16, reference, steps);
        audit_operands(experiment, choice, order, Operands::kSplit, reference, steps);
      }
    }
  }
  if (judges_candidate(experiment)) {
    audit_candidate(experiment, reference, steps);
  }
}

}  // namespace sparsemla::audit
