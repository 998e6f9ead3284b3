// The budgets: their numbers, and that they tell what docs/numerics.md calls right from what it calls wrong.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "numerics/budgets.h"
#include "sparsemla/error.h"

namespace sparsemla {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr auto kBf16 = DataType::kBFloat16;
constexpr auto kFp32 = DataType::kFloat32;

Pipeline split_pipeline() {
  Pipeline pipeline;
  pipeline.operands = Operands::kSplit;
  return pipeline;
}

Pipeline without_residual() {
  Pipeline pipeline;
  pipeline.residual = false;
  return pipeline;
}

/// Enough for a mean of roundings not to scatter.
constexpr std::int64_t kMany = 1'000'000'000'000;

TEST(Budget, OfOutIsTwoRoundings) {
  // P anywhere in its binade (2^-7/sqrt(12) = 2.255e-3 at worst), out spread over it (1.659e-3).
  EXPECT_NEAR(budget(Output::kOut, kBf16, "cpu", {}, kMany).rel_l2, std::hypot(2.255e-3, 1.659e-3), 2e-6);
  EXPECT_NEAR(budget(Output::kOut, kBf16, "cpu", split_pipeline(), kMany).rel_l2, 1.659e-3, 5e-6);
  EXPECT_GT(1.94e-3, budget(Output::kOut, kBf16, "cpu", split_pipeline(), kMany).rel_l2) << "P rounded after all";
  // A single key's p is off by 2^-8 at most.
  EXPECT_NEAR(budget(Output::kOut, kBf16, "cpu", {}, kMany).row_p999, std::hypot(0x1p-8, 2.255e-3), 1e-6);
}

TEST(Budget, OfASmallTensorAllowsForItsScatter) {
  // Out of 30,000 samples one may exceed it. At 100 values the root of the mean of squares scatters by 10.5 %.
  const double many = budget(Output::kOut, kBf16, "cpu", split_pipeline(), kMany).rel_l2;
  EXPECT_NEAR(budget(Output::kOut, kBf16, "cpu", split_pipeline(), 100).rel_l2 / many, 1.42, 0.005);
  EXPECT_NEAR(budget(Output::kOut, kBf16, "cpu", split_pipeline(), 1 << 20).rel_l2 / many, 1.0041, 0.0005);
  EXPECT_EQ(budget(Output::kLse, kFp32, "cpu", {}, 1).max_abs, budget(Output::kLse, kFp32, "cpu", {}, kMany).max_abs);
  EXPECT_THROW(static_cast<void>(budget(Output::kOut, kBf16, "cpu", {}, 0)), Error);
}

TEST(Budget, HoldsTheBestKnownFiguresAndNotMuchMore) {
  // Right: every exact figure of the tables. Wrong: gradients without the residual at beta 0.4, dq's p99.9 included.
  for (const double right : {1.67e-3, 1.94e-3, 2.07e-3})
    EXPECT_LT(right, budget(Output::kOut, kBf16, "cpu", {}, kMany).rel_l2);
  EXPECT_GT(2 * 1.67e-3, budget(Output::kOut, kBf16, "cpu", {}, kMany).rel_l2);
  for (const Output dq : {Output::kDqLatent, Output::kDqRope}) {
    const Budget limit = budget(dq, kBf16, "cpu", {}, kMany);
    for (const double right : {.237e-2, .216e-2, .255e-2}) EXPECT_LT(right, limit.rel_l2);
    EXPECT_GT(.89e-2, 2 * limit.rel_l2);
    EXPECT_GE(limit.row_p999, .90e-2);
    EXPECT_LT(budget(dq, kFp32, "cpu", split_pipeline(), kMany).rel_l2, 2.1e-4);
  }
  for (const Output dk : {Output::kDkvLatent, Output::kDkRope}) {
    for (const double right : {.168e-2, .185e-2}) EXPECT_LT(right, budget(dk, kFp32, "cpu", {}, kMany).rel_l2);
    EXPECT_LT(budget(dk, kFp32, "cpu", split_pipeline(), kMany).rel_l2, 2.1e-4);
  }
}

TEST(Budget, KnowsWhatTheResidualIsFor) {
  for (const Output output : {Output::kDqLatent, Output::kDkRope, Output::kDsink}) {
    const DataType dtype = output == Output::kDqLatent ? kBf16 : kFp32;
    EXPECT_GT(budget(output, dtype, "cpu", without_residual(), kMany).rel_l2,
              budget(output, dtype, "cpu", {}, kMany).rel_l2);
  }
  EXPECT_LT(budget(Output::kDsink, kFp32, "cpu", split_pipeline(), kMany).rel_l2, 5e-5);
}

TEST(Budget, OfLse) {
  const double exact = budget(Output::kLse, kFp32, "cpu", {}, kMany).max_abs;
  EXPECT_NEAR(exact, 2.3e-5, 0.1e-5);
  EXPECT_EQ(budget(Output::kMaxLogits, kFp32, "cpu", {}, kMany).max_abs, exact);
  Pipeline rounded;
  rounded.row_sum = RowSum::kRounded;
  EXPECT_NEAR(budget(Output::kLse, kFp32, "cpu", rounded, kMany).max_abs, exact + 0x1p-8, 1e-12);
  EXPECT_EQ(budget(Output::kMaxLogits, kFp32, "cpu", rounded, kMany).max_abs, exact);
  EXPECT_EQ(budget(Output::kLse, kFp32, "cpu", {}, kMany).rel_l2, kInfinity);
}

TEST(Budget, RefusesWhatItHasNoNumbersFor) {
  EXPECT_THROW(static_cast<void>(budget(Output::kOut, kFp32, "cpu", {}, kMany)), Error);
  EXPECT_THROW(static_cast<void>(budget(Output::kDkRope, kBf16, "cpu", {}, kMany)), Error);
  EXPECT_THROW(static_cast<void>(budget(Output::kOut, kBf16, "sm90", {}, kMany)), Error);
  EXPECT_EQ(to_string(Output::kDsink), "dsink");
  EXPECT_EQ(to_string(Output::kOut), "out");
}

TEST(AuditLimits, TellLazyFromExact) {
  // Setup P, as published: row gain rms 1.23e-3 and order ratio 6.4 for lazy, 1.46e-4 and 1.05 for exact.
  constexpr double kIdeal = 1.38e-4;
  EXPECT_GT(1.23e-3 / kIdeal, kMaxRowGainOverIdeal);
  EXPECT_LT(1.46e-4 / kIdeal, kMaxRowGainOverIdeal);
  EXPECT_GT(6.4, kMaxOrderGainOverNoiseFloor);
  EXPECT_LT(1.05, kMaxOrderGainOverNoiseFloor);
  EXPECT_LT(1.94e-3 / 1.66e-3, max_out_rel_l2_over_floor(Operands::kBf16));
  EXPECT_GT(1.94e-3 / 1.66e-3, max_out_rel_l2_over_floor(Operands::kSplit));
}

TEST(GradientBudgets, AreTheTable) {
  const auto iid = gradient_budget_at_setup_p(0, Operands::kBf16, kBf16).value();
  EXPECT_NEAR(iid.dq_rope, .2375e-2, 1e-9);
  EXPECT_NEAR(iid.dq_latent, .2165e-2, 1e-9);
  EXPECT_NEAR(iid.dk_rope, .1685e-2, 1e-9);
  EXPECT_NEAR(iid.dkv_latent, .1665e-2, 1e-9);
  EXPECT_EQ(iid.dq_row_p99, kInfinity);
  const auto peaked = gradient_budget_at_setup_p(0.4, Operands::kBf16, kBf16).value();
  EXPECT_NEAR(peaked.dkv_latent, .1345e-2, 1e-9);
  EXPECT_NEAR(peaked.dq_row_p999, .905e-2, 1e-9);
  EXPECT_GT(.89e-2, peaked.dq_rope) << "without the residual";
  const auto split = gradient_budget_at_setup_p(0.6, Operands::kSplit, kBf16).value();
  EXPECT_NEAR(split.dq_rope, .175e-2, 1e-9);
  EXPECT_NEAR(split.dkv_latent, .01e-2, 1e-9);
  EXPECT_NEAR(gradient_budget_at_setup_p(0, Operands::kSplit, kFp32).value().dq_latent, .02e-2, 1e-9);
}

TEST(GradientBudgets, BetweenRowsTheLargerOfTheTwo) {
  const auto between = gradient_budget_at_setup_p(0.25, Operands::kBf16, kBf16).value();
  EXPECT_NEAR(between.dq_latent, .2365e-2, 1e-9);
  EXPECT_NEAR(between.dkv_latent, .1665e-2, 1e-9);
  EXPECT_EQ(gradient_budget(0.5, Operands::kBf16, kBf16).value().dkv_latent, between.dkv_latent);
  EXPECT_NEAR(gradient_budget(0.97, Operands::kSplit, kBf16).value().dk_rope, .05e-2, 1e-9);
}

TEST(GradientBudgets, EndWhereTheTableEnds) {
  EXPECT_FALSE(gradient_budget_at_setup_p(0.7, Operands::kBf16, kBf16).has_value());
  EXPECT_FALSE(gradient_budget_at_setup_p(-0.1, Operands::kBf16, kBf16).has_value());
  EXPECT_FALSE(gradient_budget(0.9999, Operands::kBf16, kBf16).has_value());
  EXPECT_FALSE(gradient_budget(std::nan(""), Operands::kBf16, kBf16).has_value());
  EXPECT_THROW(static_cast<void>(gradient_budget(0.5, Operands::kBf16, DataType::kFloat16)), Error);
}

}  // namespace
}  // namespace sparsemla
