// Forward and backward of the CPU backend at T 256, S 4096, W 2048, H 128, beside a large fp32 Eigen product: the unit
// that their rates are read in. FLOPs: 2*T*H*W*1088 forward, 2*T*H*W*2752 backward, 2*N^3 product.
#include <benchmark/benchmark.h>

#include <Eigen/Core>
#include <thread>
#include <vector>

#include "numerics/problem.h"
#include "sparsemla/attention.h"

namespace {

using namespace sparsemla;

constexpr ProblemShape kShape{256, 4096, 2048, 128, kRopeDim, 1};

/// Inputs and outputs, made once.
struct Workload {
  Problem problem = make_iid(kShape, true);
  std::vector<BFloat16> out = std::vector<BFloat16>(problem.q_latent.size());
  std::vector<BFloat16> out_residual = out;
  std::vector<float> lse = std::vector<float>(static_cast<std::size_t>(kShape.num_tokens * kShape.num_heads));
  std::vector<BFloat16> dq_latent = out;
  std::vector<BFloat16> dq_rope = std::vector<BFloat16>(problem.q_rope.size());
  std::vector<float> dkv_latent = std::vector<float>(problem.kv_latent.size());
  std::vector<float> dk_rope = std::vector<float>(problem.k_rope.size());

  static Workload& get() {
    static Workload workload;
    return workload;
  }

  [[nodiscard]] Tensor wide(const std::vector<BFloat16>& data) const {
    return Tensor::contiguous(data.data(), DataType::kBFloat16, {kShape.num_tokens, kShape.num_heads, kLatentDim});
  }
  [[nodiscard]] Tensor lse_tensor() const {
    return Tensor::contiguous(lse.data(), DataType::kFloat32, {kShape.num_tokens, kShape.num_heads});
  }
  [[nodiscard]] ForwardArguments forward_arguments() const {
    ForwardArguments arguments;
    static_cast<AttentionInputs&>(arguments) = problem.inputs();
    arguments.out = wide(out);
    arguments.out_residual = wide(out_residual);
    arguments.lse = lse_tensor();
    return arguments;
  }
  [[nodiscard]] BackwardArguments backward_arguments() const {
    BackwardArguments arguments;
    static_cast<AttentionInputs&>(arguments) = problem.inputs();
    arguments.out = wide(out);
    arguments.out_residual = wide(out_residual);
    arguments.lse = lse_tensor();
    arguments.dout = problem.dout_tensor();
    arguments.dq_latent = wide(dq_latent);
    arguments.dq_rope =
        Tensor::contiguous(dq_rope.data(), DataType::kBFloat16, {kShape.num_tokens, kShape.num_heads, kRopeDim});
    arguments.dkv_latent = Tensor::contiguous(dkv_latent.data(), DataType::kFloat32, {kShape.num_keys, kLatentDim});
    arguments.dk_rope = Tensor::contiguous(dk_rope.data(), DataType::kFloat32, {kShape.num_keys, kRopeDim});
    return arguments;
  }
};

void report_rate(benchmark::State& state, double flops) {
  state.counters["GFLOP/s"] =
      benchmark::Counter(flops * 1e-9 * static_cast<double>(state.iterations()), benchmark::Counter::kIsRate);
}

/// c = a * b, the columns of c shared out among the threads.
void eigen_product(benchmark::State& state) {
  constexpr Eigen::Index kSize = 4096;
  const Eigen::MatrixXf a = Eigen::MatrixXf::Random(kSize, kSize);
  const Eigen::MatrixXf b = Eigen::MatrixXf::Random(kSize, kSize);
  Eigen::MatrixXf c(kSize, kSize);
  const auto num_threads = static_cast<Eigen::Index>(state.range(0));
  for (auto _ : state) {
    std::vector<std::jthread> threads;
    for (Eigen::Index i = 0; i < num_threads; ++i) {
      threads.emplace_back([&, i] {
        const Eigen::Index width = kSize / num_threads;
        c.middleCols(i * width, width).noalias() = a * b.middleCols(i * width, width);
      });
    }
    threads.clear();
    benchmark::DoNotOptimize(c.data());
  }
  report_rate(state, 2.0 * kSize * kSize * kSize);
}

Options make_options(const benchmark::State& state, CpuEngine engine) {
  Options options;
  options.cpu_engine = engine;
  options.num_threads = static_cast<int>(state.range(0));
  return options;
}

template <typename Arguments>
void run_attention(benchmark::State& state, CpuEngine engine, const Arguments& arguments,
                   void (*operation)(const Arguments&, const Options&)) {
  const Options options = make_options(state, engine);
  double flops = 0;
  try {
    flops = plan(arguments, options).flops;
  } catch (const std::exception& error) {
    state.SkipWithError(error.what());
    return;
  }
  for (auto _ : state) operation(arguments, options);
  report_rate(state, flops);
}

void forward_bench(benchmark::State& state, CpuEngine engine) {
  run_attention<ForwardArguments>(state, engine, Workload::get().forward_arguments(), forward);
}

void backward_bench(benchmark::State& state, CpuEngine engine) {
  forward(Workload::get().forward_arguments());
  run_attention<BackwardArguments>(state, engine, Workload::get().backward_arguments(), backward);
}

void threads_of(benchmark::internal::Benchmark* bench) {
  bench->Arg(2)->Arg(1)->ArgName("threads")->Unit(benchmark::kMillisecond)->UseRealTime()->MinTime(2.0);
}

BENCHMARK(eigen_product)->Apply(threads_of);
BENCHMARK_CAPTURE(forward_bench, amx, CpuEngine::kAmx)->Apply(threads_of);
BENCHMARK_CAPTURE(backward_bench, amx, CpuEngine::kAmx)->Apply(threads_of);
BENCHMARK_CAPTURE(forward_bench, fp32, CpuEngine::kFp32)->Apply(threads_of);
BENCHMARK_CAPTURE(backward_bench, fp32, CpuEngine::kFp32)->Apply(threads_of);

}  // namespace
