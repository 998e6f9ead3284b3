// The reference against values worked out by hand, and against identities of the operation.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <numbers>

#include "reference/reference.h"
#include "tests/reference_test_support.h"

namespace sparsemla {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
constexpr std::int32_t kMinIndex = std::numeric_limits<std::int32_t>::min();
constexpr std::int32_t kMaxIndex = std::numeric_limits<std::int32_t>::max();
constexpr double kLn2 = std::numbers::ln2;

// ---------------------------------------------------------------------------------------------------------------------
// q = 0: each of the n valid slots weighs 1/n, out is the mean of the selected rows, lse = ln n, max_logits = 0,
// dkv_latent[i] = (times i is listed) * sum over heads of dout / n, dk_rope = 0.

TEST(ZeroQueries, HolesCountAsNothing) {
  ToyProblem p = ToyProblem::with_zero_queries(1, 4, 2, {0, 2, -1, 4, kMaxIndex, kMinIndex, -1, -1});
  const auto f = forward(p);
  for (const std::int64_t h : {0, 1}) {
    expect_near(part(f.out, h * 6, 6), weighted_rows(p.kv_latent, {.5, 0, .5, 0}), 1e-15);
    EXPECT_NEAR(f.lse[h], 0.693147180559945, 1e-15);
    EXPECT_EQ(f.max_logits[h], 0);
  }
  const auto b = backward(p);
  const std::vector<double> sum_of_dout = weighted_rows(p.dout, {1, 1});
  for (const std::int64_t key : {0, 1, 2, 3}) {
    const bool listed = key == 0 || key == 2;
    for (std::int64_t d = 0; d < 6; ++d) EXPECT_NEAR(b.dkv_latent[key * 6 + d], listed ? sum_of_dout[d] / 2 : 0, 1e-15);
    EXPECT_TRUE(listed || part(b.dkv_latent, key * 6, 6) == std::vector<double>(6, 0)) << "exactly 0";
  }
  EXPECT_EQ(b.dk_rope, std::vector<double>(8, 0));
}

TEST(ZeroQueries, LengthsAreClampedToTheList) {
  ToyProblem p = ToyProblem::with_zero_queries(4, 3, 1, {0, 1, 2, 0, 1, 2, 2, 1, 0, 0, 1, 2});
  p.topk_length = {-7, 0, 1, 12};
  const auto f = forward(p);
  const auto b = backward(p);
  for (const std::int64_t t : {0, 1}) {
    EXPECT_EQ(part(f.out, t * 6, 6), std::vector<double>(6, 0));
    EXPECT_EQ(f.lse[t], -kInfinity);
    EXPECT_EQ(f.max_logits[t], -kInfinity);
    EXPECT_EQ(part(b.dq_latent, t * 6, 6), std::vector<double>(6, 0));
    EXPECT_EQ(part(b.dq_rope, t * 2, 2), std::vector<double>(2, 0));
  }
  EXPECT_EQ(part(f.out, 12, 6), part(p.kv_latent, 12, 6));
  EXPECT_EQ(f.lse[2], 0);
  expect_near(part(f.out, 18, 6), weighted_rows(p.kv_latent, {1. / 3, 1. / 3, 1. / 3}), 1e-15);
  EXPECT_NEAR(f.lse[3], 1.09861228866811, 1e-14);
}

TEST(ZeroQueries, DuplicatesCountEachTime) {
  ToyProblem p = ToyProblem::with_zero_queries(1, 3, 1, {0, 0, 1});
  expect_near(forward(p).out, weighted_rows(p.kv_latent, {2. / 3, 1. / 3, 0}), 1e-15);
  const auto b = backward(p);
  for (std::int64_t d = 0; d < 6; ++d) {
    EXPECT_NEAR(b.dkv_latent[d], 2 * p.dout[d] / 3, 1e-15);
    EXPECT_NEAR(b.dkv_latent[6 + d], p.dout[d] / 3, 1e-15);
  }
}

TEST(ZeroQueries, EveryTokenUsesItsOwnList) {
  ToyProblem p = ToyProblem::with_zero_queries(2, 2, 32, {0, 1});
  const auto b = backward(p);
  const std::vector<double> ones(32, 1);
  expect_near(part(b.dkv_latent, 0, 6), weighted_rows(part(p.dout, 0, 192), ones), 1e-14);
  expect_near(part(b.dkv_latent, 6, 6), weighted_rows(part(p.dout, 192, 192), ones), 1e-14);
}

TEST(ZeroQueries, SinkTakesItsShare) {
  ToyProblem p = ToyProblem::with_zero_queries(2, 4, 1, {0, 1, 2, 3, 1, 2});
  p.sink = {0};
  const auto f = forward(p);
  expect_near(part(f.out, 0, 6), weighted_rows(p.kv_latent, {.25, .25, .25, 0}), 1e-15);
  EXPECT_NEAR(f.lse[0], std::log(3.0), 1e-15) << "lse is over the keys alone";
  double dout_dot_out = 0;
  for (std::size_t i = 0; i < f.out.size(); ++i) dout_dot_out += p.dout[i] * f.out[i];
  EXPECT_NEAR(backward(p).dsink[0], -dout_dot_out / 4, 1e-15);
}

TEST(ZeroQueries, IndexOfAnotherDocumentIsEmpty) {
  ToyProblem p = ToyProblem::with_zero_queries(2, 4, 1, {0, 2, -1, 0, -1, 1});
  p.cu_seqlens_q = {0, 1, 2};
  p.cu_seqlens_k = {0, 2, 4};
  const auto f = forward(p);
  EXPECT_EQ(part(f.out, 0, 6), part(p.kv_latent, 0, 6));
  expect_near(part(f.out, 6, 6), weighted_rows(p.kv_latent, {0, 0, .5, .5}), 1e-15);
  p.dout.assign(p.dout.size(), 0);
  p.dout[0] = 1;  // the first document's only
  EXPECT_EQ(part(backward(p).dkv_latent, 12, 12), std::vector<double>(12, 0));
}

TEST(ZeroQueries, CausalIsAlignedBottomRight) {
  ToyProblem p = ToyProblem::with_zero_queries(2, 4, 1, {0, 1, 2, 3, 0, 1, 2, 3});
  p.causal = true;
  const auto f = forward(p);
  EXPECT_NEAR(f.lse[0], std::log(3.0), 1e-15);
  EXPECT_NEAR(f.lse[1], std::log(4.0), 1e-15);
  p = ToyProblem::with_zero_queries(3, 1, 1, {0, 0, 0});  // more tokens than keys: the first see none
  p.causal = true;
  EXPECT_EQ(forward(p).lse, (std::vector<double>{-kInfinity, -kInfinity, 0}));
}

TEST(ZeroQueries, TokensPastTheLastDocumentAreEmpty) {
  ToyProblem p = ToyProblem::with_zero_queries(3, 2, 1, {0, 0, 0});
  p.cu_seqlens_q = {0, 0, 2};
  p.cu_seqlens_k = {0, 1, 2};
  const auto f = forward(p);
  EXPECT_EQ(f.lse, (std::vector<double>{0, 0, -kInfinity}));
  EXPECT_EQ(part(f.out, 0, 6), part(p.kv_latent, 6, 6));
}

// ---------------------------------------------------------------------------------------------------------------------
// Scores set by hand: q_rope = (1, 0), k_rope = (score, .), scale 1.

ToyProblem with_scores(const std::vector<double>& scores) {
  const auto n = static_cast<std::int64_t>(scores.size());
  std::vector<std::int32_t> list;
  for (std::int32_t i = 0; i < n; ++i) list.push_back(i);
  ToyProblem p = ToyProblem::with_zero_queries(1, n, 1, list);
  p.softmax_scale = 1;
  p.q_rope = {1, 0};
  for (std::int64_t i = 0; i < n; ++i) p.k_rope[2 * i] = scores[i];
  return p;
}

TEST(Scores, OnlyDifferencesMatter) {
  const ToyProblem high = with_scores({5000, 4999});
  const auto f = forward(high);
  expect_near(f.out, weighted_rows(high.kv_latent, {0.731058578630005, 0.268941421369995}), 1e-14);
  EXPECT_EQ(f.max_logits[0], 5000);
  EXPECT_NEAR(f.lse[0], 5000.31326168752, 1e-10);

  const ToyProblem low = with_scores({-30000, -30000, -30000, -30000});
  expect_near(forward(low).out, weighted_rows(low.kv_latent, {.25, .25, .25, .25}), 1e-14);
  for (const double gradient : backward(low).dq_latent) EXPECT_TRUE(std::isfinite(gradient));
}

TEST(Scores, DefaultScaleIsOneOverRootOfWidth) {
  ToyProblem p = with_scores({std::sqrt(8.0), 0});  // 6 latent + 2 rope columns
  p.softmax_scale.reset();
  EXPECT_NEAR(forward(p).max_logits[0], 1, 1e-15);
}

TEST(Scores, LseGradientIsAWeightedMeanOfKeys) {
  ToyProblem p = with_scores({1, 2, 0.5});
  p.sink = {1.5};
  p.dout.assign(p.dout.size(), 0);
  p.dlse = {1};
  const auto b = backward(p);
  const double sum = std::exp(1.0) + std::exp(2.0) + std::exp(0.5);
  const std::vector<double> weights = {std::exp(1.0) / sum, std::exp(2.0) / sum, std::exp(0.5) / sum};
  expect_near(b.dq_latent, weighted_rows(p.kv_latent, weights), 1e-15);
  for (std::size_t i = 0; i < 3; ++i) EXPECT_NEAR(b.dk_rope[2 * i], weights[i], 1e-15);  // scale * p * q_rope
  EXPECT_EQ(b.dsink[0], 0) << "lse does not hold the sink";
}

// ---------------------------------------------------------------------------------------------------------------------
// Sinks.

ToyProblem four_sinks() {
  ToyProblem p = ToyProblem::random(6, 9, 4, 5, 7, 3, 21);
  p.add_dlse(22);
  return p;
}

TEST(Sink, InfinitelyHighLeavesNothing) {
  ToyProblem p = four_sinks();
  const auto without = forward(p);
  for (const double sink : {kInfinity, 3.4e38}) {
    p.sink.assign(4, sink);
    const auto f = forward(p);
    EXPECT_EQ(f.out, std::vector<double>(f.out.size(), 0));
    EXPECT_TRUE(same_bits(f.lse, without.lse));
    const auto b = backward(p);
    EXPECT_EQ(b.dsink, std::vector<double>(4, 0));
    for (const double gradient : b.dq_latent) EXPECT_TRUE(std::isfinite(gradient));
  }
}

TEST(Sink, InfinitelyLowIsNoSink) {
  ToyProblem p = four_sinks();
  const auto f = forward(p);
  const auto b = backward(p);
  p.sink.assign(4, -kInfinity);
  expect_same_bits(forward(p), f);
  auto with = backward(p);
  EXPECT_EQ(with.dsink, std::vector<double>(4, 0));
  with.dsink.clear();
  expect_same_bits(with, b);
}

TEST(Sink, InfiniteOnesHaveNoGradientEvenFromNanKeys) {
  ToyProblem p = four_sinks();
  p.sink = {kInfinity, -kInfinity, 1, kInfinity};
  p.kv_latent[p.indices[0] * 7] = kNan;
  const auto dsink = backward(p).dsink;
  EXPECT_EQ((std::vector{dsink[0], dsink[1], dsink[3]}), std::vector<double>(3, 0));
  EXPECT_TRUE(std::isnan(dsink[2]));
}

TEST(Sink, ConcernsItsHeadOnly) {
  ToyProblem p = four_sinks();
  p.sink = {0.5, -0.5, 1, 2};
  const auto before = forward(p);
  p.sink[2] = 40;
  const auto after = forward(p);
  for (std::int64_t row = 0; row < 24; ++row)
    EXPECT_EQ(same_bits(part(before.out, row * 7, 7), part(after.out, row * 7, 7)), row % 4 != 2);
}

TEST(Sink, IsOneMoreKeyOfZeros) {
  ToyProblem p = ToyProblem::random(1, 4, 1, 3, 5, 2, 23);
  p.softmax_scale = 1;
  p.indices = {0, 1, 2};
  ToyProblem with_key = p;
  p.sink = {0.7};
  std::fill_n(with_key.kv_latent.begin() + 15, 5, 0);  // key 3 scores 0.7 by its rope part alone
  with_key.q_rope = p.q_rope = {1, 0};
  with_key.k_rope[6] = 0.7;
  with_key.indices = {0, 1, 2, 3};
  with_key.width = 4;
  expect_near(forward(p).out, forward(with_key).out, 1e-15);
  EXPECT_NEAR(backward(p).dsink[0], backward(with_key).dk_rope[6], 1e-15);
}

// ---------------------------------------------------------------------------------------------------------------------
// Identities on random inputs.

TEST(Identity, ConstantRowsGiveThatConstant) {
  ToyProblem p = ToyProblem::random(3, 100, 5, 90, 4, 6, 31);
  for (std::size_t i = 0; i < p.kv_latent.size(); ++i) p.kv_latent[i] = 0.25 * static_cast<double>(i % 4) - 1;
  const auto f = forward(p);
  for (std::size_t i = 0; i < f.out.size(); ++i) EXPECT_NEAR(f.out[i], 0.25 * static_cast<double>(i % 4) - 1, 1e-14);
}

TEST(Identity, OrderOfTheListDoesNotMatter) {
  ToyProblem p = ToyProblem::random(4, 100, 3, 80, 9, 4, 32);
  p.add_dlse(33);
  ToyProblem reversed = p;
  for (std::int64_t t = 0; t < 4; ++t)
    std::reverse(reversed.indices.begin() + t * 80, reversed.indices.begin() + (t + 1) * 80);
  expect_near(forward(p).out, forward(reversed).out, 1e-14);
  expect_near(forward(p).lse, forward(reversed).lse, 1e-14);
  expect_near(backward(p).dq_latent, backward(reversed).dq_latent, 1e-13);
  expect_near(backward(p).dkv_latent, backward(reversed).dkv_latent, 1e-13);
}

TEST(Identity, PartsOfAListMergeByLse) {
  const ToyProblem whole = ToyProblem::random(2, 50, 3, 20, 6, 2, 34);
  ToyProblem low = whole;
  ToyProblem high = whole;
  for (std::int64_t i = 0; i < 40; ++i) (i % 20 < 7 ? high : low).indices[i] = -1;
  const auto f = forward(whole);
  const auto a = forward(low);
  const auto b = forward(high);
  for (std::int64_t row = 0; row < 6; ++row) {
    EXPECT_NEAR(f.lse[row], std::log(std::exp(a.lse[row]) + std::exp(b.lse[row])), 1e-14);
    EXPECT_EQ(f.max_logits[row], std::max(a.max_logits[row], b.max_logits[row]));
    const double weight = std::exp(a.lse[row] - f.lse[row]);
    for (std::int64_t d = row * 6; d < row * 6 + 6; ++d)
      EXPECT_NEAR(f.out[d], weight * a.out[d] + (1 - weight) * b.out[d], 1e-14);
  }
}

TEST(Identity, ListingEveryKeyTwiceAddsLnTwo) {
  const ToyProblem once = ToyProblem::random(3, 40, 2, 70, 5, 3, 35);
  ToyProblem twice = once;
  twice.width = 140;
  twice.indices.clear();
  for (const std::int32_t key : once.indices) twice.indices.insert(twice.indices.end(), {key, key});
  const auto a = forward(once);
  const auto b = forward(twice);
  expect_near(a.out, b.out, 1e-14);
  for (std::size_t row = 0; row < a.lse.size(); ++row) EXPECT_NEAR(b.lse[row] - a.lse[row], kLn2, 1e-14);
  expect_near(backward(once).dkv_latent, backward(twice).dkv_latent, 1e-13);
  expect_near(backward(once).dq_rope, backward(twice).dq_rope, 1e-13);
}

}  // namespace
}  // namespace sparsemla
