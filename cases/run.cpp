#include "cases/run.h"

#include <cstring>

#include "device/call.h"
#include "sparsemla/error.h"

namespace sparsemla::cases {
namespace {

std::vector<std::int64_t> shape_of(const Tensor& tensor) {
  return {tensor.shape.begin(), tensor.shape.begin() + tensor.rank};
}

/// Token 0 of `source` seen by every token.
Tensor broadcast_tokens(const Tensor& source, const char* name) {
  if (!source.defined() || source.shape[0] == 0) return source;
  const std::vector<std::byte> bytes = packed_bytes(source);
  const std::size_t row = bytes.size() / static_cast<std::size_t>(source.shape[0]);
  for (std::size_t at = row; at < bytes.size(); at += row) {
    if (std::memcmp(bytes.data(), bytes.data() + at, row) != 0) {
      throw Error(name, "tokens that differ", "equal tokens for a broadcast layout");
    }
  }
  Tensor view = source;
  view.strides[0] = 0;
  return view;
}

void append_if_different(std::string& names, const char* name, const OwnedTensor& a, const OwnedTensor& b) {
  if (a.defined() == b.defined() && a.bytes() == b.bytes()) return;
  if (!names.empty()) names += ' ';
  names += name;
}

Device device_of(const Options& options) {
  return {options.backend == kDeviceBackend ? DeviceType::kCuda : DeviceType::kCpu, 0};
}

/// Layout of an output: it may not overlap itself.
Layout output_layout(Layout layout) { return layout == Layout::kBroadcast ? Layout::kContiguous : layout; }

/// Columns [begin, end) of a fused tensor, filled from packed rows.
void fill_columns(const Tensor& fused, std::int64_t begin, const Tensor& part) {
  const Tensor target = fused.columns(begin, begin + part.shape[part.rank - 1]);
  const std::vector<std::byte> bytes = packed_bytes(part);
  const auto width = static_cast<std::size_t>(part.shape[part.rank - 1] * size_bytes(part.dtype));
  auto* to = static_cast<std::byte*>(target.data);
  const std::int64_t pitch = fused.shape[fused.rank - 1] * size_bytes(fused.dtype);
  for (std::size_t at = 0; at < bytes.size(); at += width, to += pitch) std::memcpy(to, bytes.data() + at, width);
}

}  // namespace

Tensor LaidOutProblem::copy(const Tensor& source, Layout layout) {
  if (!source.defined()) return source;
  storage_.emplace_back(source.dtype, shape_of(source), layout, static_cast<unsigned char>(0xFF));
  storage_.back().assign(packed_bytes(source).data());
  return storage_.back().tensor();
}

LaidOutProblem::LaidOutProblem(const Problem& problem, Layout layout) : inputs_(problem.inputs()) {
  dout_ = problem.dout_tensor();
  dlse_ = problem.dlse_tensor();
  if (!dout_.defined() && problem.num_tokens == 0) {  // an empty dout is a dout too
    dout_ = Tensor::contiguous(nullptr, DataType::kBFloat16, {0, problem.num_heads, kLatentDim});
  }
  if (layout == Layout::kContiguous) return;  // the problem's own exact vectors: sanitizers see every overrun
  if (layout == Layout::kBroadcast) {
    inputs_.q_latent = broadcast_tokens(inputs_.q_latent, "q_latent");
    inputs_.q_rope = broadcast_tokens(inputs_.q_rope, "q_rope");
    inputs_.indices = broadcast_tokens(inputs_.indices, "indices");
    dout_ = broadcast_tokens(dout_, "dout");
    dlse_ = broadcast_tokens(dlse_, "dlse");
    return;
  }
  if (layout == Layout::kFused && problem.rope_dim == kRopeDim) {
    const std::int64_t width = kLatentDim + kRopeDim;
    const auto fuse = [&](Tensor& latent, Tensor& rope, std::vector<std::int64_t> shape) {
      storage_.emplace_back(latent.dtype, std::move(shape), Layout::kContiguous, static_cast<unsigned char>(0xFF));
      const Tensor fused = storage_.back().tensor();
      fill_columns(fused, 0, latent);
      fill_columns(fused, kLatentDim, rope);
      latent = fused.columns(0, kLatentDim);
      rope = fused.columns(kLatentDim, width);
    };
    fuse(inputs_.q_latent, inputs_.q_rope, {problem.num_tokens, problem.num_heads, width});
    fuse(inputs_.kv_latent, inputs_.k_rope, {problem.num_keys, 1, width});
    inputs_.kv_latent = inputs_.kv_latent.squeeze(1);
    inputs_.k_rope = inputs_.k_rope.squeeze(1);
  } else {
    for (Tensor* t : {&inputs_.q_latent, &inputs_.q_rope, &inputs_.kv_latent, &inputs_.k_rope}) *t = copy(*t, layout);
  }
  for (Tensor* t : {&inputs_.indices, &inputs_.topk_length, &inputs_.sink, &inputs_.cu_seqlens_q, &inputs_.cu_seqlens_k,
                    &dout_, &dlse_}) {
    *t = copy(*t, layout);
  }
}

bool ForwardOutputs::gaps_untouched() const {
  return out.gaps_untouched() && lse.gaps_untouched() && max_logits.gaps_untouched() && out_residual.gaps_untouched();
}

bool ForwardOutputs::untouched() const {
  return out.untouched() && lse.untouched() && max_logits.untouched() && out_residual.untouched();
}

bool Gradients::gaps_untouched() const {
  return dq_latent.gaps_untouched() && dq_rope.gaps_untouched() && dkv_latent.gaps_untouched() &&
         dk_rope.gaps_untouched() && dsink.gaps_untouched();
}

bool Gradients::untouched() const {
  return dq_latent.untouched() && dq_rope.untouched() && dkv_latent.untouched() && dk_rope.untouched() &&
         dsink.untouched();
}

const std::vector<CpuEngine>& engines() {
  static const std::vector<CpuEngine> kEngines = [] {
    const Problem problem = make_iid({.num_tokens = 1, .num_keys = 1, .topk = 1, .num_heads = 1}, false);
    const ForwardOutputs outputs = make_forward_outputs(problem.inputs(), true);
    std::vector<CpuEngine> found;
    for (const CpuEngine engine : {CpuEngine::kFp32, CpuEngine::kAmx}) {
      Options options;
      options.cpu_engine = engine;
      try {
        (void)plan(forward_arguments(problem.inputs(), outputs), options);
        found.push_back(engine);
      } catch (const Error&) {  // not on this processor: the Error says so, and plan() is how one asks
      }
    }
    return found;
  }();
  return kEngines;
}

std::string_view to_string(CpuEngine engine) noexcept {
  switch (engine) {
    case CpuEngine::kAuto:
      return "auto";
    case CpuEngine::kFp32:
      return "fp32";
    case CpuEngine::kAmx:
      return "amx";
  }
  return "?";
}

bool has_residual(const Options& options) {
  return options.pipeline ? options.pipeline->residual : options.purpose == Purpose::kTraining;
}

ForwardOutputs make_forward_outputs(const AttentionInputs& inputs, bool residual, Layout layout, unsigned char fill) {
  const std::int64_t tokens = inputs.q_latent.shape[0];
  const std::int64_t heads = inputs.q_latent.shape[1];
  layout = output_layout(layout);
  ForwardOutputs outputs;
  outputs.out = OwnedTensor(DataType::kBFloat16, {tokens, heads, kLatentDim}, layout, fill);
  outputs.lse = OwnedTensor(DataType::kFloat32, {tokens, heads}, layout, fill);
  outputs.max_logits = OwnedTensor(DataType::kFloat32, {tokens, heads}, layout, fill);
  if (residual) outputs.out_residual = OwnedTensor(DataType::kBFloat16, {tokens, heads, kLatentDim}, layout, fill);
  return outputs;
}

Gradients make_gradients(const AttentionInputs& inputs, DataType dq_dtype, Layout layout, unsigned char fill) {
  const std::int64_t tokens = inputs.q_latent.shape[0];
  const std::int64_t heads = inputs.q_latent.shape[1];
  const std::int64_t keys = inputs.kv_latent.shape[0];
  layout = output_layout(layout);
  Gradients gradients;
  gradients.dq_latent = OwnedTensor(dq_dtype, {tokens, heads, kLatentDim}, layout, fill);
  gradients.dkv_latent = OwnedTensor(DataType::kFloat32, {keys, kLatentDim}, layout, fill);
  if (inputs.q_rope.defined()) {
    gradients.dq_rope = OwnedTensor(dq_dtype, {tokens, heads, kRopeDim}, layout, fill);
    gradients.dk_rope = OwnedTensor(DataType::kFloat32, {keys, kRopeDim}, layout, fill);
  }
  if (inputs.sink.defined()) gradients.dsink = OwnedTensor(DataType::kFloat32, {heads}, layout, fill);
  return gradients;
}

ForwardArguments forward_arguments(const AttentionInputs& inputs, const ForwardOutputs& outputs) {
  ForwardArguments arguments;
  static_cast<AttentionInputs&>(arguments) = inputs;
  arguments.out = outputs.out.tensor();
  arguments.lse = outputs.lse.tensor();
  arguments.max_logits = outputs.max_logits.tensor();
  arguments.out_residual = outputs.out_residual.tensor();
  return arguments;
}

BackwardArguments backward_arguments(const AttentionInputs& inputs, const ForwardOutputs& outputs, const Tensor& dout,
                                     const Tensor& dlse, const Gradients& gradients) {
  BackwardArguments arguments;
  static_cast<AttentionInputs&>(arguments) = inputs;
  arguments.out = outputs.out.tensor();
  arguments.out_residual = outputs.out_residual.tensor();
  arguments.lse = outputs.lse.tensor();
  arguments.dout = dout;
  arguments.dlse = dlse;
  arguments.dq_latent = gradients.dq_latent.tensor();
  arguments.dq_rope = gradients.dq_rope.tensor();
  arguments.dkv_latent = gradients.dkv_latent.tensor();
  arguments.dk_rope = gradients.dk_rope.tensor();
  arguments.dsink = gradients.dsink.tensor();
  return arguments;
}

void run_forward_into(ForwardOutputs& outputs, const AttentionInputs& inputs, const Options& options) {
  device::forward_on(
      device_of(options), forward_arguments(inputs, outputs), options,
      {outputs.out.storage(), outputs.lse.storage(), outputs.max_logits.storage(), outputs.out_residual.storage()});
}

ForwardOutputs run_forward(const AttentionInputs& inputs, const Options& options, Layout layout) {
  ForwardOutputs outputs = make_forward_outputs(inputs, has_residual(options), layout);
  run_forward_into(outputs, inputs, options);
  return outputs;
}

Gradients run_backward(const AttentionInputs& inputs, const ForwardOutputs& outputs, const Tensor& dout,
                       const Tensor& dlse, const Options& options, DataType dq_dtype, Layout layout) {
  Gradients gradients = make_gradients(inputs, dq_dtype, layout);
  device::backward_on(device_of(options), backward_arguments(inputs, outputs, dout, dlse, gradients), options,
                      {gradients.dq_latent.storage(), gradients.dq_rope.storage(), gradients.dkv_latent.storage(),
                       gradients.dk_rope.storage(), gradients.dsink.storage()});
  return gradients;
}

Results run(const Problem& problem, const Options& options, DataType dq_dtype) {
  const LaidOutProblem laid_out(problem, Layout::kContiguous);
  Results results{.forward = run_forward(laid_out.inputs(), options), .gradients = {}};
  if (laid_out.dout().defined()) {
    results.gradients =
        run_backward(laid_out.inputs(), results.forward, laid_out.dout(), laid_out.dlse(), options, dq_dtype);
  }
  return results;
}

std::string differences(const ForwardOutputs& a, const ForwardOutputs& b) {
  std::string names;
  append_if_different(names, "out", a.out, b.out);
  append_if_different(names, "lse", a.lse, b.lse);
  append_if_different(names, "max_logits", a.max_logits, b.max_logits);
  append_if_different(names, "out_residual", a.out_residual, b.out_residual);
  return names;
}

std::string differences(const Gradients& a, const Gradients& b) {
  std::string names;
  append_if_different(names, "dq_latent", a.dq_latent, b.dq_latent);
  append_if_different(names, "dq_rope", a.dq_rope, b.dq_rope);
  append_if_different(names, "dkv_latent", a.dkv_latent, b.dkv_latent);
  append_if_different(names, "dk_rope", a.dk_rope, b.dk_rope);
  append_if_different(names, "dsink", a.dsink, b.dsink);
  return names;
}

std::string differences(const Results& a, const Results& b) {
  const std::string forward = differences(a.forward, b.forward);
  const std::string backward = differences(a.gradients, b.gradients);
  return forward + (forward.empty() || backward.empty() ? "" : " ") + backward;
}

}  // namespace sparsemla::cases
