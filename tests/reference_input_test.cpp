// How the reference reads its arguments: dtypes, strides, documents; how far NaN and Inf reach; what it refuses.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "reference/reference.h"
#include "sparsemla/bfloat16.h"
#include "sparsemla/error.h"
#include "sparsemla/numerics.h"
#include "tests/reference_test_support.h"

namespace sparsemla {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr double kNan = std::numeric_limits<double>::quiet_NaN();

std::vector<std::uint16_t> to_bf16_bits(const std::vector<double>& values) {
  std::vector<std::uint16_t> bits;
  for (const double value : values) bits.push_back(to_bfloat16(static_cast<float>(value)).bits);
  return bits;
}

std::vector<float> to_floats(const std::vector<double>& values) { return {values.begin(), values.end()}; }

/// One key a token, each with its own: out = kv_latent, exactly.
ToyProblem copy_of_keys(std::int64_t keys, std::int64_t latent) {
  ToyProblem p = ToyProblem::random(keys, keys, 1, 1, latent, 0, 1);
  for (std::int64_t i = 0; i < keys; ++i) p.indices[i] = static_cast<std::int32_t>(i);
  return p;
}

TEST(ReferenceDtypes, Bfloat16AndFloat32AreReadExactly) {
  ToyProblem p = ToyProblem::random(3, 10, 2, 6, 5, 3, 2);
  for (auto* const values : {&p.q_latent, &p.q_rope, &p.kv_latent, &p.k_rope, &p.dout})
    for (double& value : *values) value = to_float(to_bfloat16(static_cast<float>(value)));
  const auto expected = reference::backward(p.inputs(), p.dout_tensor());

  AttentionInputs inputs = p.inputs();
  const auto kv = to_bf16_bits(p.kv_latent);
  const auto q = to_floats(p.q_latent);
  const auto q_rope = to_bf16_bits(p.q_rope);
  const auto dout = to_bf16_bits(p.dout);
  inputs.kv_latent = Tensor::contiguous(kv.data(), DataType::kBFloat16, {10, 5});
  inputs.q_latent = Tensor::contiguous(q.data(), DataType::kFloat32, {3, 2, 5});
  inputs.q_rope = Tensor::contiguous(q_rope.data(), DataType::kBFloat16, {3, 2, 3});
  const auto got = reference::backward(inputs, Tensor::contiguous(dout.data(), DataType::kBFloat16, {3, 2, 5}));
  EXPECT_EQ(got.dq_latent, expected.dq_latent);
  EXPECT_EQ(got.dkv_latent, expected.dkv_latent);
  EXPECT_EQ(got.dk_rope, expected.dk_rope);
}

TEST(ReferenceDtypes, EveryFiniteFloat16) {
  // The metrics have a decoder of their own: the two must agree on all 2 * 31 * 1024 finite patterns.
  constexpr std::int64_t kKeys = 7936;
  ToyProblem p = copy_of_keys(kKeys, 8);
  std::vector<std::uint16_t> bits;
  for (int pattern = 0; pattern < 0x10000; ++pattern)
    if ((pattern & 0x7C00) != 0x7C00) bits.push_back(static_cast<std::uint16_t>(pattern));
  ASSERT_EQ(bits.size(), kKeys * 8);
  AttentionInputs inputs = p.inputs();
  inputs.kv_latent = Tensor::contiguous(bits.data(), DataType::kFloat16, {kKeys, 8});
  const auto out = reference::forward(inputs).out;
  const Tensor half = Tensor::contiguous(bits.data(), DataType::kFloat16, {kKeys, 8});
  EXPECT_EQ(max_abs_difference(half, Tensor::contiguous(out.data(), DataType::kFloat64, {kKeys, 8})), 0);
  EXPECT_EQ(out[0x3C00], 1);
  EXPECT_EQ(out[0x0001], std::ldexp(1, -24));
  EXPECT_EQ(out[0x7BFF], 65504);
}

TEST(ReferenceDtypes, InfinityAndNanOfBothHalves) {
  const std::vector<std::uint16_t> half = {0x7C00, 0xFC00, 0x7E01, 0x7C01};
  const std::vector<std::uint16_t> brain = {0x7F80, 0xFF80, 0x7FC1, 0x7F81};
  for (const auto& [bits, dtype] : {std::pair(half, DataType::kFloat16), std::pair(brain, DataType::kBFloat16)}) {
    ToyProblem p = copy_of_keys(4, 1);
    p.q_latent.assign(4, 1);
    p.softmax_scale = 1;
    AttentionInputs inputs = p.inputs();
    inputs.kv_latent = Tensor::contiguous(bits.data(), dtype, {4, 1});
    const auto max = reference::forward(inputs).max_logits;
    EXPECT_EQ(max[0], kInfinity);
    EXPECT_EQ(max[1], -kInfinity);
    EXPECT_TRUE(std::isnan(max[2]));
    EXPECT_TRUE(std::isnan(max[3]));
  }
}

TEST(ReferenceStrides, FusedReversedAndRepeatedViews) {
  const ToyProblem p = ToyProblem::random(4, 9, 3, 5, 6, 2, 3);
  const auto expected = reference::backward(p.inputs(), p.dout_tensor());

  // q_latent and q_rope side by side, keys stored last to first, lists column by column, one dout row for all tokens.
  std::vector<double> fused;
  for (std::int64_t row = 0; row < 12; ++row) {
    fused.insert(fused.end(), &p.q_latent[row * 6], &p.q_latent[row * 6] + 6);
    fused.insert(fused.end(), &p.q_rope[row * 2], &p.q_rope[row * 2] + 2);
  }
  std::vector<double> reversed;
  for (std::int64_t key = 8; key >= 0; --key)
    reversed.insert(reversed.end(), &p.kv_latent[key * 6], &p.kv_latent[key * 6] + 6);
  std::vector<std::int32_t> columns(20);
  for (std::int64_t t = 0; t < 4; ++t)
    for (std::int64_t j = 0; j < 5; ++j) columns[j * 4 + t] = p.indices[t * 5 + j];

  AttentionInputs inputs = p.inputs();
  const Tensor q = Tensor::contiguous(fused.data(), DataType::kFloat64, {4, 3, 8});
  inputs.q_latent = q.columns(0, 6);
  inputs.q_rope = q.columns(6, 8);
  inputs.kv_latent.data = reversed.data() + 8 * 6;
  inputs.kv_latent.strides[0] = -6;
  inputs.indices.data = columns.data();
  inputs.indices.strides[0] = 1;
  inputs.indices.strides[1] = 4;
  const auto got = reference::backward(inputs, p.dout_tensor());
  EXPECT_EQ(got.dq_latent, expected.dq_latent);
  EXPECT_EQ(got.dq_rope, expected.dq_rope);
  EXPECT_EQ(got.dkv_latent, expected.dkv_latent);
  EXPECT_EQ(got.dk_rope, expected.dk_rope);

  ToyProblem same_dout = p;
  for (std::int64_t i = 18; i < 72; ++i) same_dout.dout[i] = same_dout.dout[i - 18];
  Tensor repeated = p.dout_tensor();
  repeated.strides[0] = 0;
  EXPECT_EQ(reference::backward(p.inputs(), repeated).dkv_latent,
            reference::backward(p.inputs(), same_dout.dout_tensor()).dkv_latent);
}

/// Tokens [t0, t1) over keys [k0, k1) as a problem of its own.
ToyProblem slice(const ToyProblem& p, std::int64_t t0, std::int64_t t1, std::int64_t k0, std::int64_t k1) {
  ToyProblem s = p;
  const auto cut = [](auto& values, std::int64_t begin, std::int64_t end, std::int64_t width) {
    values = {values.begin() + begin * width, values.begin() + end * width};
  };
  s.tokens = t1 - t0;
  s.keys = k1 - k0;
  cut(s.q_latent, t0, t1, p.heads * p.latent);
  cut(s.q_rope, t0, t1, p.heads * p.rope);
  cut(s.dout, t0, t1, p.heads * p.latent);
  cut(s.kv_latent, k0, k1, p.latent);
  cut(s.k_rope, k0, k1, p.rope);
  cut(s.indices, t0, t1, p.width);
  cut(s.topk_length, t0, t1, 1);
  s.cu_seqlens_q.clear();
  s.cu_seqlens_k.clear();
  return s;
}

TEST(ReferenceDocuments, EqualSeparateProblems) {
  for (const bool causal : {false, true}) {
    ToyProblem p = ToyProblem::random(9, 14, 2, 10, 5, 3, 4);
    p.causal = causal;
    p.topk_length = {10, 3, 9, 10, 0, 10, 8, 10, 10};
    p.cu_seqlens_q = {0, 3, 3, 8, 9};
    p.cu_seqlens_k = {0, 5, 6, 12, 12};  // an empty query document, and one without keys
    const auto whole = reference::forward(p.inputs());
    const auto gradient = reference::backward(p.inputs(), p.dout_tensor());
    for (std::size_t document = 0; document + 1 < p.cu_seqlens_q.size(); ++document) {
      const std::int64_t t0 = p.cu_seqlens_q[document];
      const std::int64_t k0 = p.cu_seqlens_k[document];
      const ToyProblem s = slice(p, t0, p.cu_seqlens_q[document + 1], k0, p.cu_seqlens_k[document + 1]);
      const auto out = reference::forward(s.inputs()).out;
      const auto alone = reference::backward(s.inputs(), s.dout_tensor());
      EXPECT_TRUE(std::equal(out.begin(), out.end(), whole.out.begin() + t0 * 2 * 5)) << "document " << document;
      EXPECT_TRUE(std::equal(alone.dq_rope.begin(), alone.dq_rope.end(), gradient.dq_rope.begin() + t0 * 2 * 3));
      EXPECT_TRUE(std::equal(alone.dkv_latent.begin(), alone.dkv_latent.end(), gradient.dkv_latent.begin() + k0 * 5));
    }
  }
}

TEST(ReferenceExtents, NothingInNothingOut) {
  for (const auto& [tokens, keys, width] : {std::tuple(0, 4, 3), std::tuple(3, 4, 0)}) {
    const ToyProblem p = ToyProblem::random(tokens, keys, 2, width, 5, 3, 5);
    const auto f = reference::forward(p.inputs());
    EXPECT_EQ(f.out, std::vector<double>(static_cast<std::size_t>(tokens * 10), 0));
    const auto b = reference::backward(p.inputs(), p.dout_tensor());
    EXPECT_EQ(b.dkv_latent, std::vector<double>(20, 0));
    EXPECT_EQ(b.dq_rope, std::vector<double>(static_cast<std::size_t>(tokens * 6), 0));
  }
  ToyProblem p = ToyProblem::random(2, 1, 2, 2, 5, 3, 5);  // then no keys at all
  p.keys = 0;
  p.kv_latent.clear();
  p.k_rope.clear();
  EXPECT_EQ(reference::forward(p.inputs()).out, std::vector<double>(20, 0));
  EXPECT_TRUE(reference::backward(p.inputs(), p.dout_tensor()).dkv_latent.empty());
}

// ---------------------------------------------------------------------------------------------------------------------
// NaN and Inf reach the rows that use them, and no others.

TEST(NonFinite, UnselectedKeysAreNeverRead) {
  ToyProblem p = ToyProblem::random(5, 12, 3, 4, 6, 2, 41);
  for (std::int32_t& key : p.indices) key %= 8;
  p.topk_length = {4, 4, 3, 4, 4};
  p.indices[2 * 4 + 3] = 11;  // past the length
  const auto f = forward(p);
  const auto b = backward(p);
  std::fill(p.kv_latent.begin() + 8 * 6, p.kv_latent.end(), kNan);
  std::fill(p.k_rope.begin() + 8 * 2, p.k_rope.end(), kInfinity);
  expect_same_bits(forward(p), f);
  expect_same_bits(backward(p), b);
}

TEST(NonFinite, ASelectedKeyReachesTheRowsThatUseIt) {
  for (const double poison : {kNan, kInfinity}) {
    ToyProblem p = ToyProblem::random(5, 12, 3, 4, 6, 2, 42);
    for (std::int32_t& key : p.indices) key %= 7;
    p.indices[2 * 4 + 1] = 9;  // token 2 alone uses key 9
    const auto f = forward(p);
    const auto b = backward(p);
    p.kv_latent[9 * 6 + 5] = poison;
    const auto g = forward(p);
    const auto c = backward(p);
    for (std::int64_t row = 0; row < 15; ++row) {
      const bool uses = row / 3 == 2;
      EXPECT_EQ(std::isfinite(g.lse[row]) && std::isfinite(g.out[row * 6 + 5]), !uses) << poison << " row " << row;
      EXPECT_EQ(same_bits(part(f.out, row * 6, 6), part(g.out, row * 6, 6)), !uses);
      EXPECT_EQ(same_bits(part(b.dq_latent, row * 6, 6), part(c.dq_latent, row * 6, 6)), !uses);
    }
    for (std::int32_t key = 0; key < 12; ++key) {
      const bool beside = std::find(&p.indices[8], &p.indices[12], key) != &p.indices[12];
      EXPECT_EQ(same_bits(part(b.dkv_latent, key * 6, 6), part(c.dkv_latent, key * 6, 6)), !beside) << "key " << key;
    }
  }
}

TEST(NonFinite, AKeyOfScoreMinusInfinityWeighsNothing) {
  ToyProblem p = ToyProblem::random(1, 3, 1, 3, 6, 2, 44);
  p.indices = {0, 1, 2};
  p.q_rope = {1, 0};
  p.k_rope[2 * 2] = -kInfinity;
  ToyProblem without = p;
  without.indices = {0, 1, -1};
  EXPECT_EQ(forward(p).out, forward(without).out);
  EXPECT_EQ(backward(p).dkv_latent, backward(without).dkv_latent);
}

TEST(NonFinite, AQueryReachesItsOwnRow) {
  ToyProblem p = ToyProblem::random(3, 12, 4, 5, 6, 2, 43);
  const auto f = forward(p);
  p.q_rope[(1 * 4 + 2) * 2] = kNan;
  const auto g = forward(p);
  for (std::int64_t row = 0; row < 12; ++row) {
    EXPECT_EQ(std::isnan(g.lse[row]) && std::isnan(g.out[row * 6]) && std::isnan(g.max_logits[row]), row == 6);
    EXPECT_EQ(same_bits(part(f.out, row * 6, 6), part(g.out, row * 6, 6)), row != 6);
  }
}

// ---------------------------------------------------------------------------------------------------------------------

TEST(Threads, GiveTheSameBits) {
  ToyProblem p = ToyProblem::random(41, 50, 9, 70, 40, 9, 51);
  p.sink.assign(9, 0.4);
  p.add_dlse(52);
  p.topk_length.assign(41, 70);
  p.topk_length[3] = 0;
  const auto f = forward(p, 1);
  const auto b = backward(p, 1);
  for (const int threads : {2, 3, 7, 64, 0}) {
    expect_same_bits(forward(p, threads), f);
    expect_same_bits(backward(p, threads), b);
  }
}

/// The argument that the reference blames for a change to good inputs; "" if none.
template <typename Change>
std::string blamed(const Change& change) {
  const ToyProblem p = ToyProblem::random(3, 5, 2, 4, 6, 2, 6);
  AttentionInputs inputs = p.inputs();
  Tensor dout = p.dout_tensor();
  Tensor dlse;
  change(inputs, dout, dlse);
  try {
    static_cast<void>(reference::backward(inputs, dout, dlse));
  } catch (const Error& error) {
    return error.argument();
  }
  return "";
}

TEST(ReferenceErrors, NameTheArgument) {
  using In = AttentionInputs;
  EXPECT_EQ(blamed([](In&, Tensor&, Tensor&) {}), "");
  EXPECT_EQ(blamed([](In& i, Tensor&, Tensor&) { i.q_latent = {}; }), "q_latent");
  EXPECT_EQ(blamed([](In& i, Tensor&, Tensor&) { i.kv_latent.shape[1] = 5; }), "kv_latent");
  EXPECT_EQ(blamed([](In& i, Tensor&, Tensor&) { i.q_rope = {}; }), "q_rope");
  EXPECT_EQ(blamed([](In& i, Tensor&, Tensor&) { i.k_rope = {}; }), "k_rope");
  EXPECT_EQ(blamed([](In& i, Tensor&, Tensor&) { i.indices.dtype = DataType::kInt64; }), "indices");
  EXPECT_EQ(blamed([](In& i, Tensor&, Tensor&) { i.kv_latent.device.type = DeviceType::kCuda; }), "kv_latent");
  EXPECT_EQ(blamed([](In&, Tensor& dout, Tensor&) { dout = {}; }), "dout");
  EXPECT_EQ(blamed([](In&, Tensor& dout, Tensor&) { dout.shape[1] = 1; }), "dout");
  EXPECT_EQ(blamed([](In& i, Tensor&, Tensor& dlse) { dlse = i.q_latent; }), "dlse");
  const std::vector<std::int32_t> good = {0, 3};
  for (const std::vector<std::int32_t>& bad : {std::vector{1, 3}, {0, 9}, {0, 2, 1}, {0, 1, 1}}) {
    const auto count = static_cast<std::int64_t>(bad.size());
    EXPECT_EQ(blamed([&](In& i, Tensor&, Tensor&) {
                i.cu_seqlens_q = Tensor::contiguous(good.data(), DataType::kInt32, {2});
                i.cu_seqlens_k = Tensor::contiguous(bad.data(), DataType::kInt32, {count});
              }),
              "cu_seqlens_k");
  }
  EXPECT_EQ(
      blamed([&](In& i, Tensor&, Tensor&) { i.cu_seqlens_k = Tensor::contiguous(good.data(), DataType::kInt32, {2}); }),
      "cu_seqlens_q");
}

}  // namespace
}  // namespace sparsemla
