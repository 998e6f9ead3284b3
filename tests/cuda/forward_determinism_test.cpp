// Bitwise the same on the device: from run to run, for a row whatever stands beside it, with and without what training
// asks for on top.
#include <limits>

#include "sparsemla/error.h"
#include "tests/cuda/fixture.h"

namespace sparsemla::cuda_test {
namespace {

using cases::differences;
using cases::find;
using cases::ForwardOutputs;
using cases::packed_bytes;
using cases::run_forward;

class CudaForwardDeterminism : public CudaTest {};

const char* const kPipelines[] = {"exact", "lazy+no-residual", "exact+canonical", "exact+first-to-last"};

/// Enough rows that the device is full several times over.
Problem many_rows() {
  return make_iid({.num_tokens = 400, .num_keys = 700, .topk = 300, .num_heads = 80, .seed = 11}, false);
}

TEST_F(CudaForwardDeterminism, FiftyRunsAreEqual) {
  const Problem problem = many_rows();
  for (const char* pipeline : kPipelines) {
    DeviceProblem first(problem, options_of(pipeline));
    first.enqueue();
    (void)first.outputs();
    DeviceProblem again(problem, options_of(pipeline));
    for (int repeat = 0; repeat < 50; ++repeat) {
      const Tensor& out = again.arguments().out;
      device::fill(out.data, 0xA5, out.num_elements() * size_bytes(out.dtype));
      again.enqueue();
      ASSERT_EQ(differences(first.outputs(), again.outputs()), "") << pipeline << ", repeat " << repeat;
    }
  }
}

struct Part {
  const char* name;
  cases::OwnedTensor ForwardOutputs::*output;
};
const Part kParts[] = {{"out", &ForwardOutputs::out},
                       {"lse", &ForwardOutputs::lse},
                       {"max_logits", &ForwardOutputs::max_logits},
                       {"out_residual", &ForwardOutputs::out_residual}};

/// `part` has what rows [begin, begin + its extent) along `axis` of `whole` have.
void expect_part_of(const ForwardOutputs& part, const ForwardOutputs& whole, int axis, std::int64_t begin,
                    const std::string& what) {
  for (const Part& which : kParts) {
    const Tensor& some = (part.*which.output).tensor();
    if (!some.defined()) continue;
    const Tensor all = narrowed((whole.*which.output).tensor(), axis, begin, some.shape[axis]);
    EXPECT_EQ(packed_bytes(some), packed_bytes(all)) << what << ": " << which.name;
  }
}

AttentionInputs tokens_of(AttentionInputs inputs, std::int64_t begin, std::int64_t count) {
  for (Tensor* tensor : {&inputs.q_latent, &inputs.q_rope, &inputs.indices, &inputs.topk_length}) {
    *tensor = narrowed(*tensor, 0, begin, count);
  }
  return inputs;
}

TEST_F(CudaForwardDeterminism, ATokenIsAsIfAlone) {
  for (const char* name : {"index_soup_3", "topk_300", "contention_32_keys", "h32_topk_512_seed_2", "length_zero"}) {
    const Problem problem = find(name).make();
    for (const char* pipeline : kPipelines) {
      const ForwardOutputs whole = run_forward(problem.inputs(), options_of(pipeline));
      for (std::int64_t token = 0; token < std::min<std::int64_t>(problem.num_tokens, 12); ++token) {
        const ForwardOutputs alone = run_forward(tokens_of(problem.inputs(), token, 1), options_of(pipeline));
        expect_part_of(alone, whole, 0, token, std::string(name) + " " + pipeline + " " + std::to_string(token));
      }
    }
  }
}

/// The tail of a batch has its tokens in other positions, and so on other multiprocessors, than the whole batch.
TEST_F(CudaForwardDeterminism, ATokenIsTheSameInOtherPositions) {
  const Problem problem = many_rows();
  for (const char* pipeline : kPipelines) {
    const ForwardOutputs whole = run_forward(problem.inputs(), options_of(pipeline));
    for (const std::int64_t begin : {1, 133, 399}) {
      const auto tail = tokens_of(problem.inputs(), begin, problem.num_tokens - begin);
      expect_part_of(run_forward(tail, options_of(pipeline)), whole, 0, begin,
                     std::string(pipeline) + " from " + std::to_string(begin));
    }
  }
}

TEST_F(CudaForwardDeterminism, ATokenDoesNotSeeWhatOthersHold) {
  const Problem problem = many_rows();
  Problem other = problem;
  const auto nan = to_bfloat16(std::numeric_limits<float>::quiet_NaN());
  const std::int64_t kept = 137;
  for (std::int64_t t = 0; t < problem.num_tokens; ++t) {
    if (t == kept) continue;
    std::fill_n(other.q_latent.begin() + t * problem.num_heads * kLatentDim, problem.num_heads * kLatentDim, nan);
    std::fill_n(other.indices.begin() + t * problem.topk, t % 2 == 0 ? problem.topk : 70, t % 2 == 0 ? -1 : 3);
  }
  for (const char* pipeline : kPipelines) {
    const ForwardOutputs clean = run_forward(problem.inputs(), options_of(pipeline));
    const ForwardOutputs poisoned = run_forward(other.inputs(), options_of(pipeline));
    for (const Part& which : kParts) {
      const auto row = [&](const ForwardOutputs& outputs) {
        const Tensor& tensor = (outputs.*which.output).tensor();
        return tensor.defined() ? packed_bytes(narrowed(tensor, 0, kept, 1)) : std::vector<std::byte>{};
      };
      EXPECT_EQ(row(clean), row(poisoned)) << pipeline << ": " << which.name;
    }
  }
}

TEST_F(CudaForwardDeterminism, AHeadIsTheSameAmongOtherHeads) {
  const Problem problem =
      make_iid({.num_tokens = 6, .num_keys = 300, .topk = 200, .num_heads = 130, .seed = 12}, false);
  for (const char* pipeline : kPipelines) {
    const ForwardOutputs whole = run_forward(problem.inputs(), options_of(pipeline));
    for (const auto& [begin, count] :
         {std::pair{0, 1}, {0, 64}, {1, 64}, {63, 2}, {64, 66}, {65, 65}, {100, 17}, {129, 1}}) {
      AttentionInputs inputs = problem.inputs();
      inputs.q_latent = narrowed(inputs.q_latent, 1, begin, count);
      inputs.q_rope = narrowed(inputs.q_rope, 1, begin, count);
      expect_part_of(run_forward(inputs, options_of(pipeline)), whole, 1, begin,
                     std::string(pipeline) + " heads from " + std::to_string(begin));
    }
  }
}

TEST_F(CudaForwardDeterminism, TrainingOutIsInferenceOut) {
  Options training = options_of("exact");
  training.pipeline.reset();
  Options inference = training;
  inference.purpose = Purpose::kInference;
  for (const char* name : {"topk_300", "heads_65", "sink_mix", "index_soup_2"}) {
    const Problem problem = find(name).make();
    const ForwardOutputs a = run_forward(problem.inputs(), training);
    const ForwardOutputs b = run_forward(problem.inputs(), inference);
    ASSERT_TRUE(a.out_residual.defined());
    ASSERT_FALSE(b.out_residual.defined());
    EXPECT_EQ(differences(a, b), "out_residual") << name;
  }
}

TEST_F(CudaForwardDeterminism, ASinkOfMinusInfinityIsNoSink) {
  for (const char* name : {"topk_300", "heads_65", "index_soup_2"}) {
    Problem problem = find(name).make();
    problem.sink.clear();
    for (const char* pipeline : kPipelines) {
      const ForwardOutputs without = run_forward(problem.inputs(), options_of(pipeline));
      Problem with = problem;
      with.sink.assign(static_cast<std::size_t>(problem.num_heads), -std::numeric_limits<float>::infinity());
      EXPECT_EQ(differences(without, run_forward(with.inputs(), options_of(pipeline))), "") << name << " " << pipeline;
      with.sink.assign(static_cast<std::size_t>(problem.num_heads), 0.5F);
      EXPECT_EQ(run_forward(with.inputs(), options_of(pipeline)).lse.bytes(), without.lse.bytes()) << "keys only";
    }
  }
}

}  // namespace
}  // namespace sparsemla::cuda_test
