// Each rule of the verdict on figures made by hand: just inside its limit it passes, just outside it fails.
#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <limits>

#include "audit_test_support.h"
#include "numerics/budgets.h"

namespace sparsemla::audit {
namespace {

GradientEntry gradient_entry(const char* order, bool residual, Operands operands, double error) {
  GradientEntry entry;
  entry.pipeline = "exact";
  entry.order = order;
  entry.residual = residual;
  entry.operands = operands;
  entry.judged = residual;
  entry.errors = {error, error, error, error, {}, error, error};
  return entry;
}

/// Two orders of one pipeline at setup P, all figures well inside their limits.
AuditReport good_report(double beta = 0.4) {
  AuditReport report;
  report.setup.num_tokens = report.setup.num_keys = 4096;
  report.setup.topk = 2048;
  report.setup.num_heads = 128;
  report.setup.latent_dim = 512;
  report.setup.rope_dim = 64;
  report.setup.beta = beta;
  report.setup.self_weight_median = 0.8;
  report.setup.largest_lse = 10;
  report.floors = {1.66e-3, 1.4e-4};
  for (const char* order : {"first", "last"}) {
    ForwardEntry entry;
    entry.pipeline = "exact";
    entry.order = order;
    entry.out_rel_l2 = 1.67e-3;
    entry.row_gain = {1.45e-4, 4e-4, 1e-3, 1.2e-4, 4096};
    entry.lse_max_abs = 1e-5;
    report.forward.push_back(entry);
    report.gradients.push_back(gradient_entry(order, true, Operands::kBf16, 1.3e-3));
    report.gradients.push_back(gradient_entry(order, false, Operands::kBf16, 8.9e-3));
    report.gradients.push_back(gradient_entry(order, true, Operands::kSplit, 1.0e-4));
    report.gradients.push_back(gradient_entry(order, false, Operands::kSplit, 8.9e-3));
  }
  OrderDifference difference;
  difference.pipeline = "exact";
  difference.first_order = "first";
  difference.second_order = "last";
  difference.ratio = 1.05;
  report.order_differences.push_back(difference);
  return report;
}

TEST(Verdict, GoodFiguresPass) {
  const Verdict verdict = judge(good_report());
  EXPECT_TRUE(verdict.passed) << joined(verdict);
  EXPECT_TRUE(verdict.failures.empty());
}

struct Rule {
  const char* name;
  std::function<void(AuditReport&, double)> set;
  double inside;
  double outside;
  const char* sentence;
};

class VerdictRule : public testing::TestWithParam<Rule> {};

TEST_P(VerdictRule, HoldsAtItsLimit) {
  AuditReport report = good_report();
  GetParam().set(report, GetParam().inside);
  EXPECT_TRUE(judge(report).passed) << joined(judge(report));
  GetParam().set(report, GetParam().outside);
  const Verdict verdict = judge(report);
  EXPECT_FALSE(verdict.passed);
  EXPECT_EQ(count_failures(verdict, GetParam().sentence), 1) << joined(verdict);
  for (ForwardEntry& entry : report.forward) entry.judged = false;
  for (OrderDifference& entry : report.order_differences) entry.judged = false;
  for (GradientEntry& entry : report.gradients) entry.judged = false;
  EXPECT_TRUE(judge(report).passed) << "only judged entries count";
}

/// Both orders alike, so that only the size is at fault.
auto both(std::optional<double> GradientErrors::*error, Operands operands) {
  return [=](AuditReport& report, double value) {
    for (GradientEntry& entry : report.gradients) {
      if (entry.residual == true && entry.operands == operands) entry.errors.*error = value;
    }
  };
}

const Rule kRules[] = {
    {"RowGain", [](AuditReport& r, double v) { r.forward[1].row_gain.rms = v; }, 2.7e-4, 2.9e-4,
     "forward exact last: row gain rms"},
    {"OutRelL2", [](AuditReport& r, double v) { r.forward[0].out_rel_l2 = v; }, 2.3e-3, 2.4e-3,
     "forward exact first: out rel_l2"},
    {"OutRelL2OfSplit",
     [](AuditReport& r, double v) {
       r.forward[0].settings.operands = Operands::kSplit;
       r.forward[0].out_rel_l2 = v;
     },
     1.675e-3, 1.68e-3, "forward exact first: out rel_l2"},
    {"Lse", [](AuditReport& r, double v) { r.forward[0].lse_max_abs = v; }, 2.2e-5, 2.4e-5, "lse max abs error"},
    {"LargeLse",
     [](AuditReport& r, double v) {
       r.setup.largest_lse = 160;
       r.forward[0].lse_max_abs = v;
     },
     2.2e-4, 2.4e-4, "lse max abs error"},
    {"NonFinite", [](AuditReport& r, double v) { r.forward[0].nonfinite_mismatches = static_cast<std::int64_t>(v); }, 0,
     1, "forward exact first: 1 elements"},
    {"NonFiniteGradient",
     [](AuditReport& r, double v) { r.gradients[0].nonfinite_mismatches = static_cast<std::int64_t>(v); }, 0, 3,
     "gradients exact first residual on bf16: 3 elements"},
    {"OrderRatio", [](AuditReport& r, double v) { r.order_differences[0].ratio = v; }, 1.99, 2.01,
     "order difference exact first - last"},
    {"CanonicalBits",
     [](AuditReport& r, double v) {
       r.order_differences[0].canonical = true;
       r.order_differences[0].bitwise_equal = v == 0;
     },
     0, 1, "not bitwise equal"},
    {"OrderSpread", [](AuditReport& r, double v) { r.gradients[4].errors.dk_rope = 1.3e-3 * v; }, 1.049, 1.051,
     "dk_rope errors apart"},
    {"DqRopeOfBothOrders",
     [](AuditReport& r, double v) { r.gradients[0].errors.dq_rope = r.gradients[4].errors.dq_rope = v; }, 2.37e-3,
     2.38e-3, "gradients exact first residual on bf16: dq_rope"},
    {"DkvLatentOfSplit", both(&GradientErrors::dkv_latent, Operands::kSplit), 2.9e-4, 3.1e-4,
     "gradients exact last residual on split: dkv_latent"},
    {"RowPercentile", both(&GradientErrors::dq_row_p99, Operands::kBf16), 4.4e-3, 4.5e-3,
     "gradients exact last residual on bf16: dq row p99 "},
    {"Residual", [](AuditReport& r, double v) { r.gradients[1].errors.dk_rope = *r.gradients[0].errors.dk_rope / v; },
     0.59, 0.61, "gradients exact first residual on bf16: dk_rope over that without the residual"},
    {"ResidualInDkvLatent",
     [](AuditReport& r, double v) {
       r.setup.num_tokens = r.setup.num_keys = 512;
       r.setup.topk = 256;
       r.gradients[1].errors.dkv_latent = *r.gradients[0].errors.dkv_latent / v;
     },
     0.59, 0.61, "gradients exact first residual on bf16: dkv_latent over that without the residual"},
    {"ResidualOfAFile",
     [](AuditReport& r, double v) {
       r.setup.beta.reset();
       r.gradients[1].errors.dq_latent = *r.gradients[0].errors.dq_latent / v;
     },
     1.04, 1.06, "dq_latent over that with the residual off"},
    {"GenericGradientLimit",
     [](AuditReport& r, double v) {
       r.setup.beta.reset();
       both(&GradientErrors::dq_latent, Operands::kBf16)(r, v);
     },
     2.79e-3, 2.82e-3, "gradients exact first residual on bf16: dq_latent"},
    {"Dsink", [](AuditReport& r, double v) { r.gradients[0].errors.dsink = v; }, 4.4e-3, 4.6e-3, "dsink"},
};

INSTANTIATE_TEST_SUITE_P(Rules, VerdictRule, testing::ValuesIn(kRules),
                         [](const testing::TestParamInfo<Rule>& param) { return param.param.name; });

TEST(Verdict, InfinitelyWrongFails) {
  AuditReport report = good_report();
  report.forward[0].row_gain.rms = std::numeric_limits<double>::infinity();
  EXPECT_FALSE(judge(report).passed);
}

TEST(Verdict, APipelineWithoutTheResidualIsHeldAgainstItsTwin) {
  AuditReport report = good_report();
  for (GradientEntry& entry : report.gradients) entry.judged = !*entry.residual;
  EXPECT_GT(count_failures(judge(report), "residual off bf16: dq_latent over that without the residual 1 > 0.6"), 0)
      << joined(judge(report));
}

TEST(Verdict, GradientLimitsEndWhereGradientsVanish) {
  SetupReport setup;
  setup.self_weight_median = 0.5;
  EXPECT_TRUE(has_gradient_limits(setup));
  setup.self_weight_median = 0.9999;
  EXPECT_FALSE(has_gradient_limits(setup));
  setup.self_weight_median = std::numeric_limits<double>::quiet_NaN();
  EXPECT_FALSE(has_gradient_limits(setup));
}

}  // namespace
}  // namespace sparsemla::audit
