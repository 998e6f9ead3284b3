#include <fmt/format.h>

#include <chrono>
#include <cmath>
#include <initializer_list>
#include <memory>
#include <utility>

#include "audit/attention_file.h"
#include "audit/tensor_buffer.h"
#include "cli/commands.h"
#include "cli/options.h"
#include "cli/progress.h"
#include "device/call.h"
#include "io/safetensors.h"
#include "reference/reference.h"
#include "sparsemla/error.h"

namespace sparsemla::cli {
namespace {

using audit::ProblemSizes;
using audit::TensorBuffer;
using NamedTensors = std::vector<std::pair<std::string, Tensor>>;

struct RunOptions {
  std::filesystem::path input;
  std::filesystem::path output;
  bool training = false;
  bool backward = false;
  bool deterministic = false;
  bool reference = false;
  std::optional<std::string> grad_dtype;
  ProblemOptions problem;
  PipelineOptions pipeline;
  EngineOptions engine;
};

/// All that a run writes; tensors that do not apply stay undefined.
struct Outputs {
  TensorBuffer out, lse, max_logits, out_residual;
  TensorBuffer dq_latent, dq_rope, dkv_latent, dk_rope, dsink;

  [[nodiscard]] NamedTensors named() const {
    NamedTensors all;
    const auto add = [&all](const char* name, const TensorBuffer& buffer) {
      if (buffer.defined()) all.emplace_back(name, buffer.view());
    };
    add("out", out);
    add("lse", lse);
    add("max_logits", max_logits);
    add("out_residual", out_residual);
    add("dq_latent", dq_latent);
    add("dq_rope", dq_rope);
    add("dkv_latent", dkv_latent);
    add("dk_rope", dk_rope);
    add("dsink", dsink);
    return all;
  }
};

ForwardArguments forward_arguments(const AttentionInputs& inputs, const Outputs& outputs) {
  ForwardArguments arguments;
  static_cast<AttentionInputs&>(arguments) = inputs;
  arguments.out = outputs.out.view();
  arguments.lse = outputs.lse.view();
  arguments.max_logits = outputs.max_logits.view();
  arguments.out_residual = outputs.out_residual.view();
  return arguments;
}

BackwardArguments backward_arguments(const audit::AttentionFile& file, const Outputs& outputs) {
  BackwardArguments arguments;
  static_cast<AttentionInputs&>(arguments) = file.inputs;
  arguments.out = outputs.out.view();
  arguments.lse = outputs.lse.view();
  arguments.out_residual = outputs.out_residual.view();
  arguments.dout = file.dout;
  arguments.dlse = file.dlse;
  arguments.dq_latent = outputs.dq_latent.view();
  arguments.dq_rope = outputs.dq_rope.view();
  arguments.dkv_latent = outputs.dkv_latent.view();
  arguments.dk_rope = outputs.dk_rope.view();
  arguments.dsink = outputs.dsink.view();
  return arguments;
}

void allocate_gradients(Outputs& outputs, const AttentionInputs& inputs, const ProblemSizes& sizes, DataType dtype) {
  outputs.dq_latent = TensorBuffer(dtype, {sizes.num_tokens, sizes.num_heads, kLatentDim});
  outputs.dkv_latent = TensorBuffer(DataType::kFloat32, {sizes.num_keys, kLatentDim});
  if (inputs.q_rope.defined()) outputs.dq_rope = TensorBuffer(dtype, {sizes.num_tokens, sizes.num_heads, kRopeDim});
  if (inputs.k_rope.defined()) outputs.dk_rope = TensorBuffer(DataType::kFloat32, {sizes.num_keys, kRopeDim});
  if (inputs.sink.defined()) outputs.dsink = TensorBuffer(DataType::kFloat32, {sizes.num_heads});
}

std::string run_library(const RunOptions& run, const audit::AttentionFile& file, ProgressLine& progress) {
  const AttentionInputs& inputs = file.inputs;
  const ProblemSizes sizes = audit::sizes_of(inputs);
  Options options = to_options(run.engine);
  const Device where = to_device(run.engine);
  options.deterministic = run.deterministic;
  options.purpose = run.training || run.backward ? Purpose::kTraining : Purpose::kInference;

  Outputs outputs;
  outputs.out = TensorBuffer(DataType::kBFloat16, {sizes.num_tokens, sizes.num_heads, kLatentDim});
  outputs.lse = TensorBuffer(DataType::kFloat32, {sizes.num_tokens, sizes.num_heads});
  outputs.max_logits = TensorBuffer(DataType::kFloat32, {sizes.num_tokens, sizes.num_heads});
  options.pipeline = choose_pipeline(run.pipeline, forward_arguments(inputs, outputs), options, where);
  const bool residual = options.pipeline ? options.pipeline->residual : options.purpose == Purpose::kTraining;
  if (residual) {
    outputs.out_residual = TensorBuffer(DataType::kBFloat16, {sizes.num_tokens, sizes.num_heads, kLatentDim});
  }
  if (run.backward) {
    allocate_gradients(outputs, inputs, sizes, grad_dtype(run.grad_dtype));
    (void)device::plan_on(where, backward_arguments(file, outputs),
                          options);  // rejects a bad dout before the forward is computed
  }
  const Plan chosen = device::plan_on(where, forward_arguments(inputs, outputs), options);
  progress.set("forward");
  device::forward_on(where, forward_arguments(inputs, outputs), options);
  if (run.backward) {
    progress.set("backward");
    device::backward_on(where, backward_arguments(file, outputs), options);
  }
  progress.set("writing");
  io::write_safetensors(run.output, outputs.named(), {{"pipeline", to_string(chosen.pipeline)}});
  return fmt::format("{} {}, {}", chosen.backend, chosen.variant, to_string(chosen.pipeline));
}

void add_fp64(NamedTensors& tensors, const char* name, const std::vector<double>& data,
              std::initializer_list<std::int64_t> shape) {
  tensors.emplace_back(name, Tensor::contiguous(data.data(), DataType::kFloat64, shape));
}

std::string run_reference(const RunOptions& run, const audit::AttentionFile& file, ProgressLine& progress) {
  const AttentionInputs& inputs = file.inputs;
  const ProblemSizes sizes = audit::sizes_of(inputs);
  const std::int64_t tokens = sizes.num_tokens;
  const std::int64_t heads = sizes.num_heads;
  progress.set("fp64 reference, forward");
  const reference::ForwardResult outputs = reference::forward(inputs, run.engine.threads);
  NamedTensors tensors;
  add_fp64(tensors, "out", outputs.out, {tokens, heads, sizes.latent_dim});
  add_fp64(tensors, "lse", outputs.lse, {tokens, heads});
  add_fp64(tensors, "max_logits", outputs.max_logits, {tokens, heads});

  reference::BackwardResult gradients;
  if (run.backward) {
    progress.set("fp64 reference, backward");
    gradients = reference::backward(inputs, file.dout, file.dlse, run.engine.threads);
    add_fp64(tensors, "dq_latent", gradients.dq_latent, {tokens, heads, sizes.latent_dim});
    add_fp64(tensors, "dkv_latent", gradients.dkv_latent, {sizes.num_keys, sizes.latent_dim});
    if (sizes.rope_dim > 0) {
      add_fp64(tensors, "dq_rope", gradients.dq_rope, {tokens, heads, sizes.rope_dim});
      add_fp64(tensors, "dk_rope", gradients.dk_rope, {sizes.num_keys, sizes.rope_dim});
    }
    if (inputs.sink.defined()) add_fp64(tensors, "dsink", gradients.dsink, {heads});
  }
  progress.set("writing");
  io::write_safetensors(run.output, tensors, {{"pipeline", "fp64 reference"}});
  return "fp64 reference";
}

/// The reference rounds nothing and has one way to run, so what would ask for another is not passed over in silence.
void check_reference_options(const RunOptions& run) {
  if (!run.reference) return;
  if (run.pipeline.any() || run.grad_dtype) {
    throw Error("--reference", "options beside it that shape rounding", "none: the fp64 reference rounds nothing");
  }
  if (run.engine.device != "cpu" || run.engine.engine != "auto") {
    throw Error("--reference", "--device or --engine beside it", "neither: the fp64 reference is code of its own");
  }
}

int execute(const RunOptions& run) {
  check_reference_options(run);
  require_writable(run.output, "--output");
  audit::AttentionFile file = audit::AttentionFile::open(run.input);
  apply(run.problem, file.inputs);
  if (run.backward && !file.dout.defined()) {
    throw Error("dout", "nothing in the input file", "a float tensor [T, H, 512], for --backward");
  }
  const auto start = std::chrono::steady_clock::now();
  std::string what;
  {
    ProgressLine progress;
    what = run.reference ? run_reference(run, file, progress) : run_library(run, file, progress);
  }
  const std::chrono::duration<double> elapsed = std::chrono::steady_clock::now() - start;
  fmt::print("{}: {}{}, {:.2f} s\n", run.output.string(), what, run.backward ? ", with gradients" : "",
             elapsed.count());
  return 0;
}

}  // namespace

Command add_run(CLI::App& root) {
  CLI::App* app = root.add_subcommand("run", "Attention over the tensors of a safetensors file");
  const auto run = std::make_shared<RunOptions>();
  app->add_option("IN", run->input,
                  "Tensors q_latent q_rope kv_latent k_rope (or fused: q kv), indices; optional topk_length sink "
                  "cu_seqlens_q cu_seqlens_k dout dlse. Metadata softmax_scale is used unless --softmax-scale is given")
      ->required();
  app->add_option("-o,--output", run->output, "Where the results go, a safetensors file")->required();
  app->add_flag("--training", run->training, "Training forward: exact max and residual");
  app->add_flag("--backward", run->backward, "Gradients too, for the dout (and dlse) in IN; implies --training");
  app->add_flag("--reference", run->reference, "The fp64 reference instead; writes F64 tensors of the same names");
  app->add_flag("--deterministic", run->deterministic, "Key gradients bitwise the same from run to run");
  add_problem_options(*app, run->problem);
  add_pipeline_options(*app, run->pipeline);
  add_grad_dtype(*app, run->grad_dtype);
  add_engine_options(*app, run->engine);
  return {app, [run] { return execute(*run); }};
}

}  // namespace sparsemla::cli
