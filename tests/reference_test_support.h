// What the tests of the reference share.
#pragma once

#include <gtest/gtest.h>

#include <cstring>
#include <vector>

#include "reference/reference.h"
#include "tests/toy_problem.h"

namespace sparsemla {

using reference::BackwardResult;
using reference::ForwardResult;

inline ForwardResult forward(const ToyProblem& p, int threads = 2) { return reference::forward(p.inputs(), threads); }
inline BackwardResult backward(const ToyProblem& p, int threads = 2) {
  return reference::backward(p.inputs(), p.dout_tensor(), p.dlse_tensor(), threads);
}

inline bool same_bits(const std::vector<double>& a, const std::vector<double>& b) {
  return a.size() == b.size() && (a.empty() || std::memcmp(a.data(), b.data(), a.size() * sizeof(double)) == 0);
}

inline void expect_same_bits(const ForwardResult& a, const ForwardResult& b) {
  EXPECT_TRUE(same_bits(a.out, b.out));
  EXPECT_TRUE(same_bits(a.lse, b.lse));
  EXPECT_TRUE(same_bits(a.max_logits, b.max_logits));
}

inline void expect_same_bits(const BackwardResult& a, const BackwardResult& b) {
  EXPECT_TRUE(same_bits(a.dq_latent, b.dq_latent));
  EXPECT_TRUE(same_bits(a.dq_rope, b.dq_rope));
  EXPECT_TRUE(same_bits(a.dkv_latent, b.dkv_latent));
  EXPECT_TRUE(same_bits(a.dk_rope, b.dk_rope));
  EXPECT_TRUE(same_bits(a.dsink, b.dsink));
}

inline void expect_near(const std::vector<double>& a, const std::vector<double>& b, double tolerance) {
  ASSERT_EQ(a.size(), b.size());
  for (std::size_t i = 0; i < a.size(); ++i) EXPECT_NEAR(a[i], b[i], tolerance) << "element " << i;
}

/// [begin, begin + count) of `values`.
inline std::vector<double> part(const std::vector<double>& values, std::int64_t begin, std::int64_t count) {
  return {values.begin() + begin, values.begin() + begin + count};
}

/// sum over keys of weight[key] * rows[key, :].
inline std::vector<double> weighted_rows(const std::vector<double>& rows, const std::vector<double>& weights) {
  const std::size_t width = rows.size() / weights.size();
  std::vector<double> result(width, 0);
  for (std::size_t i = 0; i < weights.size(); ++i)
    for (std::size_t d = 0; d < width; ++d) result[d] += weights[i] * rows[i * width + d];
  return result;
}

}  // namespace sparsemla
