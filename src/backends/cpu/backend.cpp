// The CPU backend as the registry sees it: what it has, how a plan is completed, which engine runs.
#include <fmt/format.h>
#include <sched.h>

#include <algorithm>
#include <thread>

#include "backends/cpu/amx.h"
#include "backends/cpu/engine.h"
#include "backends/cpu/operation.h"
#include "core/backend_interface.h"
#include "core/sizes.h"
#include "sparsemla/error.h"

namespace sparsemla::cpu {
namespace {

/// Cores that this process may run on.
int available_cores() {
  cpu_set_t set;
  CPU_ZERO(&set);
  if (sched_getaffinity(0, sizeof(set), &set) == 0) return std::max(1, CPU_COUNT(&set));
  return std::max(1, static_cast<int>(std::thread::hardware_concurrency()));
}

bool use_amx(const Options& options, Plan& plan) {
  switch (options.cpu_engine) {
    case CpuEngine::kFp32:
      plan.reasons.emplace_back("engine: fp32 as asked for");
      return false;
    case CpuEngine::kAmx:
      if (!amx::available()) throw Error("cpu_engine", "amx", "auto or fp32: this processor has no AMX bf16");
      plan.reasons.emplace_back("engine: AMX as asked for");
      return true;
    case CpuEngine::kAuto:
      break;
  }
  plan.reasons.emplace_back(amx::available() ? "engine: the processor has AMX bf16"
                                             : "engine: the processor has no AMX bf16");
  return amx::available();
}

Pipeline default_pipeline(Purpose purpose, bool has_residual, std::vector<std::string>& reasons) {
  Pipeline pipeline = Pipeline::training();
  if (purpose == Purpose::kInference) {
    // For 0 to 3 % of the time; why: docs/decisions/004-cpu-inference-exact.md.
    pipeline.residual = has_residual;
    reasons.emplace_back(
        "pipeline: exact max, for at most a few percent of the time; inference equals training bitwise");
  } else {
    reasons.emplace_back("pipeline: exact max and residual, since gradients will be taken");
  }
  return pipeline;
}

std::int64_t scratch_bytes(const ForwardArguments& arguments, const Plan& plan, std::int64_t element_bytes) {
  return forward_scratch_bytes(arguments, plan.pipeline, element_bytes);
}
std::int64_t scratch_bytes(const BackwardArguments& arguments, const Plan&, std::int64_t element_bytes) {
  return backward_scratch_bytes(arguments, element_bytes);
}

template <typename Arguments>
void complete(Plan& plan, const Arguments& arguments, const Options& options) {
  if (options.stream != nullptr) throw Error("stream", "a stream", "nothing: the CPU backend has no streams");
  const bool use = use_amx(options, plan);
  const Sizes sizes = sizes_of(arguments);
  plan.variant = use ? AmxEngine::kName : Fp32Engine::kName;
  plan.deterministic = true;
  plan.training_matches_inference = true;
  const int wanted = options.num_threads > 0 ? options.num_threads : available_cores();
  plan.num_threads = static_cast<int>(std::clamp<std::int64_t>(sizes.num_tokens, 1, wanted));
  plan.key_tile = kKeyTile;
  plan.head_tile = padded(sizes.num_heads);
  plan.token_chunk = plan.num_threads;
  plan.workspace_bytes = 0;
  const std::int64_t element_bytes = use ? 2 : 4;
  plan.internal_bytes = plan.num_threads * scratch_bytes(arguments, plan, element_bytes);
}

template <typename Arguments, void (*kAmx)(const Arguments&, const Plan&), void (*kFp32)(const Arguments&, const Plan&)>
void run(const Arguments& arguments, const Plan& plan, const Execution&) {
  (plan.variant == AmxEngine::kName ? kAmx : kFp32)(arguments, plan);
}

}  // namespace

const Backend& backend() {
  static const Backend kBackend{
      "cpu",
      DeviceType::kCpu,
      [] {
        return BackendInfo{"cpu", DeviceType::kCpu, true,
                           fmt::format("{}{}, {} threads", amx::available() ? "amx-bf16, " : "", Fp32Engine::kName,
                                       available_cores())};
      },
      default_pipeline,
      complete<ForwardArguments>,
      complete<BackwardArguments>,
      run<ForwardArguments, forward<AmxEngine>, forward<Fp32Engine>>,
      run<BackwardArguments, backward<AmxEngine>, backward<Fp32Engine>>,
  };
  return kBackend;
}

}  // namespace sparsemla::cpu
