// The order of a list on the device: canonical is bitwise blind to it, the exact max blind beyond rounding, the stale
// max is not; and the forward figures of docs/numerics.md at setup P.
#include <algorithm>
#include <utility>

#include "sparsemla/numerics.h"
#include "tests/cuda/fixture.h"

namespace sparsemla::cuda_test {
namespace {

using cases::differences;
using cases::find;
using cases::ForwardOutputs;
using cases::run_forward;

class CudaForwardOrder : public CudaTest {};

/// Only slots below topk_length change places among each other.
Problem shuffled(const Problem& problem, std::uint64_t seed) {
  Problem result = problem;
  Random random(seed);
  for (std::int64_t t = 0; t < problem.num_tokens; ++t) {
    std::int64_t slots = problem.topk;
    if (!problem.topk_length.empty()) slots = std::clamp<std::int64_t>(problem.topk_length[t], 0, slots);
    std::int32_t* list = result.indices.data() + t * problem.topk;
    for (std::int64_t i = slots - 1; i > 0; --i) std::swap(list[i], list[random.below(i + 1)]);
  }
  return result;
}

/// Lists with holes and repeats, longer than one tile of the sort.
Problem long_lists(std::int64_t topk) {
  Problem problem = make_iid({.num_tokens = 5, .num_keys = topk, .topk = topk, .num_heads = 3, .seed = 21}, false);
  Random random(5);
  for (std::int32_t& index : problem.indices) {
    const std::int64_t draw = random.below(8);
    if (draw == 0) index = -1;
    if (draw == 1) index = problem.indices[0];
  }
  return problem;
}

void expect_blind_to_order(const std::string& name, const Problem& problem, const std::string& pipeline) {
  const ForwardOutputs first = run_forward(problem.inputs(), options_of(pipeline));
  for (std::uint64_t seed = 1; seed <= 6; ++seed) {
    const Problem other = shuffled(problem, seed);
    ASSERT_EQ(differences(first, run_forward(other.inputs(), options_of(pipeline))), "")
        << name << ", " << pipeline << ", permutation " << seed;
  }
}

TEST_F(CudaForwardOrder, CanonicalIsBitwiseTheSameForPermutations) {
  for (const char* pipeline : {"canonical", "canonical+lazy+no-residual", "canonical+first-to-last"}) {
    for (const char* name : {"index_soup_1", "index_soup_causal", "nan_in_key_latent", "nan_everywhere_in_key",
                             "bad_indices_edges", "length_clamped", "sink_mix", "topk_300", "staircase_above_threshold",
                             "packed_documents_causal", "duplicates", "unreferenced_nan"}) {
      expect_blind_to_order(name, find(name).make(), pipeline);
    }
    for (const std::int64_t topk : {1025, 4100, 8192, 8193, 20000}) {
      expect_blind_to_order("lists of " + std::to_string(topk), long_lists(topk), pipeline);
    }
  }
}

// The control: the same permutations change something as soon as the order is the list's own.
TEST_F(CudaForwardOrder, WithoutCanonicalSomethingDiffers) {
  const Problem problem = find("topk_300").make();
  for (const char* pipeline : {"exact", "lazy"}) {
    const ForwardOutputs first = run_forward(problem.inputs(), options_of(pipeline));
    bool differs = false;
    for (std::uint64_t seed = 1; seed <= 5; ++seed) {
      const Problem other = shuffled(problem, seed);
      differs = differs || !differences(first, run_forward(other.inputs(), options_of(pipeline))).empty();
    }
    EXPECT_TRUE(differs) << pipeline;
  }
}

/// Canonical order is the order of the same list sorted, walked as any other.
TEST_F(CudaForwardOrder, CanonicalIsTheSortedList) {
  for (const char* name : {"topk_300", "heads_65", "h32_topk_512_seed_1"}) {
    const Problem problem = find(name).make();
    Problem sorted = problem;
    for (std::int64_t t = 0; t < problem.num_tokens; ++t) {
      auto* list = reinterpret_cast<std::uint32_t*>(sorted.indices.data() + t * problem.topk);
      std::sort(list, list + problem.topk);  // -1 is the largest
    }
    EXPECT_EQ(differences(run_forward(problem.inputs(), options_of("canonical")),
                          run_forward(sorted.inputs(), options_of("exact"))),
              "")
        << name;
  }
}

struct Figures {
  double rel_l2 = 0;
  double row_gain = 0;
};
struct OrderFigures {
  Figures first;
  Figures last;
  double ratio = 0;  // of the orders' difference: row gain over noise floor
  Floors floors;
};

/// Setup P: each token's own key dominates, and stands where the walk meets it first or last.
class Peaked {
 public:
  /// Of the tokens every `step`-th is held against the reference, the last among them.
  Peaked(const ProblemShape& shape, std::int64_t step)
      : step_(step), problem_(make_peaked(shape, 0.25, /*with_gradient=*/false)) {
    for (std::int32_t t = 0; t < shape.num_tokens; ++t) own_key_.push_back(t);
    AttentionInputs sampled = problem_.inputs();
    for (Tensor* tensor : {&sampled.q_latent, &sampled.q_rope, &sampled.indices}) *tensor = sample(*tensor);
    exact_ = reference::forward(sampled);
  }

  [[nodiscard]] OrderFigures measure(const std::string& pipeline) const {
    const std::vector<std::byte> first = sampled_out(SlotOrder::kDominantFirst, pipeline);
    const std::vector<std::byte> last = sampled_out(SlotOrder::kDominantLast, pipeline);
    const std::int64_t rows = static_cast<std::int64_t>(exact_.out.size()) / kLatentDim;
    const Tensor truth = Tensor::contiguous(exact_.out.data(), DataType::kFloat64, {rows, kLatentDim});
    const Tensor a = Tensor::contiguous(first.data(), DataType::kBFloat16, {rows, kLatentDim});
    const Tensor b = Tensor::contiguous(last.data(), DataType::kBFloat16, {rows, kLatentDim});
    const RowGain difference = row_gain(a, b, truth);
    const auto figures = [&](const Tensor& out) {
      return Figures{rel_l2(out, truth), row_gain(out, truth, truth).rms};
    };
    return {figures(a), figures(b), difference.rms / difference.noise_floor, bf16_floors(truth)};
  }

 private:
  [[nodiscard]] Tensor sample(Tensor tensor) const {
    const std::int64_t tokens = tensor.shape[0];
    tensor = narrowed(tensor, 0, step_ - 1, tokens / step_);
    tensor.strides[0] *= step_;
    return tensor;
  }

  [[nodiscard]] std::vector<std::byte> sampled_out(SlotOrder order, const std::string& pipeline) const {
    const std::vector<std::int32_t> lists = reorder_slots(problem_.indices, problem_.num_tokens, problem_.topk,
                                                          own_key_, order, parse_pipeline(pipeline).walk, 1);
    AttentionInputs inputs = problem_.inputs();
    inputs.indices = Tensor::contiguous(lists.data(), DataType::kInt32, {problem_.num_tokens, problem_.topk});
    const ForwardOutputs outputs = run_forward(inputs, options_of(pipeline));
    return cases::packed_bytes(sample(outputs.out.tensor()));
  }

  std::int64_t step_;
  Problem problem_;
  std::vector<std::int32_t> own_key_;
  reference::ForwardResult exact_;
};

TEST_F(CudaForwardOrder, OrderTestPassesExactAndFailsLazy) {
  for (const std::int64_t heads : {8, 5, 65}) {
    const Peaked setup({.num_tokens = 512, .num_keys = 512, .topk = 256, .num_heads = heads, .seed = 7}, 4);
    for (const char* pipeline : {"exact", "exact+first-to-last", "canonical"}) {
      const OrderFigures exact = setup.measure(pipeline);
      EXPECT_LT(exact.first.row_gain, kMaxRowGainOverIdeal * exact.floors.row_gain_rms) << heads << " " << pipeline;
      EXPECT_LT(exact.last.row_gain, kMaxRowGainOverIdeal * exact.floors.row_gain_rms) << heads << " " << pipeline;
      if (std::string(pipeline) == "canonical") continue;  // no difference to speak of
      EXPECT_LT(exact.ratio, kMaxOrderGainOverNoiseFloor) << heads << " " << pipeline;
    }
    const OrderFigures lazy = setup.measure("lazy+no-residual");
    EXPECT_GT(lazy.ratio, 5.0) << heads;
    EXPECT_GT(lazy.last.row_gain, 5.0 * lazy.floors.row_gain_rms) << heads;
    EXPECT_LT(lazy.first.row_gain, kMaxRowGainOverIdeal * lazy.floors.row_gain_rms)
        << "the dominant key met first is never stale";
  }
}

TEST_F(CudaForwardOrder, FiguresAtSetupP) {
  const Peaked setup({.num_tokens = 4096, .num_keys = 4096, .topk = 2048, .num_heads = 128, .seed = 1}, 32);
  const OrderFigures exact = setup.measure("exact+no-residual");
  for (const Figures& figures : {exact.first, exact.last}) {
    EXPECT_LE(figures.rel_l2, 1.68e-3);
    EXPECT_LE(figures.row_gain, 1.5e-4);
  }
  EXPECT_LE(exact.ratio, 1.2);
  const OrderFigures lazy = setup.measure("lazy+no-residual");
  EXPECT_GT(lazy.last.row_gain, 1e-3) << "the control: a stale max must show";
  EXPECT_GT(lazy.ratio, 5.0);
  RecordProperty("exact_out_rel_l2", std::to_string(exact.last.rel_l2));
  RecordProperty("exact_row_gain_rms", std::to_string(exact.last.row_gain));
  RecordProperty("exact_order_ratio", std::to_string(exact.ratio));
}

}  // namespace
}  // namespace sparsemla::cuda_test
