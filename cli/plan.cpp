#include <fmt/format.h>

#include <memory>
#include <nlohmann/json.hpp>

#include "audit/attention_file.h"
#include "cli/commands.h"
#include "cli/options.h"
#include "device/call.h"
#include "sparsemla/error.h"

namespace sparsemla::cli {
namespace {

struct PlanOptions {
  std::filesystem::path input;
  SizeOptions sizes;
  bool no_rope = false;
  bool training = false;
  bool backward = false;
  bool deterministic = false;
  bool json = false;
  std::optional<std::string> grad_dtype;
  ProblemOptions problem;
  PipelineOptions pipeline;
  EngineOptions engine;
};

/// Planning reads no tensor data, so one address serves for all of it.
Tensor placeholder(DataType dtype, std::initializer_list<std::int64_t> shape) {
  alignas(64) static std::byte somewhere[64];
  return Tensor::contiguous(somewhere, dtype, shape);
}

AttentionInputs inputs_of(const PlanOptions& options) {
  const std::int64_t tokens = options.sizes.tokens.value_or(4096);
  const std::int64_t keys = options.sizes.keys.value_or(tokens);
  const std::int64_t heads = options.sizes.heads.value_or(128);
  AttentionInputs inputs;
  inputs.q_latent = placeholder(DataType::kBFloat16, {tokens, heads, kLatentDim});
  inputs.kv_latent = placeholder(DataType::kBFloat16, {keys, kLatentDim});
  if (!options.no_rope) {
    inputs.q_rope = placeholder(DataType::kBFloat16, {tokens, heads, kRopeDim});
    inputs.k_rope = placeholder(DataType::kBFloat16, {keys, kRopeDim});
  }
  inputs.indices = placeholder(DataType::kInt32, {tokens, options.sizes.topk.value_or(2048)});
  return inputs;
}

ForwardArguments forward_of(const AttentionInputs& inputs, const audit::ProblemSizes& sizes) {
  ForwardArguments arguments;
  static_cast<AttentionInputs&>(arguments) = inputs;
  arguments.out = placeholder(DataType::kBFloat16, {sizes.num_tokens, sizes.num_heads, kLatentDim});
  arguments.lse = placeholder(DataType::kFloat32, {sizes.num_tokens, sizes.num_heads});
  return arguments;
}

BackwardArguments backward_of(const ForwardArguments& forward, const audit::ProblemSizes& sizes, DataType dq_dtype) {
  BackwardArguments arguments;
  static_cast<AttentionInputs&>(arguments) = forward;
  arguments.out = forward.out;
  arguments.out_residual = forward.out_residual;
  arguments.lse = forward.lse;
  arguments.dout = forward.out;
  arguments.dq_latent = placeholder(dq_dtype, {sizes.num_tokens, sizes.num_heads, kLatentDim});
  arguments.dkv_latent = placeholder(DataType::kFloat32, {sizes.num_keys, kLatentDim});
  if (forward.q_rope.defined()) {
    arguments.dq_rope = placeholder(dq_dtype, {sizes.num_tokens, sizes.num_heads, kRopeDim});
    arguments.dk_rope = placeholder(DataType::kFloat32, {sizes.num_keys, kRopeDim});
  }
  return arguments;
}

Plan make_plan(const PlanOptions& options, const AttentionInputs& inputs) {
  const audit::ProblemSizes sizes = audit::sizes_of(inputs);
  Options library_options = to_options(options.engine);
  const Device where = to_device(options.engine);
  library_options.deterministic = options.deterministic;
  library_options.purpose = options.training || options.backward ? Purpose::kTraining : Purpose::kInference;
  ForwardArguments arguments = forward_of(inputs, sizes);
  library_options.pipeline = choose_pipeline(options.pipeline, arguments, library_options, where);
  const bool residual =
      library_options.pipeline ? library_options.pipeline->residual : library_options.purpose == Purpose::kTraining;
  if (residual) arguments.out_residual = arguments.out;
  return options.backward
             ? device::plan_on(where, backward_of(arguments, sizes, grad_dtype(options.grad_dtype)), library_options)
             : device::plan_on(where, arguments, library_options);
}

std::string to_json(const Plan& plan) {
  const nlohmann::ordered_json json = {{"operation", plan.backward ? "backward" : "forward"},
                                       {"backend", plan.backend},
                                       {"variant", plan.variant},
                                       {"pipeline", to_string(plan.pipeline)},
                                       {"rescale_threshold_log2", plan.pipeline.rescale_threshold_log2},
                                       {"key_block", plan.pipeline.key_block},
                                       {"residual", plan.pipeline.residual},
                                       {"deterministic", plan.deterministic},
                                       {"training_matches_inference", plan.training_matches_inference},
                                       {"threads", plan.num_threads},
                                       {"key_tile", plan.key_tile},
                                       {"head_tile", plan.head_tile},
                                       {"token_chunk", plan.token_chunk},
                                       {"workspace_bytes", plan.workspace_bytes},
                                       {"internal_bytes", plan.internal_bytes},
                                       {"flops", plan.flops},
                                       {"reasons", plan.reasons}};
  return json.dump(2) + "\n";
}

int execute(const PlanOptions& options) {
  Plan plan;
  if (options.input.empty()) {
    AttentionInputs inputs = inputs_of(options);
    apply(options.problem, inputs);
    plan = make_plan(options, inputs);
  } else {
    if (options.sizes.any() || options.no_rope) {
      throw Error("plan", "sizes beside an input file", "one of the two");
    }
    audit::AttentionFile file = audit::AttentionFile::open(options.input);
    apply(options.problem, file.inputs);
    plan = make_plan(options, file.inputs);
  }
  fmt::print("{}", options.json ? to_json(plan) : to_string(plan));
  return 0;
}

}  // namespace

Command add_plan(CLI::App& root) {
  CLI::App* app = root.add_subcommand("plan", "What a call would do, without doing it");
  const auto options = std::make_shared<PlanOptions>();
  app->add_option("IN", options->input, "A file that `run` reads; without it the sizes count");
  add_size_options(*app, options->sizes, {4096, 0, 2048, 128});
  app->add_flag("--no-rope", options->no_rope, "Without the rope part");
  app->add_flag("--training", options->training, "The forward of training");
  app->add_flag("--backward", options->backward, "The backward");
  app->add_flag("--deterministic", options->deterministic, "Key gradients bitwise the same from run to run");
  app->add_flag("--json", options->json, "Print JSON");
  add_problem_options(*app, options->problem);
  add_pipeline_options(*app, options->pipeline);
  add_grad_dtype(*app, options->grad_dtype);
  add_engine_options(*app, options->engine);
  return {app, [options] { return execute(*options); }};
}

}  // namespace sparsemla::cli
