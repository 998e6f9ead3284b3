// Every rejection of an option, with the argument it names, and that what was forced is what runs.
#include <cmath>

#include "sparsemla/backend.h"
#include "validate/validate.h"
#include "validation_fixture.h"

namespace sparsemla::validation {
namespace {

class ValidationOptions : public Validation {
 protected:
  void refuses_options(const std::string& argument, const std::function<void(Options&)>& break_it,
                       const std::string& found = "") {
    refuses_forward(
        argument, [&](ForwardArguments&, Options& o) { break_it(o); }, found);
    refuses_backward(
        argument, [&](BackwardArguments&, Options& o) { break_it(o); }, found);
  }
  void refuses_pipeline(const std::string& argument, const std::function<void(Pipeline&)>& break_it,
                        const std::string& found = "") {
    refuses_options(
        argument,
        [&](Options& o) {
          o.pipeline = Pipeline{};
          break_it(*o.pipeline);
        },
        found);
  }
};

TEST_F(ValidationOptions, UnsafeThresholds) {
  for (const float threshold : {128.0F, 127.995F, -1.0F, -1e-30F, std::nanf(""), static_cast<float>(kInfinity),
                                -static_cast<float>(kInfinity), 1e30F}) {
    refuses_pipeline("rescale_threshold", [threshold](Pipeline& p) { p.rescale_threshold_log2 = threshold; });
  }
  for (const float threshold : {0.0F, -0.0F, 8.0F, 127.9F}) {
    Options options;
    options.pipeline = Pipeline{};
    options.pipeline->rescale_threshold_log2 = threshold;
    EXPECT_NO_THROW((void)cases::run_forward(problem_.inputs(), options)) << threshold;
  }
}

TEST_F(ValidationOptions, KeyBlocks) {
  for (const int key_block : {0, -1, std::numeric_limits<int>::min()}) {
    refuses_pipeline(
        "key_block", [key_block](Pipeline& p) { p.key_block = key_block; }, std::to_string(key_block));
  }
  Options options;
  options.pipeline = Pipeline{};
  options.pipeline->key_block = std::numeric_limits<int>::max();
  EXPECT_NO_THROW((void)cases::run_forward(problem_.inputs(), options));
}

TEST_F(ValidationOptions, DtypesOfPThatAreNotBuilt) {
  for (const DataType dtype : kAllDtypes) {
    if (dtype == DataType::kBFloat16) continue;
    refuses_pipeline(
        "p_dtype", [dtype](Pipeline& p) { p.p_dtype = dtype; }, std::string(to_string(dtype)));
  }
}

TEST_F(ValidationOptions, Threads) {
  refuses_options(
      "num_threads", [](Options& o) { o.num_threads = -1; }, "-1");
  refuses_options("num_threads", [](Options& o) { o.num_threads = std::numeric_limits<int>::min(); });
}

TEST_F(ValidationOptions, StreamsOnTheCpu) {
  refuses_options("stream", [](Options& o) { o.stream = &o; });
}

TEST_F(ValidationOptions, HalfAWorkspace) {
  refuses_options(
      "workspace", [](Options& o) { o.workspace_bytes = 256; }, "256");
  refuses_options(
      "workspace",
      [](Options& o) {
        o.workspace = &o;
        o.workspace_bytes = -1;
      },
      "-1");
}

TEST_F(ValidationOptions, AWorkspaceThatIsNotNeededIsFine) {
  alignas(kWorkspaceAlignment) static std::byte memory[512];
  Options options;
  options.workspace = memory + 1;
  options.workspace_bytes = 511;
  EXPECT_NO_THROW((void)cases::run_forward(problem_.inputs(), options));
}

TEST_F(ValidationOptions, WorkspacesThatAPlanCannotUse) {
  alignas(kWorkspaceAlignment) static std::byte memory[1024];
  Plan needs;
  needs.workspace_bytes = 512;
  const auto check = [&](void* workspace, std::int64_t bytes, const std::string& found) {
    Options options;
    options.workspace = workspace;
    options.workspace_bytes = bytes;
    try {
      validate_workspace(options, needs);
      EXPECT_EQ(found, "");
    } catch (const Error& error) {
      EXPECT_EQ(error.argument(), "workspace");
      EXPECT_EQ(error.found(), found);
      EXPECT_NE(error.wanted().find("512 bytes"), std::string::npos) << error.what();
    }
  };
  check(memory, 512, "");
  check(memory + 256, 768, "");
  check(nullptr, 0, "nothing");
  check(memory, 511, "511 bytes");
  check(memory + 128, 512, "a misaligned pointer");
  check(memory + 255, 769, "a misaligned pointer");
}

/// The address is in nobody's memory, so reading an offset would end the test.
TEST_F(ValidationOptions, DataOnADeviceIsNeverRead) {
  ForwardArguments arguments;
  const auto on_device = [](DataType dtype, std::initializer_list<std::int64_t> shape) {
    return Tensor::contiguous(reinterpret_cast<const void*>(std::uintptr_t{256}), dtype, shape, {DeviceType::kCuda, 0});
  };
  arguments.q_latent = on_device(DataType::kBFloat16, {4, 2, kLatentDim});
  arguments.kv_latent = on_device(DataType::kBFloat16, {8, kLatentDim});
  arguments.indices = on_device(DataType::kInt32, {4, 3});
  arguments.topk_length = on_device(DataType::kInt32, {4});
  arguments.cu_seqlens_q = on_device(DataType::kInt32, {3});
  arguments.cu_seqlens_k = on_device(DataType::kInt32, {3});
  arguments.out = on_device(DataType::kBFloat16, {4, 2, kLatentDim});
  EXPECT_NO_THROW(validate(arguments));
  arguments.cu_seqlens_k = on_device(DataType::kInt32, {4});
  EXPECT_THROW(validate(arguments), Error);
}

TEST_F(ValidationOptions, Backends) {
  refuses_options(
      "backend", [](Options& o) { o.backend = "sm91"; }, "sm91");
  refuses_options(
      "backend", [](Options& o) { o.backend = "CPU"; }, "CPU");
  for (const BackendInfo& info : backends()) {
    if (!info.available) {
      EXPECT_FALSE(info.detail.empty());
      refuses_options(
          "backend", [&](Options& o) { o.backend = info.name; }, info.name);
    } else if (info.device != DeviceType::kCpu) {
      refuses_options("backend", [&](Options& o) { o.backend = info.name; });  // tensors are on the CPU
    }
  }
  Options options;
  options.backend = "cpu";
  EXPECT_NO_THROW((void)cases::run_forward(problem_.inputs(), options));
}

TEST_F(ValidationOptions, EngineThatThisProcessorLacks) {
  if (cases::engines().size() == 2) GTEST_SKIP() << "this processor has AMX";
  refuses_options(
      "cpu_engine", [](Options& o) { o.cpu_engine = CpuEngine::kAmx; }, "amx");
}

TEST_F(ValidationOptions, AForcedEngineRuns) {
  for (const CpuEngine engine : cases::engines()) {
    Options options;
    options.cpu_engine = engine;
    const auto outputs = cases::make_forward_outputs(problem_.inputs(), true);
    const Plan chosen = plan(cases::forward_arguments(problem_.inputs(), outputs), options);
    EXPECT_NE(chosen.variant.find(cases::to_string(engine)), std::string::npos) << chosen.variant;
    EXPECT_NE(to_string(chosen).find(chosen.variant), std::string::npos);
    EXPECT_TRUE(outputs.untouched()) << "plan wrote";
  }
}

TEST_F(ValidationOptions, ADeviceWithoutBackend) {
  for (const BackendInfo& info : backends()) {
    if (info.device == DeviceType::kCuda && info.available) GTEST_SKIP() << "this build runs CUDA tensors";
  }
  const auto move_all = [](AttentionInputs& a) {
    for (const NamedInput& input : kInputs) move_to_cuda(a.*input.member);
  };
  refuses_forward(
      "q_latent",
      [&](ForwardArguments& a, Options&) {
        move_all(a);
        for (const NamedOutput& output : kOutputs) move_to_cuda(a.*output.member);
      },
      "cuda:0");
  refuses_backward(
      "q_latent",
      [&](BackwardArguments& a, Options&) {
        move_all(a);
        for (const NamedBackward& tensor : kBackward) move_to_cuda(a.*tensor.member);
      },
      "cuda:0");
}

}  // namespace
}  // namespace sparsemla::validation
