#include <gtest/gtest.h>

#include <vector>

#include "sparsemla/attention.h"
#include "sparsemla/backend.h"
#include "sparsemla/error.h"

namespace sparsemla {
namespace {

/// A forward call over tensors that are never read: plan() touches no data.
ForwardArguments unread_arguments(std::int64_t tokens, std::int64_t keys, std::int64_t topk, std::int64_t heads) {
  static std::int64_t anything = 0;
  using enum DataType;
  ForwardArguments arguments;
  arguments.q_latent = Tensor::contiguous(&anything, kBFloat16, {tokens, heads, 512});
  arguments.q_rope = Tensor::contiguous(&anything, kBFloat16, {tokens, heads, 64});
  arguments.kv_latent = Tensor::contiguous(&anything, kBFloat16, {keys, 512});
  arguments.k_rope = Tensor::contiguous(&anything, kBFloat16, {keys, 64});
  arguments.indices = Tensor::contiguous(&anything, kInt32, {tokens, topk});
  arguments.out = Tensor::contiguous(&anything, kBFloat16, {tokens, heads, 512});
  return arguments;
}

TEST(PlanTest, TrainingIsExactWithResidual) {
  ForwardArguments arguments = unread_arguments(4096, 8192, 2048, 128);
  arguments.out_residual = arguments.out;
  const Plan chosen = plan(arguments);
  EXPECT_EQ(chosen.pipeline, Pipeline::training());
  EXPECT_EQ(chosen.backend, "cpu");
  EXPECT_TRUE(chosen.deterministic);
  EXPECT_EQ(chosen.workspace_bytes, 0);
  EXPECT_DOUBLE_EQ(chosen.flops, 2.0 * 4096 * 128 * 2048 * 1088);
  EXPECT_NE(to_string(chosen).find("exact max"), std::string::npos);
}

TEST(PlanTest, TrainingWithoutResidualIsRefused) {
  const ForwardArguments arguments = unread_arguments(1, 1, 1, 1);
  try {
    (void)plan(arguments);
    FAIL();
  } catch (const Error& error) {
    EXPECT_EQ(error.argument(), "out_residual");
  }
}

TEST(PlanTest, InferenceTakesTheExactMaxOnTheCpu) {
  const ForwardArguments arguments = unread_arguments(1, 1, 1, 1);
  Options options;
  options.purpose = Purpose::kInference;
  const Plan chosen = plan(arguments, options);
  EXPECT_EQ(chosen.pipeline.rescale_threshold_log2, 0.0F);
  EXPECT_FALSE(chosen.pipeline.residual);
  EXPECT_TRUE(chosen.training_matches_inference);
}

TEST(PlanTest, AForcedEngineRunsOrSaysWhyNot) {
  const ForwardArguments arguments = unread_arguments(4, 4, 4, 4);
  Options options;
  options.purpose = Purpose::kInference;
  options.cpu_engine = CpuEngine::kFp32;
  EXPECT_EQ(plan(arguments, options).variant, "eigen-fp32");
  options.cpu_engine = CpuEngine::kAmx;
  try {
    EXPECT_EQ(plan(arguments, options).variant, "amx-bf16");
  } catch (const Error& error) {
    EXPECT_EQ(error.argument(), "cpu_engine");
  }
}

TEST(PlanTest, SizesBeyondInt32) {
  const ForwardArguments arguments = unread_arguments(1 << 21, 1 << 20, 2048, 256);
  Options options;
  options.purpose = Purpose::kInference;
  EXPECT_GT(plan(arguments, options).flops, 1e15);
}

TEST(BackendsTest, EachSaysWhatItIs) {
  bool cpu = false;
  for (const BackendInfo& info : backends()) {
    EXPECT_FALSE(info.detail.empty()) << info.name;
    if (info.name == "cpu") cpu = info.available;
  }
  EXPECT_TRUE(cpu);
}

}  // namespace
}  // namespace sparsemla
