#include "audit/audit.h"

#include <fmt/format.h>

#include "audit/experiment.h"
#include "device/call.h"
#include "sparsemla/error.h"

namespace sparsemla::audit {
namespace {

void check(const AuditRequest& request) {
  if (request.pipelines.empty() && request.candidate_file.empty()) {
    throw Error("pipelines", "none, and no candidate", "at least one of the two");
  }
  if (!request.pipelines.empty() && request.orders.empty()) {
    throw Error("orders", "none", "at least one");
  }
  if (request.grad_dtype != DataType::kBFloat16 && request.grad_dtype != DataType::kFloat32) {
    throw Error("grad_dtype", to_string(request.grad_dtype), "bfloat16 or float32");
  }
}

/// Why the device's backend takes no backward at all, or nothing. The buffers are never touched, so they cost no
/// memory.
std::string why_no_backward(const AuditRequest& request, const Subject& subject) {
  if (request.device.type == DeviceType::kCpu) return "";
  const Pipeline pipeline = Pipeline::training();
  const ForwardRun run = allocate_forward(subject.sizes, pipeline.residual);
  const GradientBuffers buffers = allocate_gradients(subject.sizes, subject.inputs.sink.defined(), request.grad_dtype);
  try {
    (void)device::plan_on(request.device, backward_arguments(subject.inputs, subject, run, buffers, true),
                          options_for(request, pipeline));
  } catch (const Error& error) {
    if (error.argument() != "backend") throw;
    return error.what();
  }
  return "";
}

/// Has the library reject what it will reject, before the reference spends minutes on it.
Plan plan_first(const AuditRequest& request, const Subject& subject, bool with_gradients) {
  std::vector<Pipeline> pipelines;
  for (const PipelineChoice& choice : request.pipelines) pipelines.push_back(choice.pipeline);
  if (pipelines.empty()) pipelines.push_back(Pipeline::training());

  Plan first;
  for (const Pipeline& pipeline : pipelines) {
    const Options options = options_for(request, pipeline);
    const ForwardRun run = allocate_forward(subject.sizes, pipeline.residual);
    const Plan plan = device::plan_on(request.device, forward_arguments(subject.inputs, run), options);
    if (first.backend.empty()) first = plan;
    if (with_gradients) {
      const bool has_sink = subject.inputs.sink.defined();
      const GradientBuffers buffers = allocate_gradients(subject.sizes, has_sink, request.grad_dtype);
      (void)device::plan_on(request.device,
                            backward_arguments(subject.inputs, subject, run, buffers, pipeline.residual), options);
    }
  }
  return first;
}

SetupReport describe(const AuditRequest& request, const Subject& subject, const Plan& plan) {
  SetupReport setup;
  setup.source = request.generated ? "peaked" : request.input_file.string();
  setup.num_tokens = subject.sizes.num_tokens;
  setup.num_keys = subject.sizes.num_keys;
  setup.topk = subject.sizes.topk;
  setup.num_heads = subject.sizes.num_heads;
  setup.latent_dim = subject.sizes.latent_dim;
  setup.rope_dim = subject.sizes.rope_dim;
  if (request.generated) {
    setup.beta = request.generated->beta;
    setup.seed = request.generated->shape.seed;
  }
  setup.softmax_scale = *subject.inputs.softmax_scale;
  setup.causal = subject.inputs.causal;
  setup.backend = plan.backend;
  setup.variant = plan.variant;
  return setup;
}

void add_notes(AuditReport& report, const AuditRequest& request, const CandidateFile* candidate) {
  std::string shown;
  for (const PipelineChoice& choice : request.pipelines) {
    if (!choice.judged) shown += (shown.empty() ? "" : ", ") + choice.name;
  }
  if (!shown.empty()) {
    report.notes.push_back("shown for comparison, not judged: " + shown);
  }
  for (const std::string& name : candidate != nullptr ? candidate->not_judged : std::vector<std::string>{}) {
    report.notes.push_back(fmt::format("the candidate's {} is not judged", name));
  }
}

}  // namespace

GeneratedSource preset(std::string_view name) {
  ProblemShape shape;
  shape.num_tokens = shape.num_keys = 512;
  shape.topk = 256;
  shape.num_heads = 128;
  if (name == "order") return {shape, 0.25};
  if (name == "residual") return {shape, 0.4};
  if (name == "peaked-4096") {
    shape.num_tokens = shape.num_keys = 4096;
    shape.topk = 2048;
    return {shape, 0.25};
  }
  if (name == "small") {
    shape.num_tokens = shape.num_keys = 256;
    shape.topk = 128;
    shape.num_heads = 32;
    return {shape, 0.25};
  }
  throw Error("preset", fmt::format("\"{}\"", name), "order, residual, peaked-4096 or small");
}

AuditReport run_audit(const AuditRequest& asked, const ProgressCallback& progress) {
  check(asked);
  AuditRequest request = asked;
  // A candidate with gradients needs dout too, but whether it has any is known only once it is read, for which the
  // sizes of the inputs must be known: a generated problem therefore gets its dout whenever there is a candidate.
  const bool candidate_given = !request.candidate_file.empty();
  const Subject subject = Subject::open(
      request, request.gradients || (candidate_given && request.generated) || !request.write_inputs.empty());
  std::optional<CandidateFile> candidate;
  if (candidate_given) {
    candidate = CandidateFile::open(request.candidate_file, subject.sizes, subject.inputs.sink.defined());
    if (candidate->has_gradients() && !subject.dout.defined()) {
      throw Error("dout", "nothing in the input file",
                  "bfloat16 [T, H, 512]: the candidate's gradients are for some dout");
    }
  }
  const bool candidate_gradients = candidate && candidate->has_gradients();
  const std::string no_backward =
      request.gradients || candidate_gradients ? why_no_backward(request, subject) : std::string();
  if (!no_backward.empty()) request.gradients = false;
  const bool with_gradients = request.gradients || candidate_gradients;
  const Plan plan = plan_first(request, subject, with_gradients && no_backward.empty());
  if (!request.write_inputs.empty()) {
    write_inputs(subject, request.write_inputs);
  }

  Experiment experiment{request, subject, candidate ? &*candidate : nullptr, {}, {}};
  experiment.report.setup = describe(request, subject, plan);
  add_notes(experiment.report, request, experiment.candidate);
  if (asked.gradients && !no_backward.empty()) {
    experiment.report.notes.push_back("the pipelines' gradients are left out, neither shown nor judged: " +
                                      no_backward);
  }
  Steps steps(progress, count_forward_steps(experiment) + count_gradient_steps(experiment));
  run_forward_phase(experiment, steps);
  run_gradient_phase(experiment, steps);
  if (with_gradients && !has_gradient_limits(experiment.report.setup)) {
    experiment.report.notes.emplace_back(
        "no limits for gradient errors: the dominant key has all the weight, or beta is "
        "outside the table");
  }
  experiment.report.verdict = judge(experiment.report);
  return std::move(experiment.report);
}

}  // namespace sparsemla::audit
