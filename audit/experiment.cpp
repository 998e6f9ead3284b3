#include "audit/experiment.h"

namespace sparsemla::audit {

ForwardRun allocate_forward(const ProblemSizes& sizes, bool residual) {
  ForwardRun run;
  run.out = TensorBuffer(DataType::kBFloat16, {sizes.num_tokens, sizes.num_heads, kLatentDim});
  run.lse = TensorBuffer(DataType::kFloat32, {sizes.num_tokens, sizes.num_heads});
  if (residual) {
    run.residual = TensorBuffer(DataType::kBFloat16, {sizes.num_tokens, sizes.num_heads, kLatentDim});
  }
  return run;
}

ForwardArguments forward_arguments(const AttentionInputs& inputs, const ForwardRun& outputs) {
  ForwardArguments arguments;
  static_cast<AttentionInputs&>(arguments) = inputs;
  arguments.out = outputs.out.view();
  arguments.out_residual = outputs.residual.view();
  arguments.lse = outputs.lse.view();
  return arguments;
}

Options options_for(const AuditRequest& request, const Pipeline& pipeline) {
  Options options = request.options;
  options.purpose = Purpose::kTraining;
  options.pipeline = pipeline;
  if (request.device.type != DeviceType::kCpu) options.num_threads = 0;  // those are for the reference
  return options;
}

std::vector<std::int32_t> ordered_lists(const Experiment& experiment, SlotOrder order, WalkDirection walk) {
  const Subject& subject = experiment.subject;
  const std::uint64_t seed = experiment.request.order_seed;
  return reorder_slots(subject.indices, subject.sizes.num_tokens, subject.sizes.topk, experiment.dominant.keys, order,
                       walk, seed);
}

GradientBuffers allocate_gradients(const ProblemSizes& sizes, bool has_sink, DataType grad_dtype) {
  GradientBuffers buffers;
  buffers.dq_latent = TensorBuffer(grad_dtype, {sizes.num_tokens, sizes.num_heads, kLatentDim});
  buffers.dkv_latent = TensorBuffer(DataType::kFloat32, {sizes.num_keys, kLatentDim});
  if (sizes.rope_dim > 0) {
    buffers.dq_rope = TensorBuffer(grad_dtype, {sizes.num_tokens, sizes.num_heads, kRopeDim});
    buffers.dk_rope = TensorBuffer(DataType::kFloat32, {sizes.num_keys, kRopeDim});
  }
  if (has_sink) {
    buffers.dsink = TensorBuffer(DataType::kFloat32, {sizes.num_heads});
  }
  return buffers;
}

BackwardArguments backward_arguments(const AttentionInputs& inputs, const Subject& subject, const ForwardRun& forward,
                                     const GradientBuffers& gradients, bool residual) {
  BackwardArguments arguments;
  static_cast<AttentionInputs&>(arguments) = inputs;
  arguments.out = forward.out.view();
  arguments.lse = forward.lse.view();
  if (residual) {
    arguments.out_residual = forward.residual.view();
  }
  arguments.dout = subject.dout;
  arguments.dlse = subject.dlse;
  arguments.dq_latent = gradients.dq_latent.view();
  arguments.dq_rope = gradients.dq_rope.view();
  arguments.dkv_latent = gradients.dkv_latent.view();
  arguments.dk_rope = gradients.dk_rope.view();
  arguments.dsink = gradients.dsink.view();
  return arguments;
}

}  // namespace sparsemla::audit
