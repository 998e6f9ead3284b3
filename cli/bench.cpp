// Quick timing of a size or a few, on the CPU or on a device. The CPU's suite with its rivals is in bench/.
#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>

#include "audit/tensor_buffer.h"
#include "cli/commands.h"
#include "cli/device_bench.h"
#include "cli/options.h"
#include "cli/progress.h"
#include "numerics/problem.h"
#include "sparsemla/error.h"

namespace sparsemla::cli {
namespace {

using audit::TensorBuffer;

struct BenchOptions {
  SizeOptions sizes;
  std::vector<std::int64_t> keys;
  bool no_rope = false;
  bool backward = false;
  std::optional<int> repeats;            // CPU
  std::optional<std::string> pipelines;  // device
  std::optional<double> seconds;         // device
  bool json = false;
  EngineOptions engine;
};

struct Timing {
  Plan plan;
  ProblemShape shape;
  double valid_slots = 0;  // a token, on average
  double flops = 0;        // of the valid slots: 2*T*H*W_valid*1088 forward, *2752 backward (with rope)
  double best_s = 0;
  double median_s = 0;
};

constexpr int kDefaultRepeats = 5;

std::vector<ProblemShape> shapes_of(const BenchOptions& options, bool on_device) {
  ProblemShape shape;
  shape.num_tokens = options.sizes.tokens.value_or(on_device ? 4096 : 256);
  shape.topk = options.sizes.topk.value_or(2048);
  shape.num_heads = options.sizes.heads.value_or(128);
  shape.rope_dim = options.no_rope ? 0 : kRopeDim;
  std::vector<ProblemShape> shapes;
  for (const std::int64_t keys : options.keys.empty() ? std::vector<std::int64_t>{4096} : options.keys) {
    shape.num_keys = keys;
    shapes.push_back(shape);
    const bool counts = shape.num_tokens >= 1 && keys >= 1 && shape.topk >= 1;
    const bool has_heads = shape.num_heads >= 1 && shape.num_heads <= kMaxHeads;
    if (!counts || !has_heads) {
      throw Error("bench", fmt::format("T {} S {} W {} H {}", shape.num_tokens, keys, shape.topk, shape.num_heads),
                  fmt::format("1 or more of each, and at most {} heads", kMaxHeads));
    }
  }
  return shapes;
}

struct Buffers {
  TensorBuffer out, residual, lse, dq_latent, dq_rope, dkv_latent, dk_rope;
};

Buffers allocate(const ProblemShape& shape, bool backward) {
  Buffers buffers;
  buffers.out = TensorBuffer(DataType::kBFloat16, {shape.num_tokens, shape.num_heads, kLatentDim});
  buffers.lse = TensorBuffer(DataType::kFloat32, {shape.num_tokens, shape.num_heads});
  if (!backward) return buffers;
  buffers.residual = TensorBuffer(DataType::kBFloat16, {shape.num_tokens, shape.num_heads, kLatentDim});
  buffers.dq_latent = TensorBuffer(DataType::kBFloat16, {shape.num_tokens, shape.num_heads, kLatentDim});
  buffers.dkv_latent = TensorBuffer(DataType::kFloat32, {shape.num_keys, kLatentDim});
  if (shape.rope_dim > 0) {
    buffers.dq_rope = TensorBuffer(DataType::kBFloat16, {shape.num_tokens, shape.num_heads, kRopeDim});
    buffers.dk_rope = TensorBuffer(DataType::kFloat32, {shape.num_keys, kRopeDim});
  }
  return buffers;
}

BackwardArguments backward_arguments(const Problem& problem, const Buffers& buffers) {
  BackwardArguments arguments;
  static_cast<AttentionInputs&>(arguments) = problem.inputs();
  arguments.out = buffers.out.view();
  arguments.out_residual = buffers.residual.view();
  arguments.lse = buffers.lse.view();
  arguments.dout = problem.dout_tensor();
  arguments.dq_latent = buffers.dq_latent.view();
  arguments.dq_rope = buffers.dq_rope.view();
  arguments.dkv_latent = buffers.dkv_latent.view();
  arguments.dk_rope = buffers.dk_rope.view();
  return arguments;
}

/// Seconds of each of `repeats` calls after one that is not counted.
std::vector<double> time_calls(int repeats, ProgressLine& progress, const std::function<void()>& call) {
  std::vector<double> seconds;
  for (int i = 0; i <= repeats; ++i) {
    progress.set(i == 0 ? "warm-up" : fmt::format("[{}/{}] timing", i, repeats));
    const auto start = std::chrono::steady_clock::now();
    call();
    const std::chrono::duration<double> elapsed = std::chrono::steady_clock::now() - start;
    if (i > 0) seconds.push_back(elapsed.count());
  }
  std::sort(seconds.begin(), seconds.end());
  return seconds;
}

Timing measure(const BenchOptions& options, const ProblemShape& shape, int repeats, ProgressLine& progress) {
  Timing timing;
  timing.shape = shape;
  Options library_options = to_options(options.engine);
  library_options.purpose = options.backward ? Purpose::kTraining : Purpose::kInference;
  progress.set("inputs");
  const Problem problem = make_iid(timing.shape, options.backward, options.engine.threads);
  const Buffers buffers = allocate(timing.shape, options.backward);
  ForwardArguments forward_arguments;
  static_cast<AttentionInputs&>(forward_arguments) = problem.inputs();
  forward_arguments.out = buffers.out.view();
  forward_arguments.out_residual = buffers.residual.view();
  forward_arguments.lse = buffers.lse.view();

  std::vector<double> seconds;
  if (options.backward) {
    const BackwardArguments arguments = backward_arguments(problem, buffers);
    timing.plan = plan(arguments, library_options);
    forward(forward_arguments, library_options);
    seconds = time_calls(repeats, progress, [&] { backward(arguments, library_options); });
  } else {
    timing.plan = plan(forward_arguments, library_options);
    seconds = time_calls(repeats, progress, [&] { forward(forward_arguments, library_options); });
  }
  timing.best_s = seconds.front();
  timing.median_s = seconds[seconds.size() / 2];
  const auto valid = std::count_if(problem.indices.begin(), problem.indices.end(), [](auto key) { return key >= 0; });
  const auto slots = static_cast<double>(problem.indices.size());
  timing.valid_slots = static_cast<double>(valid) / static_cast<double>(timing.shape.num_tokens);
  timing.flops = timing.plan.flops * static_cast<double>(valid) / slots;
  return timing;
}

nlohmann::ordered_json to_json(const Timing& timing, int repeats) {
  return {{"operation", timing.plan.backward ? "backward" : "forward"},
          {"tokens", timing.shape.num_tokens},
          {"keys", timing.shape.num_keys},
          {"topk", timing.shape.topk},
          {"valid_slots", timing.valid_slots},
          {"heads", timing.shape.num_heads},
          {"rope_dim", timing.shape.rope_dim},
          {"backend", timing.plan.backend},
          {"variant", timing.plan.variant},
          {"pipeline", to_string(timing.plan.pipeline)},
          {"threads", timing.plan.num_threads},
          {"repeats", repeats},
          {"flops", timing.flops},
          {"seconds_best", timing.best_s},
          {"seconds_median", timing.median_s},
          {"gflops_best", timing.flops / timing.best_s * 1e-9},
          {"gflops_median", timing.flops / timing.median_s * 1e-9}};
}

void print_text(const Timing& timing, int repeats) {
  fmt::print("{} T {} S {} W {} ({:.0f} valid) H {} rope {}, {} {}, {}, {} threads\n",
             timing.plan.backward ? "backward" : "forward", timing.shape.num_tokens, timing.shape.num_keys,
             timing.shape.topk, timing.valid_slots, timing.shape.num_heads, timing.shape.rope_dim, timing.plan.backend,
             timing.plan.variant, to_string(timing.plan.pipeline), timing.plan.num_threads);
  fmt::print("best {:.4f} s, {:.1f} GFLOP/s; median of {} {:.4f} s, {:.1f} GFLOP/s\n", timing.best_s,
             timing.flops / timing.best_s * 1e-9, repeats, timing.median_s, timing.flops / timing.median_s * 1e-9);
}

/// One size is an object, several are a list of them.
void run_on_cpu(const BenchOptions& options) {
  if (options.pipelines || options.seconds) {
    throw Error(options.pipelines ? "--pipelines" : "--seconds", "it with --device cpu", "--device cuda beside it");
  }
  const int repeats = options.repeats.value_or(kDefaultRepeats);
  std::vector<Timing> timings;
  {
    ProgressLine progress;
    for (const ProblemShape& shape : shapes_of(options, false)) {
      timings.push_back(measure(options, shape, repeats, progress));
    }
  }
  nlohmann::ordered_json list = nlohmann::ordered_json::array();
  for (const Timing& timing : timings) {
    options.json ? list.push_back(to_json(timing, repeats)) : print_text(timing, repeats);
  }
  if (options.json) fmt::print("{}\n", (list.size() == 1 ? list[0] : list).dump(2));
}

void run_on_device(const BenchOptions& options, Device where) {
  if (options.backward || options.repeats) {
    throw Error(options.backward ? "--backward" : "--repeats", "it with --device " + options.engine.device,
                options.backward ? "the forward, the one that is timed there" : "--seconds");
  }
  if (options.engine.threads != 0 || options.engine.engine != "auto") {
    throw Error(options.engine.threads != 0 ? "--threads" : "--engine", "it with --device " + options.engine.device,
                "neither, which are the CPU's");
  }
  DeviceBenchRequest request;
  request.shapes = shapes_of(options, true);
  request.pipelines = split_list(options.pipelines.value_or("training,inference,lazy"), "--pipelines");
  request.seconds = options.seconds.value_or(request.seconds);
  request.device = where;
  request.json = options.json;
  run_device_bench(request);
}

int execute(const BenchOptions& options) {
  const Device where = to_device(options.engine);
  where.type == DeviceType::kCpu ? run_on_cpu(options) : run_on_device(options, where);
  return 0;
}

}  // namespace

Command add_bench(CLI::App& root) {
  CLI::App* app = root.add_subcommand("bench", "How long one forward or backward takes here (iid inputs)");
  const auto options = std::make_shared<BenchOptions>();
  add_size_options(*app, options->sizes, {256, 4096, 2048, 128}, false);
  app->get_option("--tokens")->description("Query tokens T; 256 unless given, 4096 on cuda");
  app->add_option("--keys", options->keys, "Keys S, one number or several between commas; 4096 unless given")
      ->delimiter(',');
  app->add_flag("--no-rope", options->no_rope, "Without the rope part");
  app->add_flag("--backward", options->backward, "Time the backward");
  app->add_option("--repeats", options->repeats, "CPU: calls counted, after one that is not; 5 unless given")
      ->check(CLI::Range(1, 1000000));
  app->add_option("--pipelines", options->pipelines,
                  "cuda: comma-separated, training, inference, lazy or what audit takes; those three unless given");
  app->add_option("--seconds", options->seconds, "cuda: of attention for each figure, at least; 0.5 unless given")
      ->check(CLI::Range(0.0, 600.0));
  app->add_flag("--json", options->json, "Print JSON");
  add_engine_options(*app, options->engine);
  return {app, [options] { return execute(*options); }};
}

}  // namespace sparsemla::cli
