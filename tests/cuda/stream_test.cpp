// How a call behaves towards its caller's CUDA: streams, graphs, memory, pending errors, the current device.
#include <cuda_runtime_api.h>

#include <functional>

#include "device/call.h"
#include "sparsemla/error.h"
#include "tests/cuda/fixture.h"

namespace sparsemla::cuda_test {
namespace {

using cases::differences;
using cases::ForwardOutputs;
using cases::run_forward;

class CudaCalls : public CudaTest {};

const char* const kPipelines[] = {"exact", "lazy+no-residual", "exact+canonical"};

Problem problem_of(std::uint64_t seed) {
  return make_iid({.num_tokens = 40, .num_keys = 300, .topk = 200, .num_heads = 66, .seed = seed}, false);
}

TEST_F(CudaCalls, RunsOnTheStreamItIsGiven) {
  const Problem problem = problem_of(1);
  const device::Stream stream;
  for (const char* pipeline : kPipelines) {
    DeviceProblem run(problem, options_of(pipeline));
    run.enqueue(stream.handle());
    stream.synchronize();
    EXPECT_EQ(differences(run.outputs(), run_forward(problem.inputs(), options_of(pipeline))), "") << pipeline;
  }
}

/// Work that takes a while is put in front in the same stream. A call that went elsewhere would read its inputs before
/// they are written.
TEST_F(CudaCalls, KeepsTheOrderOfItsStream) {
  const Problem before = problem_of(2);
  const Problem after = problem_of(3);
  const device::Stream stream;
  const device::DeviceMemory delay(std::int64_t{1} << 30);
  for (const char* pipeline : kPipelines) {
    DeviceProblem run(before, options_of(pipeline));
    DeviceProblem source(after, options_of(pipeline));
    for (unsigned char i = 0; i < 20; ++i) device::fill(delay.data(), i, delay.bytes(), stream.handle());
    for (const auto member : {&ForwardArguments::q_latent, &ForwardArguments::kv_latent, &ForwardArguments::k_rope,
                              &ForwardArguments::q_rope, &ForwardArguments::indices}) {
      const Tensor& to = run.arguments().*member;
      const auto bytes = static_cast<std::size_t>(to.num_elements() * size_bytes(to.dtype));
      ASSERT_EQ(cudaMemcpyAsync(to.data, (source.arguments().*member).data, bytes, cudaMemcpyDeviceToDevice,
                                static_cast<cudaStream_t>(stream.handle())),
                cudaSuccess);
    }
    run.enqueue(stream.handle());
    stream.synchronize();
    EXPECT_EQ(differences(run.outputs(), run_forward(after.inputs(), options_of(pipeline))), "") << pipeline;
  }
}

class Graph {
 public:
  Graph(const device::Stream& stream, const std::function<void(void*)>& work)
      : stream_(static_cast<cudaStream_t>(stream.handle())) {
    EXPECT_EQ(cudaStreamBeginCapture(stream_, cudaStreamCaptureModeGlobal), cudaSuccess);
    EXPECT_NO_THROW(work(stream.handle()));
    EXPECT_EQ(cudaStreamEndCapture(stream_, &graph_), cudaSuccess);
    EXPECT_EQ(cudaGraphInstantiate(&executable_, graph_, 0), cudaSuccess);
  }
  ~Graph() {
    if (executable_ != nullptr) (void)cudaGraphExecDestroy(executable_);
    if (graph_ != nullptr) (void)cudaGraphDestroy(graph_);
  }
  Graph(const Graph&) = delete;
  Graph& operator=(const Graph&) = delete;

  [[nodiscard]] std::size_t num_nodes() const {
    std::size_t count = 0;
    EXPECT_EQ(cudaGraphGetNodes(graph_, nullptr, &count), cudaSuccess);
    return count;
  }
  void replay() const {
    ASSERT_NE(executable_, nullptr);
    EXPECT_EQ(cudaGraphLaunch(executable_, stream_), cudaSuccess);
    EXPECT_EQ(cudaStreamSynchronize(stream_), cudaSuccess);
  }

 private:
  cudaStream_t stream_;
  cudaGraph_t graph_ = nullptr;
  cudaGraphExec_t executable_ = nullptr;
};

TEST_F(CudaCalls, IsCapturedAndReplayedWithOtherContents) {
  const device::Stream stream;
  for (const char* pipeline : kPipelines) {
    const Problem first = problem_of(4);
    DeviceProblem run(first, options_of(pipeline));
    const Graph graph(stream, [&](void* handle) { run.enqueue(handle); });
    EXPECT_GE(graph.num_nodes(), 1U);
    EXPECT_TRUE(run.outputs().untouched()) << "a captured call must not run";
    graph.replay();
    EXPECT_EQ(differences(run.outputs(), run_forward(first.inputs(), options_of(pipeline))), "") << pipeline;
    for (const std::uint64_t seed : {5U, 6U}) {
      const Problem other = problem_of(seed);
      run.replace_inputs(other);
      graph.replay();
      EXPECT_EQ(differences(run.outputs(), run_forward(other.inputs(), options_of(pipeline))), "") << pipeline;
    }
  }
}

TEST_F(CudaCalls, AllocatesNothingOnTheDevice) {
  const Problem problem = problem_of(7);
  for (const char* pipeline : kPipelines) {
    DeviceProblem run(problem, options_of(pipeline));
    run.enqueue();  // kernels are loaded at their first launch, which takes memory once
    device::synchronize();
    const auto free_bytes = [] {
      std::size_t free = 0;
      std::size_t total = 0;
      EXPECT_EQ(cudaMemGetInfo(&free, &total), cudaSuccess);
      return free;
    };
    const std::size_t before = free_bytes();
    for (int i = 0; i < 20; ++i) run.enqueue();
    EXPECT_EQ(free_bytes(), before) << pipeline;
    device::synchronize();
    EXPECT_EQ(free_bytes(), before) << pipeline;
  }
}

TEST_F(CudaCalls, AnErrorOfTheCallerStaysHis) {
  const Problem problem = problem_of(8);
  for (const char* pipeline : kPipelines) {
    const ForwardOutputs expected = run_forward(problem.inputs(), options_of(pipeline));
    DeviceProblem run(problem, options_of(pipeline));
    (void)cudaGetLastError();
    ASSERT_EQ(cudaSetDevice(-1), cudaErrorInvalidDevice);
    EXPECT_NO_THROW(run.enqueue()) << pipeline;
    EXPECT_EQ(cudaGetLastError(), cudaErrorInvalidDevice) << pipeline << ": taken from the caller";
    EXPECT_EQ(cudaPeekAtLastError(), cudaSuccess);
    EXPECT_EQ(differences(run.outputs(), expected), "") << pipeline;
  }
}

TEST_F(CudaCalls, ARefusedCallLeavesNoError) {
  const Problem problem = problem_of(9);
  const auto refused = [&](const char* argument, const std::function<void(ForwardArguments&, Options&)>& change) {
    DeviceProblem run(problem, options_of("exact+canonical"));
    (void)cudaGetLastError();
    ForwardArguments arguments = run.arguments();
    Options options = run.options();
    change(arguments, options);
    try {
      forward(arguments, options);
      ADD_FAILURE() << argument << ": not refused";
    } catch (const Error& error) {
      EXPECT_EQ(error.argument(), argument) << error.what();
    }
    EXPECT_EQ(cudaPeekAtLastError(), cudaSuccess) << argument;
    EXPECT_TRUE(run.outputs().untouched()) << argument;
  };
  const auto shifted = [](Tensor& tensor, int bytes) { tensor.data = static_cast<std::byte*>(tensor.data) + bytes; };
  refused("q_latent", [&](auto& arguments, auto&) { shifted(arguments.q_latent, 2); });
  refused("kv_latent", [&](auto& arguments, auto&) { shifted(arguments.kv_latent, 8); });
  refused("out", [&](auto& arguments, auto&) { shifted(arguments.out, -2); });
  refused("out_residual", [](auto& arguments, auto&) { arguments.out_residual.strides[1] = 516; });
  refused("k_rope", [](auto& arguments, auto&) { arguments.k_rope.device = {}; });
  refused("indices", [](auto& arguments, auto&) { arguments.indices.data = nullptr; });
  refused("workspace", [](auto&, auto& options) { options.workspace_bytes -= 1; });
  refused("workspace", [](auto&, auto& options) {
    options.workspace = nullptr;
    options.workspace_bytes = 0;
  });
  refused("workspace",
          [](auto&, auto& options) { options.workspace = static_cast<std::byte*>(options.workspace) + 16; });
  refused("key_block", [](auto&, auto& options) { options.pipeline->key_block = 128; });
  refused("num_threads", [](auto&, auto& options) { options.num_threads = 2; });
}

TEST_F(CudaCalls, HostTensorsAreRefused) {
  const Problem problem = problem_of(10);
  cases::ForwardOutputs outputs = cases::make_forward_outputs(problem.inputs(), true);
  EXPECT_THROW(forward(cases::forward_arguments(problem.inputs(), outputs), options_of("exact")), Error);
  EXPECT_TRUE(outputs.untouched());
}

TEST_F(CudaCalls, TheBackendIsChosenByTheTensors) {
  const Problem problem = problem_of(11);
  DeviceProblem run(problem, options_of("exact"));
  run.options().backend.clear();
  EXPECT_EQ(plan(run.arguments(), run.options()).backend, cases::kDeviceBackend);
}

TEST_F(CudaCalls, RunsOnASecondDevice) {
  if (device::count() < 2) GTEST_SKIP() << "one device";
  const Problem problem = problem_of(12);
  for (const char* pipeline : kPipelines) {
    const ForwardOutputs expected = run_forward(problem.inputs(), options_of(pipeline));
    const ForwardOutputs outputs =
        cases::make_forward_outputs(problem.inputs(), cases::has_residual(options_of(pipeline)));
    ASSERT_EQ(cudaSetDevice(0), cudaSuccess);
    device::forward_on({DeviceType::kCuda, 1}, cases::forward_arguments(problem.inputs(), outputs),
                       options_of(pipeline));
    int current = -1;
    EXPECT_EQ(cudaGetDevice(&current), cudaSuccess);
    EXPECT_EQ(current, 0) << "the caller's current device";
    EXPECT_EQ(differences(outputs, expected), "") << pipeline;
  }
}

}  // namespace
}  // namespace sparsemla::cuda_test
