#include "audit/audit.h"

#include <fmt/format.h>

#include <cmath>
#include <cstdio>
#include <memory>

#include "cli/commands.h"
#include "cli/options.h"
#include "cli/progress.h"
#include "sparsemla/error.h"

namespace sparsemla::cli {
namespace {

constexpr int kBudgetExceeded = 1;

struct AuditOptions {
  std::filesystem::path input;
  bool peaked = false;
  std::optional<std::string> preset;
  SizeOptions sizes;
  std::optional<double> beta;
  std::uint64_t seed = 1;
  std::optional<std::string> pipelines;
  std::string orders = "first,last";
  bool gradients = false;
  std::optional<std::string> grad_dtype;
  std::filesystem::path candidate;
  std::filesystem::path write_inputs;
  std::string json;
  bool check = false;
  ProblemOptions problem;
  EngineOptions engine;
};

audit::GeneratedSource generated_source(const AuditOptions& options) {
  audit::GeneratedSource source = audit::preset(options.preset.value_or("small"));
  ProblemShape& shape = source.shape;
  const SizeOptions& sizes = options.sizes;
  if (sizes.tokens) shape.num_tokens = shape.num_keys = *sizes.tokens;
  if (sizes.keys) shape.num_keys = *sizes.keys;
  if (sizes.topk) shape.topk = *sizes.topk;
  if (sizes.heads) shape.num_heads = *sizes.heads;
  if (options.beta) source.beta = *options.beta;
  if (!std::isfinite(source.beta)) throw Error("--beta", fmt::format("{}", source.beta), "a finite number");
  shape.seed = options.seed;
  return source;
}

/// Without --pipelines the lazy max is shown to compare with, and beside a candidate only the candidate is judged.
std::vector<audit::PipelineChoice> pipeline_choices(const AuditOptions& options) {
  std::vector<audit::PipelineChoice> choices;
  for (const std::string& name : split_list(options.pipelines.value_or("lazy,exact"), "--pipelines")) {
    const bool judged = options.pipelines || (name != "lazy" && options.candidate.empty());
    choices.push_back({name, parse_pipeline(name), judged});
  }
  return choices;
}

audit::AuditRequest to_request(const AuditOptions& options) {
  const bool generated = options.peaked || options.preset || options.sizes.any() || options.beta;
  if (generated == !options.input.empty()) {
    throw Error("audit", generated ? "an input file beside options of a generated problem" : "no problem",
                "either IN.safetensors, or --peaked or --preset with --tokens --keys --topk --heads --beta");
  }
  audit::AuditRequest request;
  if (generated) {
    request.generated = generated_source(options);
  } else {
    request.input_file = options.input;
  }
  request.pipelines = pipeline_choices(options);
  for (const std::string& order : split_list(options.orders, "--orders")) {
    request.orders.push_back(parse_slot_order(order));
  }
  request.order_seed = options.seed;
  request.gradients = options.gradients;
  request.grad_dtype = grad_dtype(options.grad_dtype);
  request.candidate_file = options.candidate;
  request.write_inputs = options.write_inputs;
  AttentionInputs checked;
  apply(options.problem, checked);
  request.softmax_scale = checked.softmax_scale;
  request.causal = checked.causal;
  request.options = to_options(options.engine);
  request.device = to_device(options.engine);
  return request;
}

int execute(const AuditOptions& options) {
  const bool json_to_stdout = options.json == "-";
  if (!options.json.empty() && !json_to_stdout) require_writable(options.json, "--json");
  if (!options.write_inputs.empty()) require_writable(options.write_inputs, "--write-inputs");
  const audit::AuditRequest request = to_request(options);
  audit::AuditReport report;
  {
    ProgressLine progress;
    report = audit::run_audit(request, [&](const audit::ProgressStep& step) {
      progress.set(fmt::format("[{}/{}] {}", step.step, step.total, step.what));
    });
  }
  std::fputs(audit::to_table(report).c_str(), json_to_stdout ? stderr : stdout);
  if (json_to_stdout) {
    std::fputs(audit::to_json(report).c_str(), stdout);
  } else if (!options.json.empty()) {
    write_text(options.json, audit::to_json(report));
  }
  return options.check && !report.verdict.passed ? kBudgetExceeded : 0;
}

void add_source_options(CLI::App& app, AuditOptions& options) {
  app.add_option(
      "IN", options.input,
      "A problem to audit: the tensors that `run` reads. --gradients needs dout in it. Metadata softmax_scale "
      "is used unless --softmax-scale is given");
  app.add_flag("--peaked", options.peaked,
               "A generated problem in which each token's own key dominates (small, if no size is given)");
  app.add_option(
         "--preset", options.preset,
         "Such a problem of known size: order (T 512, W 256, H 128, beta 0.25), residual (beta 0.4), peaked-4096 "
         "(T 4096, W 2048, H 128, beta 0.25), small. Sizes given beside it win")
      ->check(CLI::IsMember({"order", "residual", "peaked-4096", "small"}));
  add_size_options(app, options.sizes);
  app.add_option("--beta", options.beta, "How far each query leans towards its own key");
  app.add_option("--seed", options.seed, "Of the generated problem and of the random order")->capture_default_str();
  add_problem_options(app, options.problem);
}

}  // namespace

Command add_audit(CLI::App& root) {
  CLI::App* app = root.add_subcommand("audit", "What a kernel's rounding does to outputs and gradients");
  const auto options = std::make_shared<AuditOptions>();
  add_source_options(*app, *options);
  app->add_option("--pipelines", options->pipelines,
                  "Comma-separated: lazy, exact, canonical, each with modifiers such as exact+key=128+split. Default: "
                  "exact, with lazy to compare with");
  app->add_option("--orders", options->orders,
                  "Comma-separated: where the dominant key is met, or how lists are sorted: "
                  "first, last, ascending, random")
      ->capture_default_str();
  app->add_flag("--gradients", options->gradients, "Also gradients, residual on and off, operands bf16 and split");
  add_grad_dtype(*app, options->grad_dtype);
  app->add_option(
      "--candidate", options->candidate,
      "What another kernel made of the same inputs: out, optional lse, dq_latent dq_rope dkv_latent dk_rope "
      "(or dq dkv), dsink");
  app->add_option("--write-inputs", options->write_inputs, "Write the inputs, for another kernel to run on");
  app->add_option("--json", options->json, "Write JSON to a file, or - for stdout (the table then goes to stderr)");
  app->add_flag("--check", options->check, "Exit with 1 when a budget is exceeded");
  add_engine_options(*app, options->engine);
  return {app, [options] { return execute(*options); }};
}

}  // namespace sparsemla::cli
