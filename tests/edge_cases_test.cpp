// The contracts of sparsemla/attention.h at their edges, each beside a number worked out by hand or a bitwise twin.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "cases/conformance.h"
#include "sparsemla/numerics.h"

namespace sparsemla {
namespace {

using cases::differences;
using cases::find;
using cases::packed_bytes;
using cases::packed_values;
using cases::Results;
using cases::run;

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

class EdgeCases : public testing::TestWithParam<CpuEngine> {
 protected:
  [[nodiscard]] static Options options(const char* pipeline = "exact") {
    Options result;
    result.pipeline = parse_pipeline(pipeline);
    result.cpu_engine = GetParam();
    return result;
  }
  /// Values of one token: [H * width].
  static std::vector<double> token_values(const Tensor& tensor, std::int64_t token) {
    const std::vector<double> all = packed_values(tensor);
    const auto row = static_cast<std::int64_t>(all.size()) / tensor.shape[0];
    return {all.begin() + token * row, all.begin() + (token + 1) * row};
  }
  static std::vector<std::byte> token_bytes(const Tensor& tensor, std::int64_t token) {
    const std::vector<std::byte> all = packed_bytes(tensor);
    const auto row = static_cast<std::int64_t>(all.size()) / tensor.shape[0];
    return {all.begin() + token * row, all.begin() + (token + 1) * row};
  }
  /// out, lse, max_logits, out_residual, dq_latent, dq_rope of token `a` of x and token `b` of y, bit for bit.
  static void expect_same_token(const Results& x, std::int64_t a, const Results& y, std::int64_t b) {
    EXPECT_EQ(token_bytes(x.forward.out.tensor(), a), token_bytes(y.forward.out.tensor(), b));
    EXPECT_EQ(token_bytes(x.forward.lse.tensor(), a), token_bytes(y.forward.lse.tensor(), b));
    EXPECT_EQ(token_bytes(x.forward.max_logits.tensor(), a), token_bytes(y.forward.max_logits.tensor(), b));
    EXPECT_EQ(token_bytes(x.forward.out_residual.tensor(), a), token_bytes(y.forward.out_residual.tensor(), b));
    EXPECT_EQ(token_bytes(x.gradients.dq_latent.tensor(), a), token_bytes(y.gradients.dq_latent.tensor(), b));
    EXPECT_EQ(token_bytes(x.gradients.dq_rope.tensor(), a), token_bytes(y.gradients.dq_rope.tensor(), b));
  }
  /// The problem with only the tokens listed.
  static Problem tokens_of(const Problem& problem, const std::vector<std::int64_t>& tokens) {
    Problem result = problem;
    result.num_tokens = static_cast<std::int64_t>(tokens.size());
    const auto select = [&](auto& values) {
      const auto row = static_cast<std::int64_t>(values.size()) / problem.num_tokens;
      for (std::size_t i = 0; i < tokens.size(); ++i) {
        std::copy_n(values.begin() + tokens[i] * row, row, values.begin() + static_cast<std::int64_t>(i) * row);
      }
      values.resize(static_cast<std::size_t>(row) * tokens.size());
    };
    select(result.q_latent);
    select(result.q_rope);
    select(result.indices);
    select(result.dout);
    if (!result.topk_length.empty()) select(result.topk_length);
    if (!result.dlse.empty()) select(result.dlse);
    return result;
  }
};

TEST_P(EdgeCases, LseIsNaturalInEveryPipeline) {
  const Problem problem = find("lse_is_natural").make();
  for (const char* pipeline :
       {"exact", "lazy", "exact+key=1", "exact+first-to-last", "exact+split", "exact+canonical"}) {
    const Results results = run(problem, options(pipeline));
    const std::vector<double> lse = packed_values(results.forward.lse.tensor());
    EXPECT_NEAR(lse[0], 0.693147, 1e-6) << pipeline << ": ln 2, not the 1.0 of base 2";
    EXPECT_NEAR(lse[3], 1.098612, 1e-6) << pipeline;
    EXPECT_EQ(lse[6], 0.0) << pipeline;
  }
}

TEST_P(EdgeCases, PartialListsMergeByNaturalLse) {
  const Results results = run(find("partial_lists_2_and_8").make(), options());
  const std::vector<double> lse = packed_values(results.forward.lse.tensor());
  const double z0 = std::exp(lse[0]);
  const double z1 = std::exp(lse[2]);
  EXPECT_NEAR(z0 / (z0 + z1), 0.2, 1e-6);
  EXPECT_NEAR(std::exp2(lse[0]) / (std::exp2(lse[0]) + std::exp2(lse[2])), 0.277, 1e-3) << "what a base slip gives";
  const std::vector<double> part0 = token_values(results.forward.out.tensor(), 0);
  const std::vector<double> part1 = token_values(results.forward.out.tensor(), 1);
  const std::vector<double> whole = token_values(results.forward.out.tensor(), 2);
  for (std::size_t i = 0; i < whole.size(); ++i) {
    EXPECT_NEAR(0.2 * part0[i] + 0.8 * part1[i], whole[i], 0.01 * (std::abs(part0[i]) + std::abs(part1[i])));
  }
}

TEST_P(EdgeCases, EmptyRowIsZeroAndMinusInfinity) {
  const Results results = run(find("masked_row_in_loss").make(), options());
  for (const double x : token_values(results.forward.out.tensor(), 1)) EXPECT_EQ(x, 0.0);
  for (const double x : token_values(results.forward.out_residual.tensor(), 1)) EXPECT_EQ(x, 0.0);
  for (const double x : token_values(results.forward.lse.tensor(), 1)) EXPECT_EQ(x, -kInf);
  for (const double x : token_values(results.forward.max_logits.tensor(), 1)) EXPECT_EQ(x, -kInf);
  for (const double x : token_values(results.gradients.dq_latent.tensor(), 1)) EXPECT_EQ(x, 0.0);
  for (const double x : token_values(results.gradients.dq_rope.tensor(), 1)) EXPECT_EQ(x, 0.0);
}

TEST_P(EdgeCases, GarbageGradientsOfAnEmptyRowGoNowhere) {
  Problem problem = find("masked_row_in_loss").make();
  const Results clean = run(problem, options());
  std::fill_n(problem.dout.begin() + 3 * kLatentDim, 3 * kLatentDim, to_bfloat16(kNan));
  std::fill_n(problem.dlse.begin() + 3, 3, kInf);
  std::fill_n(problem.q_latent.begin() + 3 * kLatentDim, 3 * kLatentDim, to_bfloat16(kNan));
  EXPECT_EQ(differences(clean, run(problem, options())), "");
}

TEST_P(EdgeCases, RowsBesideAnEmptyRowAreAsWithoutIt) {
  const Problem problem = find("masked_row_between").make();
  const Results with = run(problem, options());
  const Results without = run(tokens_of(problem, {0, 2}), options());
  expect_same_token(with, 0, without, 0);
  expect_same_token(with, 2, without, 1);
  EXPECT_EQ(with.gradients.dkv_latent.bytes(), without.gradients.dkv_latent.bytes());
  EXPECT_EQ(with.gradients.dk_rope.bytes(), without.gradients.dk_rope.bytes());
}

TEST_P(EdgeCases, RowAfterLengthZeroIsAsIfAlone) {
  const Problem problem = find("length_zero").make();
  expect_same_token(run(problem, options()), 1, run(tokens_of(problem, {1}), options()), 0);
}

TEST_P(EdgeCases, LengthAndPaddingAreBitwiseTheSame) {
  for (const char* pipeline : {"exact", "lazy+key=7", "exact+canonical+first-to-last"}) {
    EXPECT_EQ(differences(run(find("prefix_padded").make(), options(pipeline)),
                          run(find("prefix_with_length").make(), options(pipeline))),
              "")
        << pipeline;
  }
}

TEST_P(EdgeCases, UnreferencedRowsChangeNothing) {
  EXPECT_EQ(
      differences(run(find("unreferenced_numbers").make(), options()), run(find("unreferenced_nan").make(), options())),
      "");
}

TEST_P(EdgeCases, NanInAKeyReachesExactlyTheRowsThatUseIt) {
  const Problem poisoned = find("nan_everywhere_in_key").make();  // key 3: tokens 0 and 2
  Problem clean = poisoned;
  std::fill_n(clean.kv_latent.begin() + 3 * kLatentDim, kLatentDim, to_bfloat16(0.5F));
  std::fill_n(clean.k_rope.begin() + 3 * kRopeDim, kRopeDim, to_bfloat16(0.5F));
  const Results a = run(clean, options());
  const Results b = run(poisoned, options());
  expect_same_token(a, 1, b, 1);
  expect_same_token(a, 3, b, 3);
  for (const std::int64_t token : {0, 2}) {
    for (const double x : token_values(b.forward.out.tensor(), token)) EXPECT_TRUE(std::isnan(x));
    for (const double x : token_values(b.forward.lse.tensor(), token)) EXPECT_TRUE(std::isnan(x));
    for (const double x : token_values(b.gradients.dq_latent.tensor(), token)) EXPECT_TRUE(std::isnan(x));
  }
  for (const std::int64_t key : {0, 6}) {  // of token 1 alone
    EXPECT_EQ(token_bytes(a.gradients.dkv_latent.tensor(), key), token_bytes(b.gradients.dkv_latent.tensor(), key));
  }
  for (const double x : token_values(b.gradients.dkv_latent.tensor(), 2)) EXPECT_EQ(x, 0.0);  // of nobody
}

TEST_P(EdgeCases, SinkOfMinusInfinityIsBitwiseNoSink) {
  Problem problem = find("heads_3").make();
  const Results without = run(problem, options());
  problem.sink = {-kInf, -kInf, -kInf};
  const Results with = run(problem, options());
  EXPECT_EQ(differences(without.forward, with.forward), "");
  EXPECT_EQ(differences(without.gradients, with.gradients), "dsink");  // given on one side only
  for (const double x : packed_values(with.gradients.dsink.tensor())) EXPECT_EQ(x, 0.0);
}

TEST_P(EdgeCases, SinkLeavesLseAloneAndInfinityMutesOut) {
  Problem problem = find("heads_3").make();
  const Results without = run(problem, options());
  problem.sink = {kInf, kInf, kInf};
  const Results with = run(problem, options());
  EXPECT_EQ(without.forward.lse.bytes(), with.forward.lse.bytes());
  EXPECT_EQ(without.forward.max_logits.bytes(), with.forward.max_logits.bytes());
  for (const double x : packed_values(with.forward.out.tensor())) EXPECT_EQ(x, 0.0);
  for (const double x : packed_values(with.gradients.dsink.tensor())) EXPECT_EQ(x, 0.0);
  for (const double x : packed_values(with.gradients.dkv_latent.tensor())) EXPECT_EQ(x, 0.0);
}

TEST_P(EdgeCases, LseInBaseTwoIsAClearMismatch) {
  const Problem problem = find("topk_100").make();
  const auto exact = reference::backward(problem.inputs(), problem.dout_tensor());
  const Results good = run(problem, options());
  const Tensor truth = Tensor::contiguous(exact.dkv_latent.data(), DataType::kFloat64, {problem.num_keys, kLatentDim});
  const Tensor lse = good.forward.lse.tensor();
  for (std::int64_t i = 0; i < lse.num_elements(); ++i) static_cast<float*>(lse.data)[i] *= 1.44269504F;
  const auto bad = cases::run_backward(problem.inputs(), good.forward, problem.dout_tensor(), {}, options());
  EXPECT_LT(rel_l2(good.gradients.dkv_latent.tensor(), truth), 0.005);
  EXPECT_GT(rel_l2(bad.dkv_latent.tensor(), truth), 0.5);
}

TEST_P(EdgeCases, ScoresAtMinus200AreAsGoodAsAtZero) {
  const auto errors = [&](const char* name) {
    const Problem problem = find(name).make();
    const auto exact = reference::backward(problem.inputs(), problem.dout_tensor());
    const Results results = run(problem, options());
    const std::int64_t rows = problem.num_tokens * problem.num_heads;
    const auto dq = packed_values(results.gradients.dq_latent.tensor());
    return std::pair(
        rel_l2(Tensor::contiguous(dq.data(), DataType::kFloat64, {rows, kLatentDim}),
               Tensor::contiguous(exact.dq_latent.data(), DataType::kFloat64, {rows, kLatentDim})),
        rel_l2(results.gradients.dkv_latent.tensor(),
               Tensor::contiguous(exact.dkv_latent.data(), DataType::kFloat64, {problem.num_keys, kLatentDim})));
  };
  const auto [dq_zero, dkv_zero] = errors("scores_around_0");
  const auto [dq_deep, dkv_deep] = errors("scores_around_minus_200");
  EXPECT_LT(dq_deep, 1.25 * dq_zero);
  EXPECT_LT(dkv_deep, 1.25 * dkv_zero);
}

TEST_P(EdgeCases, ScoresAtMinus30000StayWithinTheSpacingOfLse) {
  const Problem problem = find("scores_minus_30000").make();
  const Results results = run(problem, options());
  const std::vector<double> lse = packed_values(results.forward.lse.tensor());
  // fp32 numbers near 3e4 are 2^-9 apart, so P = exp(s - lse) is off by up to 2^-10, and by as much again where
  // scale * score * log2(e) and lse * log2(e) are rounded: 0.4 % together with P's own rounding.
  EXPECT_NEAR(lse[0], -30000.0 + std::log(4.0), 0x1p-9);
  for (std::int64_t d = 0; d < kLatentDim; ++d) {
    double sum = 0;
    for (std::int64_t h = 0; h < 2; ++h) sum += to_float(problem.dout[h * kLatentDim + d]);
    double size = 0;
    for (std::int64_t h = 0; h < 2; ++h) size += std::abs(to_float(problem.dout[h * kLatentDim + d]));
    for (std::int64_t key = 0; key < 4; ++key) {
      EXPECT_NEAR(static_cast<float*>(results.gradients.dkv_latent.tensor().data)[key * kLatentDim + d], sum / 4,
                  0.004 * size / 4);
    }
  }
}

TEST_P(EdgeCases, ResidualHoldsWhatRoundingTook) {
  const Problem problem = find("heads_16").make();
  const auto exact = reference::forward(problem.inputs());
  const std::int64_t rows = problem.num_tokens * problem.num_heads;
  const Tensor truth = Tensor::contiguous(exact.out.data(), DataType::kFloat64, {rows, kLatentDim});
  const auto errors = [&](const char* pipeline) {
    const Results results = run(problem, options(pipeline));
    const std::vector<double> out = packed_values(results.forward.out.tensor());
    std::vector<double> sum = packed_values(results.forward.out_residual.tensor());
    std::transform(sum.begin(), sum.end(), out.begin(), sum.begin(), std::plus<>());
    return std::pair(rel_l2(Tensor::contiguous(out.data(), DataType::kFloat64, {rows, kLatentDim}), truth),
                     rel_l2(Tensor::contiguous(sum.data(), DataType::kFloat64, {rows, kLatentDim}), truth));
  };
  // Split operands leave the output's rounding as the one large error; with P in bf16, P's rounding stays in both.
  const auto [out_split, sum_split] = errors("exact+split");
  EXPECT_GT(out_split, 50.0 * sum_split);
  const auto [out_bf16, sum_bf16] = errors("exact");
  EXPECT_GT(out_bf16, 1.3 * sum_bf16);
}

TEST_P(EdgeCases, EveryKeyTwiceAddsLnTwo) {
  Problem once = find("topk_100").make();
  Problem twice = once;
  twice.topk = 200;
  twice.indices.clear();
  for (std::int64_t t = 0; t < once.num_tokens; ++t) {
    for (int copy = 0; copy < 2; ++copy) {
      twice.indices.insert(twice.indices.end(), once.indices.begin() + t * 100, once.indices.begin() + (t + 1) * 100);
    }
  }
  const Results a = run(once, options("exact+split"));
  const Results b = run(twice, options("exact+split"));
  const std::vector<double> lse_once = packed_values(a.forward.lse.tensor());
  const std::vector<double> lse_twice = packed_values(b.forward.lse.tensor());
  for (std::size_t i = 0; i < lse_once.size(); ++i) EXPECT_NEAR(lse_twice[i], lse_once[i] + std::log(2.0), 2e-6);
  EXPECT_LT(rel_l2(b.forward.out.tensor(), a.forward.out.tensor()), 5e-4);  // a few elements round the other way
  EXPECT_LT(rel_l2(b.gradients.dkv_latent.tensor(), a.gradients.dkv_latent.tensor()), 1e-4);
}

TEST_P(EdgeCases, PackedDocumentsAreAsSeparateRuns) {
  const Problem packed = find("packed_equals_batched").make();
  const Results whole = run(packed, options());
  for (std::int64_t document = 0; document < 3; ++document) {
    Problem alone = tokens_of(packed, {document * 4, document * 4 + 1, document * 4 + 2, document * 4 + 3});
    alone.cu_seqlens_q.clear();
    alone.cu_seqlens_k.clear();
    alone.num_keys = 20;
    const auto cut = [&](auto& values, std::int64_t width) {
      values = {values.begin() + document * 20 * width, values.begin() + (document + 1) * 20 * width};
    };
    cut(alone.kv_latent, kLatentDim);
    cut(alone.k_rope, kRopeDim);
    const Results part = run(alone, options());
    for (std::int64_t t = 0; t < 4; ++t) expect_same_token(whole, document * 4 + t, part, t);
    for (std::int64_t key = 0; key < 20; ++key) {
      EXPECT_EQ(token_bytes(whole.gradients.dkv_latent.tensor(), document * 20 + key),
                token_bytes(part.gradients.dkv_latent.tensor(), key));
      EXPECT_EQ(token_bytes(whole.gradients.dk_rope.tensor(), document * 20 + key),
                token_bytes(part.gradients.dk_rope.tensor(), key));
    }
  }
}

TEST_P(EdgeCases, HeadsDoNotSeeEachOther) {
  for (const char* name : {"heads_3", "heads_24", "heads_63", "heads_65"}) {
    const Problem problem = find(name).make();
    const Results clean = run(problem, options());
    Problem poisoned = problem;
    const std::int64_t heads = problem.num_heads;
    for (std::int64_t row = 0; row < 3 * heads; ++row) {  // all heads but head 1
      if (row % heads == 1) continue;
      std::fill_n(poisoned.q_latent.begin() + row * kLatentDim, kLatentDim, to_bfloat16(kNan));
      std::fill_n(poisoned.dout.begin() + row * kLatentDim, kLatentDim, to_bfloat16(kNan));
    }
    const Results other = run(poisoned, options());
    const auto row_of = [&](const Tensor& tensor, std::int64_t token) {
      const std::vector<std::byte> all = token_bytes(tensor, token);
      const auto row = static_cast<std::int64_t>(all.size()) / heads;
      return std::vector<std::byte>(all.begin() + row, all.begin() + 2 * row);
    };
    for (std::int64_t t = 0; t < 3; ++t) {
      EXPECT_EQ(row_of(clean.forward.out.tensor(), t), row_of(other.forward.out.tensor(), t)) << name;
      EXPECT_EQ(row_of(clean.forward.lse.tensor(), t), row_of(other.forward.lse.tensor(), t)) << name;
      EXPECT_EQ(row_of(clean.gradients.dq_latent.tensor(), t), row_of(other.gradients.dq_latent.tensor(), t)) << name;
    }
  }
}

TEST_P(EdgeCases, SixteenHeadsAreAsPaddedToSixtyFour) {
  const Problem native = find("heads_16").make();
  Problem padded = native;
  padded.num_heads = 64;
  const auto pad = [&](std::vector<BFloat16>& values, std::int64_t width) {
    std::vector<BFloat16> wide(static_cast<std::size_t>(native.num_tokens * 64 * width));
    for (std::int64_t t = 0; t < native.num_tokens; ++t) {
      std::copy_n(values.begin() + t * 16 * width, 16 * width, wide.begin() + t * 64 * width);
    }
    values = std::move(wide);
  };
  pad(padded.q_latent, kLatentDim);
  pad(padded.q_rope, kRopeDim);
  pad(padded.dout, kLatentDim);
  const Results a = run(native, options("exact+split"));
  const Results b = run(padded, options("exact+split"));
  const auto first_heads = [](const Tensor& tensor) {
    Tensor view = tensor;
    view.shape[1] = 16;
    return view;
  };
  EXPECT_LT(rel_l2(first_heads(b.forward.out.tensor()), a.forward.out.tensor()), 2e-4);
  EXPECT_LT(max_abs_difference(first_heads(b.forward.lse.tensor()), a.forward.lse.tensor()), 4e-6);
  EXPECT_LT(rel_l2(first_heads(b.gradients.dq_latent.tensor()), a.gradients.dq_latent.tensor()), 5e-4);
  EXPECT_LT(rel_l2(b.gradients.dkv_latent.tensor(), a.gradients.dkv_latent.tensor()), 1e-5);
  EXPECT_LT(rel_l2(b.gradients.dk_rope.tensor(), a.gradients.dk_rope.tensor()), 1e-4);
}

TEST_P(EdgeCases, InferenceIsBitwiseTrainingWherePlanSaysSo) {
  const Problem problem = find("topk_300").make();
  Options training;
  training.cpu_engine = GetParam();
  Options inference = training;
  inference.purpose = Purpose::kInference;
  const auto a = cases::run_forward(problem.inputs(), training);
  const auto b = cases::run_forward(problem.inputs(), inference);
  const Plan chosen = plan(cases::forward_arguments(problem.inputs(), b), inference);
  EXPECT_EQ(a.out.bytes() == b.out.bytes(), chosen.training_matches_inference);
}

INSTANTIATE_TEST_SUITE_P(Engines, EdgeCases, testing::ValuesIn(cases::engines()),
                         [](const auto& test) { return std::string(cases::to_string(test.param)); });

}  // namespace
}  // namespace sparsemla
