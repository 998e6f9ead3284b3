// The order of a list: nothing changes when canonical; nothing but rounding with the exact max; and the stale max and
// the missing residual, which do change things, are seen to do so.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

#include "cases/conformance.h"
#include "sparsemla/bfloat16.h"
#include "sparsemla/numerics.h"

namespace sparsemla {
namespace {

using cases::differences;
using cases::find;
using cases::Results;
using cases::run;

class OrderInvariance : public testing::TestWithParam<CpuEngine> {
 protected:
  [[nodiscard]] static Options options(const std::string& pipeline) {
    Options result;
    result.pipeline = parse_pipeline(pipeline);
    result.cpu_engine = GetParam();
    return result;
  }
};

/// A copy with every list shuffled, empty slots and all; only slots below topk_length change places among each other.
Problem shuffled(const Problem& problem, std::uint64_t seed) {
  Problem result = problem;
  std::uint64_t state = seed * 0x9E3779B97F4A7C15U + 1;
  for (std::int64_t t = 0; t < problem.num_tokens; ++t) {
    std::int64_t slots = problem.topk;
    if (!problem.topk_length.empty()) slots = std::clamp<std::int64_t>(problem.topk_length[t], 0, slots);
    std::int32_t* list = result.indices.data() + t * problem.topk;
    for (std::int64_t i = slots - 1; i > 0; --i) {
      state = state * 6364136223846793005U + 1442695040888963407U;
      std::swap(list[i], list[static_cast<std::int64_t>((state >> 33) % static_cast<std::uint64_t>(i + 1))]);
    }
  }
  return result;
}

TEST_P(OrderInvariance, CanonicalIsBitwiseTheSameForTwentyPermutations) {
  // Holes, repeats, INT_MIN, lengths, sinks, dlse; NaN keys; ties; lists over several blocks; packed documents.
  for (const char* name : {"index_soup_1", "index_soup_causal", "nan_in_key_latent", "nan_everywhere_in_key",
                           "bad_indices_edges", "length_clamped", "sink_mix", "topk_300", "staircase_above_threshold",
                           "packed_documents_causal", "duplicates", "unreferenced_nan"}) {
    const Problem problem = find(name).make();
    for (const std::string pipeline : {"canonical", "canonical+key=7+lazy", "canonical+split+first-to-last"}) {
      const Results first = run(problem, options(pipeline));
      for (std::uint64_t seed = 1; seed <= (pipeline == "canonical" ? 20U : 3U); ++seed) {
        ASSERT_EQ(differences(first, run(shuffled(problem, seed), options(pipeline))), "")
            << name << ", " << pipeline << ", permutation " << seed;
      }
    }
  }
}

// The control: the same permutations do change something as soon as the order is the list's own.
TEST_P(OrderInvariance, WithoutCanonicalSomethingDiffers) {
  const Problem problem = find("topk_300").make();
  const Results first = run(problem, options("exact"));
  bool differs = false;
  for (std::uint64_t seed = 1; seed <= 5; ++seed) {
    differs = differs || !differences(first, run(shuffled(problem, seed), options("exact"))).empty();
  }
  EXPECT_TRUE(differs);
}

TEST_P(OrderInvariance, ExactMaxChangesNothingBeyondRounding) {
  const Problem problem = find("topk_300").make();
  const Results a = run(problem, options("exact+split"));
  const Results b = run(shuffled(problem, 3), options("exact+split"));
  EXPECT_LT(rel_l2(a.forward.out.tensor(), b.forward.out.tensor()), 5e-4);  // few elements round the other way
  EXPECT_LT(rel_l2(a.gradients.dkv_latent.tensor(), b.gradients.dkv_latent.tensor()), 1e-4);
}

/// Setup of the order test and of the residual test in docs/numerics.md, at fewer heads.
struct PeakedRun {
  Problem problem;
  std::vector<std::int32_t> own_key;

  PeakedRun(std::int64_t heads, double beta)
      : problem(make_peaked({.num_tokens = 512, .num_keys = 512, .topk = 256, .num_heads = heads, .seed = 7}, beta,
                            /*with_gradient=*/true)) {
    for (std::int32_t t = 0; t < 512; ++t) own_key.push_back(t);
  }
  [[nodiscard]] Problem ordered(SlotOrder order) const {
    Problem result = problem;
    result.indices = reorder_slots(problem.indices, 512, 256, own_key, order, WalkDirection::kLastToFirst, 1);
    return result;
  }
};

Tensor as_matrix(const std::vector<double>& values, std::int64_t width) {
  return Tensor::contiguous(values.data(), DataType::kFloat64,
                            {static_cast<std::int64_t>(values.size()) / width, width});
}

Tensor flat(const cases::OwnedTensor& tensor) {  // [T, H, D] as [T*H, D]
  const Tensor& t = tensor.tensor();
  return Tensor::contiguous(t.data, t.dtype, {t.shape[0] * t.shape[1], t.shape[2]});
}

struct OrderFigures {
  double gain_over_noise;   // of the two orders' difference
  double first_over_ideal;  // row gain of an order over that of the rounded reference
  double last_over_ideal;
  double spread;  // largest ratio of the gradient errors of the two orders, minus 1
};

OrderFigures measure_orders(const PeakedRun& setup, const Options& options) {
  const auto exact = reference::forward(setup.problem.inputs());
  const auto exact_gradient = reference::backward(setup.problem.inputs(), setup.problem.dout_tensor());
  const Tensor truth = as_matrix(exact.out, kLatentDim);
  const Results first = run(setup.ordered(SlotOrder::kDominantFirst), options);
  const Results last = run(setup.ordered(SlotOrder::kDominantLast), options);
  const Tensor out_first = flat(first.forward.out);
  const Tensor out_last = flat(last.forward.out);
  const RowGain difference = row_gain(out_first, out_last, truth);
  const double ideal = bf16_floors(truth).row_gain_rms;
  OrderFigures figures{difference.rms / difference.noise_floor, row_gain(out_first, truth, truth).rms / ideal,
                       row_gain(out_last, truth, truth).rms / ideal, 0};
  const auto compare = [&](const Tensor& a, const Tensor& b, const Tensor& reference) {
    const double one = rel_l2(a, reference);
    const double two = rel_l2(b, reference);
    figures.spread = std::max(figures.spread, std::max(one, two) / std::min(one, two) - 1.0);
  };
  compare(flat(first.gradients.dq_latent), flat(last.gradients.dq_latent),
          as_matrix(exact_gradient.dq_latent, kLatentDim));
  compare(flat(first.gradients.dq_rope), flat(last.gradients.dq_rope), as_matrix(exact_gradient.dq_rope, kRopeDim));
  compare(first.gradients.dkv_latent.tensor(), last.gradients.dkv_latent.tensor(),
          as_matrix(exact_gradient.dkv_latent, kLatentDim));
  compare(first.gradients.dk_rope.tensor(), last.gradients.dk_rope.tensor(),
          as_matrix(exact_gradient.dk_rope, kRopeDim));
  return figures;
}

TEST_P(OrderInvariance, OrderTestPassesExactAndFailsLazy) {
  for (const std::int64_t heads : {8, 5}) {
    const PeakedRun setup(heads, 0.25);
    const OrderFigures exact = measure_orders(setup, options("exact"));
    EXPECT_LT(exact.gain_over_noise, kMaxOrderGainOverNoiseFloor) << heads;
    EXPECT_LT(exact.first_over_ideal, kMaxRowGainOverIdeal) << heads;
    EXPECT_LT(exact.last_over_ideal, kMaxRowGainOverIdeal) << heads;
    EXPECT_LT(exact.spread, kMaxOrderGradientSpread) << heads;
    const OrderFigures lazy = measure_orders(setup, options("lazy"));
    EXPECT_GT(lazy.gain_over_noise, 5.0) << heads;
    EXPECT_GT(lazy.last_over_ideal, 5.0) << heads;
    EXPECT_LT(lazy.first_over_ideal, kMaxRowGainOverIdeal) << "the dominant key met first is never stale";
  }
}

struct GradientErrors {
  double dq_latent, dq_rope, dkv_latent, dk_rope;
};

GradientErrors gradient_errors(const PeakedRun& setup, const reference::BackwardResult& exact, const Options& options) {
  const Results results = run(setup.problem, options);
  return {rel_l2(flat(results.gradients.dq_latent), as_matrix(exact.dq_latent, kLatentDim)),
          rel_l2(flat(results.gradients.dq_rope), as_matrix(exact.dq_rope, kRopeDim)),
          rel_l2(results.gradients.dkv_latent.tensor(), as_matrix(exact.dkv_latent, kLatentDim)),
          rel_l2(results.gradients.dk_rope.tensor(), as_matrix(exact.dk_rope, kRopeDim))};
}

std::vector<double> decoded(const std::vector<BFloat16>& values) {
  std::vector<double> result(values.size());
  std::transform(values.begin(), values.end(), result.begin(), [](BFloat16 x) { return to_float(x); });
  return result;
}

double rounded(double x) { return to_float(to_bfloat16(static_cast<float>(x))); }

double dot(const double* a, const double* b, std::int64_t n) {
  double sum = 0;
  for (std::int64_t i = 0; i < n; ++i) sum += a[i] * b[i];
  return sum;
}

/// The ideal pipeline: everything in fp64, P and dS rounded once to bf16 before their products, dq rounded to bf16.
reference::BackwardResult ideal_gradients(const Problem& p) {
  reference::BackwardResult result;
  result.dq_latent.assign(p.q_latent.size(), 0.0);
  result.dq_rope.assign(p.q_rope.size(), 0.0);
  result.dkv_latent.assign(p.kv_latent.size(), 0.0);
  result.dk_rope.assign(p.k_rope.size(), 0.0);
  const auto q = decoded(p.q_latent), qr = decoded(p.q_rope), k = decoded(p.kv_latent), kr = decoded(p.k_rope);
  const auto dout = decoded(p.dout);
  const double scale = 1.0 / 24.0;
  const auto add = [](double* to, double weight, const double* from, std::int64_t n) {
    for (std::int64_t i = 0; i < n; ++i) to[i] += weight * from[i];
  };
  for (std::int64_t row = 0; row < p.num_tokens * p.num_heads; ++row) {
    const std::vector<std::int64_t> keys = cases::valid_keys(p, row / p.num_heads);
    std::vector<double> weight, dp;
    for (const std::int64_t key : keys) {
      weight.push_back(std::exp(scale * (dot(&q[row * kLatentDim], &k[key * kLatentDim], kLatentDim) +
                                         dot(&qr[row * kRopeDim], &kr[key * kRopeDim], kRopeDim))));
      dp.push_back(dot(&dout[row * kLatentDim], &k[key * kLatentDim], kLatentDim));
    }
    double sum = 0, dpsum = 0;
    for (const double w : weight) sum += w;
    for (std::size_t j = 0; j < keys.size(); ++j) dpsum += (weight[j] /= sum) * dp[j];
    for (std::size_t j = 0; j < keys.size(); ++j) {
      const double probability = rounded(weight[j]);
      const double ds = rounded(weight[j] * (dp[j] - dpsum) * scale);
      add(&result.dq_latent[row * kLatentDim], ds, &k[keys[j] * kLatentDim], kLatentDim);
      add(&result.dq_rope[row * kRopeDim], ds, &kr[keys[j] * kRopeDim], kRopeDim);
      add(&result.dkv_latent[keys[j] * kLatentDim], probability, &dout[row * kLatentDim], kLatentDim);
      add(&result.dkv_latent[keys[j] * kLatentDim], ds, &q[row * kLatentDim], kLatentDim);
      add(&result.dk_rope[keys[j] * kRopeDim], ds, &qr[row * kRopeDim], kRopeDim);
    }
  }
  for (auto* dq : {&result.dq_latent, &result.dq_rope}) std::transform(dq->begin(), dq->end(), dq->begin(), rounded);
  return result;
}

TEST_P(OrderInvariance, ResidualTestPassesWithAndFailsWithout) {
  for (const std::int64_t heads : {8, 5}) {
    const PeakedRun setup(heads, 0.4);
    const auto exact = reference::backward(setup.problem.inputs(), setup.problem.dout_tensor());
    const auto ideal = ideal_gradients(setup.problem);
    const GradientErrors with = gradient_errors(setup, exact, options("exact"));
    const GradientErrors without = gradient_errors(setup, exact, options("exact+no-residual"));
    const auto check = [&](double GradientErrors::*error, const std::vector<double>& perfect,
                           const std::vector<double>& truth, std::int64_t width) {
      const double best = rel_l2(as_matrix(perfect, width), as_matrix(truth, width));
      EXPECT_LT(with.*error, kMaxResidualOverNone * without.*error) << heads;
      EXPECT_LE(with.*error, kMaxResidualOverIdeal * best) << heads;
      EXPECT_GT(without.*error, kMaxResidualOverIdeal * best) << heads << ": without the residual the test must fail";
    };
    check(&GradientErrors::dq_latent, ideal.dq_latent, exact.dq_latent, kLatentDim);
    check(&GradientErrors::dq_rope, ideal.dq_rope, exact.dq_rope, kRopeDim);
    check(&GradientErrors::dkv_latent, ideal.dkv_latent, exact.dkv_latent, kLatentDim);
    check(&GradientErrors::dk_rope, ideal.dk_rope, exact.dk_rope, kRopeDim);
  }
}

INSTANTIATE_TEST_SUITE_P(Engines, OrderInvariance, testing::ValuesIn(cases::engines()),
                         [](const auto& test) { return std::string(cases::to_string(test.param)); });

}  // namespace
}  // namespace sparsemla
