// The parts of the CPU backend that the operation's own tests would show only indirectly.
#include <gtest/gtest.h>

#include <atomic>
#include <cmath>
#include <limits>
#include <random>
#include <vector>

#include "backends/cpu/amx.h"
#include "backends/cpu/engine.h"
#include "backends/cpu/key_blocks.h"
#include "backends/cpu/threads.h"
#include "core/exp2.h"

namespace sparsemla::cpu {
namespace {

TEST(Exp2Test, AccurateOverTheWholeRange) {
  const auto worst_error = [](float begin, float end) {
    double worst = 0.0;
    for (float x = begin; x < end; x += 0.00317F) {
      const double exact = std::exp2(static_cast<double>(x));
      worst = std::max(worst, std::abs(exp2_fp32(x) - exact) / exact);
    }
    return worst;
  };
  EXPECT_LT(worst_error(-125.0F, 127.0F), 1.2e-7);
  EXPECT_LT(worst_error(127.0F, 128.0F), 6e-6);
}

TEST(Exp2Test, EdgesAndPowers) {
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  for (int n = -125; n <= 127; ++n) EXPECT_EQ(exp2_fp32(static_cast<float>(n)), std::ldexp(1.0F, n));
  EXPECT_EQ(exp2_fp32(-kInfinity), 0.0F);
  EXPECT_EQ(exp2_fp32(-1.0e30F), 0.0F);
  EXPECT_EQ(exp2_fp32(kInfinity), kInfinity);
  EXPECT_EQ(exp2_fp32(128.0F), kInfinity);
  EXPECT_TRUE(std::isfinite(exp2_fp32(std::nextafter(128.0F, 0.0F))));
  EXPECT_TRUE(std::isnan(exp2_fp32(std::numeric_limits<float>::quiet_NaN())));
}

/// Random bf16 rows and fp32 weights, multiplied by an engine in every operand form and by plain loops in fp64.
template <typename Engine>
void check_products() {
  constexpr std::int64_t kM = 64;
  constexpr std::int64_t kN = 96;
  constexpr std::int64_t kK = 160;
  std::mt19937 random(7);
  std::normal_distribution<float> normal;
  std::vector<float> weights(kM * kK);
  for (float& value : weights) value = normal(random);
  std::vector<BFloat16> rows(kK * kN);
  for (BFloat16& value : rows) value = to_bfloat16(normal(random));
  std::vector<float> weights_transposed(kK * kM);
  std::vector<BFloat16> rows_transposed(kN * kK);
  for (std::int64_t k = 0; k < kK; ++k) {
    for (std::int64_t m = 0; m < kM; ++m) weights_transposed[k * kM + m] = weights[m * kK + k];
    for (std::int64_t n = 0; n < kN; ++n) rows_transposed[n * kK + k] = rows[k * kN + n];
  }
  [[maybe_unused]] const typename Engine::ThreadScope scope;
  for (const Part part : {Part::kHigh, Part::kLow}) {
    for (const bool left_transposed : {false, true}) {
      for (const bool right_transposed : {false, true}) {
        typename Engine::Left left(kM * kK);
        typename Engine::Right right(kK * kN);
        if (left_transposed) {
          left.set_weights_transposed(weights_transposed.data(), kM, kK, kM, part);
        } else {
          left.set_weights(weights.data(), kM, kK, kK, part);
        }
        if (right_transposed) {
          right.set_rows_transposed(rows_transposed.data(), kK, kN, kK);
        } else {
          right.set_rows(rows.data(), kK, kN, kN);
        }
        Buffer<float> c(kM * kN);
        for (std::int64_t i = 0; i < kM * kN; ++i) c[i] = 1.0F;
        Engine::multiply(left, right, c.get(), kN, true);
        for (std::int64_t m = 0; m < kM; ++m) {
          for (std::int64_t n = 0; n < kN; ++n) {
            double sum = 1.0;
            for (std::int64_t k = 0; k < kK; ++k) {
              const float w = weights[m * kK + k];
              const float high = to_float(to_bfloat16(w));
              const float used = part == Part::kHigh ? high : to_float(to_bfloat16(w - high));
              sum += static_cast<double>(used) * to_float(rows[k * kN + n]);
            }
            ASSERT_NEAR(c[m * kN + n], sum, 2e-5) << m << "," << n << " " << left_transposed << right_transposed;
          }
        }
      }
    }
  }
}

TEST(EngineTest, Fp32Products) { check_products<Fp32Engine>(); }

TEST(EngineTest, AmxProducts) {
  if (!amx::available()) GTEST_SKIP() << "this processor has no AMX bf16";
  check_products<AmxEngine>();
}

TEST(KeyBlocksTest, BlocksFollowSlotsAndDirection) {
  const std::vector<std::int32_t> list{7, -1, 3, 9, -1, -1, -1, -1, 2, 1 << 30};
  const RowKeys row{100, 10, 10};
  KeyBlocks blocks(10);
  Pipeline pipeline;
  pipeline.key_block = 4;
  blocks.assign(row, list.data(), 1, pipeline);
  EXPECT_EQ(blocks.keys(), (std::vector<std::int64_t>{107, 103, 109, 102}));
  ASSERT_EQ(blocks.blocks().size(), 2U);  // the middle block has no valid slot
  EXPECT_EQ(blocks.blocks()[0].begin, 3);
  EXPECT_EQ(blocks.blocks()[1].count, 3);
  pipeline.walk = WalkDirection::kFirstToLast;
  blocks.assign(row, list.data(), 1, pipeline);
  EXPECT_EQ(blocks.blocks()[0].count, 3);
  pipeline.canonical = true;
  blocks.assign(row, list.data(), 1, pipeline);
  EXPECT_EQ(blocks.keys(), (std::vector<std::int64_t>{102, 103, 107, 109}));
  EXPECT_EQ(blocks.blocks().size(), 1U);
}

/// Every row must see its tokens in ascending order, whatever the threads do; without the wait this fails at once.
TEST(OrderedTokensTest, RowsSeeTokensInOrder) {
  constexpr int kWorkers = 8;
  constexpr std::int64_t kTokens = 300;
  constexpr std::int64_t kRows = 64;
  std::vector<std::vector<std::int64_t>> seen(kRows);
  OrderedTokens order(kTokens, kWorkers);
  run_workers(kWorkers, [&](int worker) {
    std::mt19937 random(static_cast<unsigned>(worker));
    for (std::int64_t token = order.take(worker); token < kTokens; token = order.take(worker)) {
      for (std::int64_t row = token % 3; row < kRows; row += 1 + token % 5) {
        volatile int spin = static_cast<int>(random() % 500);
        while (spin > 0) spin = spin - 1;
        order.wait_to_touch(worker, token, row);
        seen[static_cast<std::size_t>(row)].push_back(token);
        order.pass(worker, row);
      }
      order.finish(worker);
    }
  });
  std::size_t total = 0;
  for (const auto& tokens : seen) {
    EXPECT_TRUE(std::is_sorted(tokens.begin(), tokens.end()));
    total += tokens.size();
  }
  EXPECT_GT(total, 5000U);
}

}  // namespace
}  // namespace sparsemla::cpu
