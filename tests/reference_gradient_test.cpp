// The reference's gradients against finite differences of its own forward, and both against loops without any blocking.
#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <limits>
#include <string>

#include "reference/reference.h"
#include "tests/toy_problem.h"

namespace sparsemla {
namespace {

/// The loss whose gradients backward() gives. A row without valid slots has lse -inf and takes no part.
double loss(const ToyProblem& p) {
  const auto result = reference::forward(p.inputs(), 1);
  double sum = 0;
  for (std::size_t i = 0; i < result.out.size(); ++i) sum += p.dout[i] * result.out[i];
  for (std::size_t i = 0; i < p.dlse.size(); ++i)
    if (std::isfinite(result.lse[i])) sum += p.dlse[i] * result.lse[i];
  return sum;
}

/// Largest |central difference - gradient| over the elements of one input.
double worst_difference(ToyProblem p, std::vector<double> ToyProblem::*input, const std::vector<double>& gradient) {
  constexpr double kStep = 1e-5;
  EXPECT_EQ((p.*input).size(), gradient.size());
  double worst = 0;
  for (std::size_t i = 0; i < gradient.size(); ++i) {
    double& element = (p.*input)[i];
    const double original = element;
    element = original + kStep;
    const double above = loss(p);
    element = original - kStep;
    const double below = loss(p);
    element = original;
    worst = std::max(worst, std::abs((above - below) / (2 * kStep) - gradient[i]));
  }
  return worst;
}

double largest(const std::vector<double>& values) {
  double result = 0;
  for (const double value : values) result = std::max(result, std::abs(value));
  return result;
}

struct Scenario {
  std::string name;
  std::function<void(ToyProblem&)> change;
};

class FiniteDifferences : public testing::TestWithParam<Scenario> {};

TEST_P(FiniteDifferences, AgreeWithEveryGradient) {
  ToyProblem p = ToyProblem::random(4, 6, 3, 5, 5, 3, 1);
  GetParam().change(p);
  const auto gradients = reference::backward(p.inputs(), p.dout_tensor(), p.dlse_tensor(), 1);
  // Differences of a loss of size ~10 with steps of 1e-5 are good to ~1e-9.
  constexpr double kTolerance = 2e-8;
  EXPECT_LT(worst_difference(p, &ToyProblem::q_latent, gradients.dq_latent), kTolerance);
  EXPECT_LT(worst_difference(p, &ToyProblem::kv_latent, gradients.dkv_latent), kTolerance);
  EXPECT_LT(worst_difference(p, &ToyProblem::q_rope, gradients.dq_rope), kTolerance);
  EXPECT_LT(worst_difference(p, &ToyProblem::k_rope, gradients.dk_rope), kTolerance);
  EXPECT_LT(worst_difference(p, &ToyProblem::sink, gradients.dsink), kTolerance);

  // Nothing passes for having gradients of nothing.
  EXPECT_GT(largest(gradients.dkv_latent), 1e-2);
  const bool scores_matter = p.softmax_scale.value_or(1) != 0;
  EXPECT_TRUE(!scores_matter || largest(gradients.dq_latent) > 1e-2);
  EXPECT_TRUE(!scores_matter || p.rope == 0 || largest(gradients.dk_rope) > 1e-2);
  EXPECT_TRUE(p.sink.empty() || largest(gradients.dsink) > 1e-3);
}

const std::vector<double> kSink = {0.3, -1.2, 2.0};

INSTANTIATE_TEST_SUITE_P(
    Scenarios, FiniteDifferences,
    testing::Values(Scenario{"Plain", [](ToyProblem&) {}},  //
                    Scenario{"WithoutRope",
                             [](ToyProblem& p) {
                               p.rope = 0;
                               p.q_rope.clear();
                               p.k_rope.clear();
                             }},
                    Scenario{"Sink", [](ToyProblem& p) { p.sink = kSink; }},
                    Scenario{"Dlse", [](ToyProblem& p) { p.add_dlse(2); }},
                    Scenario{"SinkAndDlse",
                             [](ToyProblem& p) {
                               p.sink = kSink;
                               p.add_dlse(2);
                             }},
                    Scenario{"Causal", [](ToyProblem& p) { p.causal = true; }},
                    Scenario{"HolesAndDuplicates",
                             [](ToyProblem& p) {
                               constexpr auto kMin = std::numeric_limits<std::int32_t>::min();
                               constexpr auto kMax = std::numeric_limits<std::int32_t>::max();
                               p.indices = {-1, 2, 2, 6, 0, kMin, kMax, 3, -1, 5, -1, -1, -1, -1, -1, 4, 4, 4, 4, 1};
                             }},
                    Scenario{"Lengths",
                             [](ToyProblem& p) {
                               p.topk_length = {-3, 2, 5, 99};
                             }},
                    Scenario{"Documents",
                             [](ToyProblem& p) {
                               p.cu_seqlens_q = {0, 1, 1, 3};  // the last token is past the last document
                               p.cu_seqlens_k = {0, 2, 3, 6};
                               p.indices = {0, 1, 3, 1, 0, 0, 1, 2, 2, -1, 2, 0, 5, 1, 1, 0, 1, 2, 0, 1};
                             }},
                    Scenario{"NegativeScale", [](ToyProblem& p) { p.softmax_scale = -0.7; }},
                    Scenario{"ZeroScale", [](ToyProblem& p) { p.softmax_scale = 0.0; }},
                    Scenario{"Everything",
                             [](ToyProblem& p) {
                               p.causal = true;
                               p.sink = kSink;
                               p.add_dlse(3);
                               p.topk_length = {5, 4, 5, 3};
                               p.cu_seqlens_q = {0, 2, 4};
                               p.cu_seqlens_k = {0, 3, 6};
                               p.indices = {0, 1, -1, 2, 2, 1, 1, 0, 2, 1, 0, -1, 1, 1, 7, 2, 2, 0, 1, 0};
                               p.softmax_scale = 0.9;
                             }}),
    [](const auto& scenario) { return scenario.param.name; });

TEST(FiniteDifferencesTest, NoticeADroppedLseGradient) {
  ToyProblem p = ToyProblem::random(3, 5, 2, 4, 4, 2, 5);
  p.add_dlse(6);
  const auto without = reference::backward(p.inputs(), p.dout_tensor(), {}, 1);
  EXPECT_GT(worst_difference(p, &ToyProblem::q_latent, without.dq_latent), 1e-2);
  EXPECT_GT(worst_difference(p, &ToyProblem::kv_latent, without.dkv_latent), 1e-2);
}

// ---------------------------------------------------------------------------------------------------------------------
// The formulas once more, one row at a time and with nothing tiled, padded or transposed.

struct Plain {
  reference::ForwardResult forward;
  reference::BackwardResult backward;
};

double dot(const double* a, const double* b, std::int64_t count) {
  double sum = 0;
  for (std::int64_t i = 0; i < count; ++i) sum += a[i] * b[i];
  return sum;
}

void add_scaled(double* a, double factor, const double* b, std::int64_t count) {
  for (std::int64_t i = 0; i < count; ++i) a[i] += factor * b[i];
}

/// Every index of `p` must be valid; no dlse.
Plain plain(const ToyProblem& p) {
  Plain r;
  auto& [f, b] = r;
  f.out.resize(p.q_latent.size());
  b.dq_latent.resize(p.q_latent.size());
  b.dq_rope.resize(p.q_rope.size());
  b.dkv_latent.resize(p.kv_latent.size());
  b.dk_rope.resize(p.k_rope.size());
  b.dsink.resize(p.sink.size());
  const double scale = 1 / std::sqrt(static_cast<double>(p.latent + p.rope));
  for (std::int64_t row = 0; row < p.tokens * p.heads; ++row) {
    const double* const ql = &p.q_latent[row * p.latent];
    const double* const qr = &p.q_rope[row * p.rope];
    const double* const dout = &p.dout[row * p.latent];
    const double sink = p.sink[row % p.heads];
    const std::int32_t* const list = &p.indices[row / p.heads * p.width];
    std::vector<double> exponential;
    double sum = 0;
    for (std::int64_t j = 0; j < p.width; ++j) {
      const double* const kv = &p.kv_latent[list[j] * p.latent];
      exponential.push_back(std::exp(scale * (dot(ql, kv, p.latent) + dot(qr, &p.k_rope[list[j] * p.rope], p.rope))));
      sum += exponential.back();
    }
    f.lse.push_back(std::log(sum));
    const double total = sum + std::exp(sink);
    double* const out = &f.out[row * p.latent];
    for (std::int64_t j = 0; j < p.width; ++j)
      add_scaled(out, exponential[j] / total, &p.kv_latent[list[j] * p.latent], p.latent);
    const double dpsum = dot(dout, out, p.latent);
    for (std::int64_t j = 0; j < p.width; ++j) {
      const double* const kv = &p.kv_latent[list[j] * p.latent];
      const double* const kr = &p.k_rope[list[j] * p.rope];
      const double probability = exponential[j] / total;
      const double ds = probability * (dot(dout, kv, p.latent) - dpsum) * scale;
      add_scaled(&b.dq_latent[row * p.latent], ds, kv, p.latent);
      add_scaled(&b.dq_rope[row * p.rope], ds, kr, p.rope);
      add_scaled(&b.dkv_latent[list[j] * p.latent], probability, dout, p.latent);
      add_scaled(&b.dkv_latent[list[j] * p.latent], ds, ql, p.latent);
      add_scaled(&b.dk_rope[list[j] * p.rope], ds, qr, p.rope);
    }
    b.dsink[row % p.heads] -= std::exp(sink) / total * dpsum;
  }
  return r;
}

double relative_difference(const std::vector<double>& a, const std::vector<double>& b) {
  EXPECT_EQ(a.size(), b.size());
  double difference = 0;
  double norm = 0;
  for (std::size_t i = 0; i < a.size(); ++i) {
    difference += (a[i] - b[i]) * (a[i] - b[i]);
    norm += b[i] * b[i];
  }
  return std::sqrt(difference / norm);
}

// Sizes around the multiples of 8 and 64 that the reference works in.
class Blocking : public testing::TestWithParam<std::tuple<int, int, int, int>> {};

TEST_P(Blocking, ChangesNothing) {
  const auto [heads, width, latent, rope] = GetParam();
  ToyProblem p = ToyProblem::random(5, 90, heads, width, latent, rope, 7);
  for (int h = 0; h < heads; ++h) p.sink.push_back(0.5 * h - 1);
  const Plain expected = plain(p);
  const auto forward = reference::forward(p.inputs());
  const auto backward = reference::backward(p.inputs(), p.dout_tensor());
  constexpr double kTolerance = 1e-13;
  EXPECT_LT(relative_difference(forward.out, expected.forward.out), kTolerance);
  EXPECT_LT(relative_difference(forward.lse, expected.forward.lse), kTolerance);
  EXPECT_LT(relative_difference(backward.dq_latent, expected.backward.dq_latent), kTolerance);
  EXPECT_LT(relative_difference(backward.dq_rope, expected.backward.dq_rope), kTolerance);
  EXPECT_LT(relative_difference(backward.dkv_latent, expected.backward.dkv_latent), kTolerance);
  EXPECT_LT(relative_difference(backward.dk_rope, expected.backward.dk_rope), kTolerance);
  EXPECT_LT(relative_difference(backward.dsink, expected.backward.dsink), kTolerance);
}

INSTANTIATE_TEST_SUITE_P(Sizes, Blocking,
                         testing::Values(std::tuple(1, 63, 1, 1), std::tuple(2, 64, 7, 2), std::tuple(7, 65, 8, 9),
                                         std::tuple(8, 128, 9, 8), std::tuple(9, 129, 33, 5),
                                         std::tuple(17, 190, 64, 40), std::tuple(16, 200, 512, 64)));

}  // namespace
}  // namespace sparsemla
