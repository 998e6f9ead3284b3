// The seeded generators: what is drawn, that it depends on the seed alone, and what the lists look like.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <set>

#include "numerics/problem.h"
#include "sparsemla/error.h"

namespace sparsemla {
namespace {

std::vector<double> to_doubles(const std::vector<BFloat16>& values) {
  std::vector<double> result;
  result.reserve(values.size());
  for (const BFloat16 value : values) result.push_back(to_float(value));
  return result;
}

bool same(const Problem& a, const Problem& b) {
  return a.q_latent == b.q_latent && a.q_rope == b.q_rope && a.kv_latent == b.kv_latent && a.k_rope == b.k_rope &&
         a.dout == b.dout && a.indices == b.indices;
}

/// The list of one token.
std::vector<std::int32_t> list(const std::vector<std::int32_t>& indices, std::int64_t topk, std::int64_t token) {
  return {indices.begin() + token * topk, indices.begin() + (token + 1) * topk};
}

/// The entries before the first -1; all after it must be -1.
std::vector<std::int32_t> valid_prefix(const std::vector<std::int32_t>& slots) {
  const auto end = std::find(slots.begin(), slots.end(), -1);
  EXPECT_TRUE(std::all_of(end, slots.end(), [](std::int32_t key) { return key == -1; }));
  return {slots.begin(), end};
}

bool distinct(const std::vector<std::int32_t>& keys) {
  return std::set<std::int32_t>(keys.begin(), keys.end()).size() == keys.size();
}

TEST(Draws, DependOnTheSeedAlone) {
  const ProblemShape shape{.num_tokens = 40, .num_keys = 60, .topk = 16, .num_heads = 5, .seed = 7};
  const Problem first = make_peaked(shape, 0.3, true, 1);
  for (const int threads : {1, 2, 5, 0}) EXPECT_TRUE(same(make_peaked(shape, 0.3, true, threads), first));
  ProblemShape other = shape;
  other.seed = 8;
  const Problem second = make_peaked(other, 0.3, true);
  EXPECT_NE(second.q_latent, first.q_latent);
  EXPECT_NE(second.k_rope, first.k_rope);
  EXPECT_NE(second.dout, first.dout);
  EXPECT_NE(second.indices, first.indices);
}

TEST(Draws, AreWhatTheirDefinitionSays) {
  // From a separate program in double precision: splitmix64 of (seed, tensor, row, draw), Box-Muller, one rounding.
  const Problem p = make_iid({.num_tokens = 2, .num_keys = 4, .topk = 0, .num_heads = 4, .seed = 1}, false);
  const auto q = [&](std::int64_t i) { return int{p.q_latent[5 * 512 + i].bits}; };
  EXPECT_EQ((std::vector{q(0), q(1), q(2), q(256), q(257), q(511)}),
            (std::vector{0xbf83, 0x3f8f, 0x3f52, 0xbfa6, 0x4014, 0x3fcb}));
  const auto kv = [&](std::int64_t i) { return int{p.kv_latent[3 * 512 + i].bits}; };
  EXPECT_EQ((std::vector{kv(0), kv(1), kv(2), kv(256), kv(257), kv(511)}),
            (std::vector{0x3f76, 0x3ea0, 0xbb11, 0x3f6a, 0x400a, 0x3f8a}));
  const Problem seven = make_iid({.num_tokens = 1, .num_keys = 3, .topk = 0, .num_heads = 1, .seed = 7}, false);
  const auto k = [&](std::int64_t i) { return int{seven.k_rope[2 * 64 + i].bits}; };
  EXPECT_EQ((std::vector{k(0), k(31), k(32), k(63)}), (std::vector{0xbf5d, 0x3f47, 0x3f74, 0x3d3a}));
  const Problem peaked = make_peaked({.num_tokens = 10, .num_keys = 10, .topk = 6, .num_heads = 1}, 0, false);
  EXPECT_EQ(list(peaked.indices, 6, 9), (std::vector<std::int32_t>{9, 0, 1, 6, 5, 7}));
  EXPECT_EQ(list(peaked.indices, 6, 2), (std::vector<std::int32_t>{2, 1, 0, -1, -1, -1}));
  const Problem iid = make_iid({.num_tokens = 1, .num_keys = 100, .topk = 6, .num_heads = 1, .seed = 3}, false);
  EXPECT_EQ(iid.indices, (std::vector<std::int32_t>{35, 81, 95, 3, 96, 79}));
}

TEST(Draws, AreStandardNormal) {
  const Problem p = make_iid({.num_tokens = 64, .num_keys = 64, .topk = 1, .num_heads = 128}, true);
  for (const auto* const tensor : {&p.q_latent, &p.q_rope, &p.dout}) {
    const std::vector<double> x = to_doubles(*tensor);
    const auto n = static_cast<double>(x.size());
    double moments[5] = {};
    double largest = 0;
    for (const double v : x) {
      for (int i = 1; i <= 4; ++i) moments[i] += std::pow(v, i) / n;
      largest = std::max(largest, std::abs(v));
    }
    // Five standard deviations of each sample moment, and what bf16 rounding adds (2^-18 of the variance or less).
    const double sigma = 5 / std::sqrt(n);
    EXPECT_NEAR(moments[1], 0, sigma);
    EXPECT_NEAR(moments[2], 1, sigma * std::sqrt(2.0) + 1e-5);
    EXPECT_NEAR(moments[3], 0, sigma * std::sqrt(15.0));
    EXPECT_NEAR(moments[4], 3, sigma * std::sqrt(96.0) + 1e-4);
    EXPECT_LT(largest, 6.7);
    EXPECT_GT(largest, 4.5);
    // Distribution function at values that are bf16: half of those rounded there lie below.
    for (double at = -4; at <= 4; at += 0.5) {
      double below = 0;
      for (const double v : x) below += v < at ? 1 : v == at ? 0.5 : 0;
      EXPECT_NEAR(below / n, 0.5 * std::erfc(-at / std::sqrt(2.0)), 5 * std::sqrt(0.25 / n) + 1e-4) << at;
    }
  }
}

double correlation(const std::vector<double>& a, const std::vector<double>& b) {
  double sum = 0;
  for (std::size_t i = 0; i < a.size(); ++i) sum += a[i] * b[i];
  return sum / static_cast<double>(a.size());
}

TEST(Draws, AreIndependent) {
  const Problem p = make_iid({.num_tokens = 32, .num_keys = 4096, .topk = 1, .num_heads = 128}, true);
  const std::vector<double> q = to_doubles(p.q_latent);
  const std::vector<double> kv = to_doubles(p.kv_latent);
  const std::vector<double> dout = to_doubles(p.dout);
  ASSERT_EQ(q.size(), kv.size());
  const double sigma = 5 / std::sqrt(static_cast<double>(q.size()));
  EXPECT_NEAR(correlation(q, kv), 0, sigma);
  EXPECT_NEAR(correlation(q, dout), 0, sigma);
  // Of neighbours, of the two halves that one Box-Muller pair fills, of the next row and of the next token.
  for (const std::ptrdiff_t lag : {1, 2, 16, 256, 512, 128 * 512}) {
    std::vector<double> shifted(q.begin() + lag, q.end());
    const std::vector<double> head(q.begin(), q.end() - lag);
    EXPECT_NEAR(correlation(head, shifted), 0, sigma * 1.1) << lag;
    for (double& v : shifted) v = v * v - 1;  // nor of squares
    std::vector<double> squares = head;
    for (double& v : squares) v = v * v - 1;
    EXPECT_NEAR(correlation(squares, shifted), 0, sigma * 2.2) << lag;
  }
}

TEST(Prefix, SmallerProblemsAreTheFirstRowsOfLargerOnes) {
  const Problem large = make_iid({.num_tokens = 20, .num_keys = 30, .topk = 12, .num_heads = 6}, true);
  const Problem small = make_iid({.num_tokens = 8, .num_keys = 30, .topk = 5, .num_heads = 2}, true);
  const Problem few_keys = make_iid({.num_tokens = 8, .num_keys = 11, .topk = 5, .num_heads = 2}, true);
  for (std::int64_t t = 0; t < 8; ++t) {
    const auto of_large = list(large.indices, 12, t);
    EXPECT_EQ(list(small.indices, 5, t), std::vector<std::int32_t>(of_large.begin(), of_large.begin() + 5));
    for (std::int64_t h = 0; h < 2; ++h)
      for (const auto tensor : {&Problem::q_latent, &Problem::dout})
        EXPECT_TRUE(std::equal((small.*tensor).begin() + (t * 2 + h) * 512,
                               (small.*tensor).begin() + (t * 2 + h + 1) * 512,
                               (large.*tensor).begin() + (t * 6 + h) * 512));
  }
  EXPECT_EQ(small.kv_latent, large.kv_latent);
  EXPECT_TRUE(std::equal(few_keys.kv_latent.begin(), few_keys.kv_latent.end(), large.kv_latent.begin()));
  EXPECT_EQ(few_keys.q_rope, small.q_rope);

  const Problem peaked = make_peaked({.num_tokens = 30, .num_keys = 30, .topk = 12, .num_heads = 6}, 0.5, true);
  const Problem first = make_peaked({.num_tokens = 20, .num_keys = 20, .topk = 12, .num_heads = 6}, 0.5, true);
  EXPECT_TRUE(std::equal(first.q_latent.begin(), first.q_latent.end(), peaked.q_latent.begin()));
  EXPECT_TRUE(std::equal(first.indices.begin(), first.indices.end(), peaked.indices.begin()));
}

// ---------------------------------------------------------------------------------------------------------------------

TEST(Iid, ListsAreDistinctAndUniform) {
  constexpr std::int64_t kTokens = 2000;
  const Problem p = make_iid({.num_tokens = kTokens, .num_keys = 50, .topk = 10, .num_heads = 1, .rope_dim = 0}, false);
  std::vector<int> first(50);
  std::vector<int> any(50);
  for (std::int64_t t = 0; t < kTokens; ++t) {
    const auto keys = valid_prefix(list(p.indices, 10, t));
    ASSERT_EQ(keys.size(), 10);
    ASSERT_TRUE(distinct(keys));
    for (const std::int32_t key : keys) ASSERT_TRUE(key >= 0 && key < 50);
    ++first[keys[0]];
    for (const std::int32_t key : keys) ++any[key];
  }
  // Binomial: 40 +- 6.3 and 400 +- 18; five standard deviations.
  for (const int count : first) EXPECT_NEAR(count, 40, 32);
  for (const int count : any) EXPECT_NEAR(count, 400, 90);
}

TEST(Iid, ListsLongerThanTheKeysEndInHoles) {
  const Problem p = make_iid({.num_tokens = 5, .num_keys = 7, .topk = 10, .num_heads = 1}, false);
  for (std::int64_t t = 0; t < 5; ++t) {
    auto keys = valid_prefix(list(p.indices, 10, t));
    std::sort(keys.begin(), keys.end());
    EXPECT_EQ(keys, (std::vector<std::int32_t>{0, 1, 2, 3, 4, 5, 6}));
  }
}

TEST(Peaked, OwnKeyThenDistinctEarlierKeysThenHoles) {
  for (const std::int64_t keys : {100, 103}) {
    const Problem p = make_peaked({.num_tokens = 100, .num_keys = keys, .topk = 32, .num_heads = 1}, 0.25, false);
    for (std::int64_t t = 0; t < 100; ++t) {
      const std::int64_t own = t + keys - 100;
      const auto valid = valid_prefix(list(p.indices, 32, t));
      ASSERT_EQ(static_cast<std::int64_t>(valid.size()), std::min<std::int64_t>(32, own + 1)) << "all that fit";
      EXPECT_EQ(valid[0], own);
      EXPECT_TRUE(distinct(valid));
      for (std::size_t j = 1; j < valid.size(); ++j) EXPECT_TRUE(valid[j] >= 0 && valid[j] < own);
    }
  }
}

TEST(Peaked, QueriesHoldBetaTimesTheirOwnKey) {
  constexpr double kBeta = 0.4;
  const ProblemShape shape{.num_tokens = 20, .num_keys = 33, .topk = 8, .num_heads = 3};
  const Problem base = make_iid(shape, true);
  const Problem p = make_peaked(shape, kBeta, true);
  EXPECT_EQ(p.kv_latent, base.kv_latent);
  EXPECT_EQ(p.dout, base.dout);
  const auto check = [&](const std::vector<BFloat16>& q, const std::vector<BFloat16>& iid,
                         const std::vector<BFloat16>& k, std::int64_t width) {
    int differs_from_two_roundings = 0;
    for (std::int64_t row = 0; row < 60; ++row)
      for (std::int64_t d = 0; d < width; ++d) {
        const double own = to_float(k[(row / 3 + 13) * width + d]);
        const double normal = to_float(iid[row * width + d]);
        const double got = to_float(q[row * width + d]);
        // `normal` was rounded once for iid, the sum once for peaked: at most 2^-8 of each.
        EXPECT_NEAR(got, normal + kBeta * own, (std::abs(normal) + std::abs(got)) * 0x1p-8 + 1e-6);
        const auto rounded_twice = to_bfloat16(static_cast<float>(normal) + static_cast<float>(kBeta * own));
        differs_from_two_roundings += q[row * width + d] == rounded_twice ? 0 : 1;
      }
    EXPECT_GT(differs_from_two_roundings, 60 * width / 20);
  };
  check(p.q_latent, base.q_latent, p.kv_latent, 512);
  check(p.q_rope, base.q_rope, p.k_rope, 64);
  EXPECT_EQ(make_peaked(shape, 0, true).q_latent, base.q_latent);
}

TEST(Peaked, ManyKeys) {
  constexpr std::int64_t kKeys = 131072;
  const Problem p =
      make_peaked({.num_tokens = 300, .num_keys = kKeys, .topk = 2048, .num_heads = 1, .rope_dim = 0}, 0.25, false);
  EXPECT_TRUE(p.q_rope.empty() && p.k_rope.empty() && p.dout.empty());
  for (const std::int64_t t : {0, 150, 299}) {
    const auto valid = valid_prefix(list(p.indices, 2048, t));
    EXPECT_EQ(valid.size(), 2048);
    EXPECT_EQ(valid[0], t + kKeys - 300);
    EXPECT_TRUE(distinct(valid));
    const double mean = std::accumulate(valid.begin() + 1, valid.end(), 0.0) / 2047;
    EXPECT_NEAR(mean, kKeys / 2.0, 5 * kKeys / std::sqrt(12.0 * 2047));
  }
}

TEST(ProblemViews, OptionalTensorsAreUndefinedUntilFilled) {
  Problem p = make_iid({.num_tokens = 3, .num_keys = 4, .topk = 2, .num_heads = 2, .rope_dim = 0}, false);
  AttentionInputs inputs = p.inputs();
  EXPECT_EQ(inputs.q_latent.shape[2], 512);
  for (const Tensor& tensor : {inputs.q_rope, inputs.k_rope, inputs.topk_length, inputs.sink, inputs.cu_seqlens_q,
                               inputs.cu_seqlens_k, p.dout_tensor(), p.dlse_tensor()})
    EXPECT_FALSE(tensor.defined());
  p.sink = {1, 2};
  p.topk_length = {1, 2, 2};
  p.cu_seqlens_q = p.cu_seqlens_k = {0, 2, 3};
  p.dlse.assign(6, 0);
  p.causal = true;
  p.softmax_scale = 0.5;
  inputs = p.inputs();
  EXPECT_EQ(inputs.sink.data, p.sink.data());
  EXPECT_EQ(inputs.topk_length.shape[0], 3);
  EXPECT_EQ(inputs.cu_seqlens_k.shape[0], 3);
  EXPECT_EQ(p.dlse_tensor().shape[1], 2);
  EXPECT_TRUE(inputs.causal);
  EXPECT_EQ(inputs.softmax_scale, 0.5);
}

TEST(GeneratorErrors, NameTheArgument) {
  const auto blamed = [](const ProblemShape& shape) -> std::string {
    try {
      static_cast<void>(make_peaked(shape, 0.25, false));
    } catch (const Error& error) {
      return error.argument();
    }
    return "";
  };
  EXPECT_EQ(blamed({.num_tokens = 4, .num_keys = 4, .topk = 2, .num_heads = 1}), "");
  EXPECT_EQ(blamed({.num_tokens = 4, .num_keys = 3, .topk = 2, .num_heads = 1}), "num_keys");
  EXPECT_EQ(blamed({.num_tokens = -1, .num_keys = 3, .topk = 2, .num_heads = 1}), "num_tokens");
  EXPECT_EQ(blamed({.num_tokens = 1, .num_keys = 3, .topk = -2, .num_heads = 1}), "topk");
  EXPECT_EQ(blamed({.num_tokens = 1, .num_keys = 3, .topk = 2, .num_heads = 257}), "num_heads");
  EXPECT_EQ(blamed({.num_tokens = 1, .num_keys = 3, .topk = 2, .num_heads = 1, .rope_dim = 32}), "rope_dim");
}

// ---------------------------------------------------------------------------------------------------------------------

constexpr auto kBackward = WalkDirection::kLastToFirst;
constexpr auto kForward = WalkDirection::kFirstToLast;

TEST(ReorderSlots, PutsTheDominantKeyWhereTheWalkMeetsIt) {
  const std::vector<std::int32_t> indices = {5, 9, -1, 2, 7, -3, 4, 4, 1, -1, -1, -1};
  const std::vector<std::int32_t> dominant = {2, 4};
  const auto reordered = [&](SlotOrder order, WalkDirection walk) {
    return reorder_slots(indices, 2, 6, dominant, order, walk, 1);
  };
  const std::vector<std::int32_t> in_front = {2, 5, 9, 7, -1, -1, 4, 4, 1, -1, -1, -1};
  const std::vector<std::int32_t> at_the_back = {5, 9, 7, 2, -1, -1, 4, 1, 4, -1, -1, -1};
  EXPECT_EQ(reordered(SlotOrder::kDominantLast, kBackward), in_front);
  EXPECT_EQ(reordered(SlotOrder::kDominantFirst, kForward), in_front);
  EXPECT_EQ(reordered(SlotOrder::kDominantFirst, kBackward), at_the_back);
  EXPECT_EQ(reordered(SlotOrder::kDominantLast, kForward), at_the_back);
  EXPECT_EQ(reordered(SlotOrder::kAscending, kBackward),
            (std::vector<std::int32_t>{2, 5, 7, 9, -1, -1, 1, 4, 4, -1, -1, -1}));
}

TEST(ReorderSlots, LeavesRowsWithoutADominantKeyInOrder) {
  const std::vector<std::int32_t> indices = {-1, 3, 1, 8, 6, 7};
  EXPECT_EQ(reorder_slots(indices, 2, 3, {-1, 2}, SlotOrder::kDominantLast, kBackward, 1),
            (std::vector<std::int32_t>{3, 1, -1, 8, 6, 7}));
}

TEST(ReorderSlots, ShufflesBySeed) {
  const Problem p = make_peaked({.num_tokens = 60, .num_keys = 60, .topk = 40, .num_heads = 1}, 0, false);
  const auto a = reorder_slots(p.indices, 60, 40, {}, SlotOrder::kRandom, kBackward, 1);
  EXPECT_EQ(a, reorder_slots(p.indices, 60, 40, {}, SlotOrder::kRandom, kForward, 1));
  const auto b = reorder_slots(p.indices, 60, 40, {}, SlotOrder::kRandom, kBackward, 2);
  EXPECT_NE(a, b);
  EXPECT_NE(a, p.indices);
  EXPECT_EQ(reorder_slots(a, 60, 40, {}, SlotOrder::kAscending, kBackward, 1),
            reorder_slots(p.indices, 60, 40, {}, SlotOrder::kAscending, kBackward, 1));
  int own_key_stays = 0;
  for (std::int64_t t = 0; t < 60; ++t) own_key_stays += list(a, 40, t)[0] == t ? 1 : 0;
  EXPECT_LT(own_key_stays, 15);
}

TEST(ReorderSlots, NamesAndErrors) {
  for (const auto order :
       {SlotOrder::kDominantFirst, SlotOrder::kDominantLast, SlotOrder::kAscending, SlotOrder::kRandom})
    EXPECT_EQ(parse_slot_order(to_string(order)), order);
  EXPECT_EQ(to_string(SlotOrder::kDominantLast), "last");
  EXPECT_THROW(static_cast<void>(parse_slot_order("Last")), Error);
  EXPECT_THROW((void)reorder_slots({1, 2, 3}, 2, 2, {}, SlotOrder::kRandom, kBackward, 1), Error);
  EXPECT_THROW((void)reorder_slots({1, 2}, 1, 2, {}, SlotOrder::kDominantFirst, kBackward, 1), Error);
}

}  // namespace
}  // namespace sparsemla
