// Bitwise the same: for any thread count, from run to run, and for a token whatever stands beside it in the batch.
#include <gtest/gtest.h>

#include <algorithm>

#include "cases/conformance.h"

namespace sparsemla {
namespace {

using cases::differences;
using cases::find;
using cases::packed_bytes;
using cases::Results;
using cases::run;

class Determinism : public testing::TestWithParam<CpuEngine> {
 protected:
  [[nodiscard]] static Options options(int threads, const char* pipeline = "exact") {
    Options result;
    result.pipeline = parse_pipeline(pipeline);
    result.cpu_engine = GetParam();
    result.num_threads = threads;
    result.deterministic = true;
    return result;
  }
};

// Contended keys, every kind of list, lists above 2048 slots, causal documents, odd head counts.
const char* const kCases[] = {
    "contention_32_keys", "contention_one_key", "index_soup_2",       "topk_4100",           "two_super_blocks",
    "heads_65",           "packed_documents",   "causal_more_tokens", "counts_zero_to_topk", "h32_topk_512_seed_1",
    "dlse_and_sink",      "nan_in_key_rope",    "tokens_33",          "no_tokens",           "no_keys"};

TEST_P(Determinism, ThreadCountChangesNothing) {
  for (const char* name : kCases) {
    const Problem problem = find(name).make();
    const Results one = run(problem, options(1));
    for (const int threads : {2, 3, 8, 0}) {
      EXPECT_EQ(differences(one, run(problem, options(threads))), "") << name << ", " << threads << " threads";
    }
  }
}

TEST_P(Determinism, ThreadCountChangesNothingForWideContendedLists) {
  // Lists of more than 2048 slots that nearly all tokens share.
  const Problem problem =
      make_iid({.num_tokens = 24, .num_keys = 2300, .topk = 2200, .num_heads = 2, .seed = 3}, /*with_gradient=*/true);
  const Results one = run(problem, options(1));
  for (const int threads : {2, 3, 8}) EXPECT_EQ(differences(one, run(problem, options(threads))), "") << threads;
}

TEST_P(Determinism, ThreadCountChangesNothingInAnyPipeline) {
  const Problem problem = find("contention_32_keys").make();
  for (const char* pipeline :
       {"exact+split", "lazy+no-residual", "exact+canonical+key=7", "lazy+rounded-sum+key=128"}) {
    const Results one = run(problem, options(1, pipeline), DataType::kFloat32);
    for (const int threads : {2, 8}) {
      EXPECT_EQ(differences(one, run(problem, options(threads, pipeline), DataType::kFloat32)), "") << pipeline;
    }
  }
}

TEST_P(Determinism, RunToRunNothingChanges) {
  // 20 runs of the shape whose shared-memory merge has been seen to give NaN, with more threads than cores.
  for (const char* name : {"large_topk_h64", "contention_32_keys"}) {
    const Problem problem = find(name).make();
    const Results first = run(problem, options(8));
    for (int repeat = 0; repeat < 20; ++repeat) {
      ASSERT_EQ(differences(first, run(problem, options(8))), "") << name << ", repeat " << repeat;
    }
  }
}

TEST_P(Determinism, AccumulationIsDeterministicToo) {
  const Problem problem = find("contention_32_keys").make();
  const auto accumulated = [&](int threads) {
    const auto outputs = cases::run_forward(problem.inputs(), options(1));
    cases::Gradients gradients = cases::make_gradients(problem.inputs());
    const Tensor dkv = gradients.dkv_latent.tensor();
    const Tensor dk = gradients.dk_rope.tensor();
    std::fill_n(static_cast<float*>(dkv.data), dkv.num_elements(), 0.3F);
    std::fill_n(static_cast<float*>(dk.data), dk.num_elements(), -0.7F);
    auto arguments = cases::backward_arguments(problem.inputs(), outputs, problem.dout_tensor(), {}, gradients);
    arguments.accumulate_dkv = true;
    backward(arguments, options(threads));
    return std::pair(gradients.dkv_latent.bytes(), gradients.dk_rope.bytes());
  };
  const auto one = accumulated(1);
  EXPECT_EQ(one, accumulated(3));
  EXPECT_EQ(one, accumulated(8));
}

/// Rows [begin, begin + count) along axis 0.
Tensor rows_of(Tensor tensor, std::int64_t begin, std::int64_t count) {
  if (!tensor.defined()) return tensor;
  tensor.data = static_cast<std::byte*>(tensor.data) + begin * tensor.strides[0] * size_bytes(tensor.dtype);
  tensor.shape[0] = count;
  return tensor;
}

TEST_P(Determinism, ATokenDoesNotSeeTheRestOfTheBatch) {
  for (const char* name : {"index_soup_3", "topk_300", "contention_32_keys", "h32_topk_512_seed_2"}) {
    const Problem problem = find(name).make();
    const Results whole = run(problem, options(2));
    for (std::int64_t token = 0; token < std::min<std::int64_t>(problem.num_tokens, 12); ++token) {
      AttentionInputs inputs = problem.inputs();
      inputs.q_latent = rows_of(inputs.q_latent, token, 1);
      inputs.q_rope = rows_of(inputs.q_rope, token, 1);
      inputs.indices = rows_of(inputs.indices, token, 1);
      inputs.topk_length = rows_of(inputs.topk_length, token, 1);
      const auto outputs = cases::run_forward(inputs, options(2));
      const auto gradients = cases::run_backward(inputs, outputs, rows_of(problem.dout_tensor(), token, 1),
                                                 rows_of(problem.dlse_tensor(), token, 1), options(2));
      const auto same = [&](const cases::OwnedTensor& one, const cases::OwnedTensor& all) {
        return one.bytes() == packed_bytes(rows_of(all.tensor(), token, 1));
      };
      EXPECT_TRUE(same(outputs.out, whole.forward.out)) << name << " token " << token;
      EXPECT_TRUE(same(outputs.lse, whole.forward.lse)) << name << " token " << token;
      EXPECT_TRUE(same(outputs.max_logits, whole.forward.max_logits)) << name << " token " << token;
      EXPECT_TRUE(same(outputs.out_residual, whole.forward.out_residual)) << name << " token " << token;
      EXPECT_TRUE(same(gradients.dq_latent, whole.gradients.dq_latent)) << name << " token " << token;
      EXPECT_TRUE(same(gradients.dq_rope, whole.gradients.dq_rope)) << name << " token " << token;
    }
  }
}

TEST_P(Determinism, PlanSaysSo) {
  const Problem problem = find("heads_3").make();
  const auto outputs = cases::run_forward(problem.inputs(), options(2));
  const auto gradients = cases::make_gradients(problem.inputs());
  const Plan chosen =
      plan(cases::backward_arguments(problem.inputs(), outputs, problem.dout_tensor(), {}, gradients), options(2));
  EXPECT_TRUE(chosen.deterministic);
  EXPECT_EQ(chosen.num_threads, 2);
}

INSTANTIATE_TEST_SUITE_P(Engines, Determinism, testing::ValuesIn(cases::engines()),
                         [](const auto& test) { return std::string(cases::to_string(test.param)); });

}  // namespace
}  // namespace sparsemla
