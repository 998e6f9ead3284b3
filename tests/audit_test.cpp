// The audit as an experiment: what must pass passes, what is known to be wrong is found.
#include "audit/audit.h"

#include <gtest/gtest.h>

#include <cmath>
#include <nlohmann/json.hpp>
#include <set>

#include "audit_test_support.h"
#include "io/safetensors.h"
#include "numerics/budgets.h"
#include "sparsemla/error.h"

namespace sparsemla::audit {
namespace {

TEST(OrderTest, ExactPassesAndLazyFails) {
  const AuditReport report = run_audit(small_request({"exact", "lazy"}));
  const OrderDifference& exact = difference_of(report, "exact");
  const OrderDifference& lazy = difference_of(report, "lazy");
  EXPECT_LT(exact.ratio, kMaxOrderGainOverNoiseFloor);
  EXPECT_GE(lazy.ratio, 5.0);
  EXPECT_GT(exact.ratio, 0.0) << "the two orders must differ, or nothing was compared";
  for (const char* order : {"first", "last"}) {
    EXPECT_LT(forward_of(report, "exact", order).row_gain.rms, kMaxRowGainOverIdeal * report.floors.row_gain_rms);
  }
  EXPECT_GT(forward_of(report, "lazy", "last").row_gain.rms, 5 * report.floors.row_gain_rms);
  EXPECT_FALSE(report.verdict.passed);
  EXPECT_EQ(count_failures(report.verdict, "exact"), 0) << joined(report.verdict);
  EXPECT_EQ(count_failures(report.verdict, "forward lazy last: row gain rms"), 1) << joined(report.verdict);
  EXPECT_EQ(count_failures(report.verdict, "order difference lazy"), 1) << joined(report.verdict);
}

struct Counts {
  std::int64_t tokens, keys, topk, heads;
};

class OrderTestCounts : public testing::TestWithParam<Counts> {};

TEST_P(OrderTestCounts, ThresholdZeroPassesAndThresholdEightFails) {
  AuditRequest request = small_request({"exact", "exact+threshold=8"});
  ProblemShape& shape = request.generated->shape;
  shape.num_tokens = GetParam().tokens;
  shape.num_keys = GetParam().keys;
  shape.topk = GetParam().topk;
  shape.num_heads = GetParam().heads;
  const AuditReport report = run_audit(request);
  EXPECT_LT(difference_of(report, "exact").ratio, kMaxOrderGainOverNoiseFloor);
  EXPECT_GE(difference_of(report, "exact+threshold=8").ratio, 5.0);
  EXPECT_EQ(count_failures(report.verdict, "forward exact "), 0) << joined(report.verdict);
  EXPECT_EQ(count_failures(report.verdict, "order difference exact "), 0) << joined(report.verdict);
}

INSTANTIATE_TEST_SUITE_P(OddCounts, OrderTestCounts,
                         testing::Values(Counts{257, 263, 131, 9}, Counts{200, 200, 193, 64},
                                         Counts{301, 301, 100, 5}));

TEST(OrderTest, GradientErrorsOfTwoOrdersAgreeOnlyWithTheExactMax) {
  AuditRequest request = small_request({"exact", "lazy"});
  request.gradients = true;
  const AuditReport report = run_audit(request);
  EXPECT_EQ(count_failures(report.verdict, "exact"), 0) << joined(report.verdict);
  EXPECT_GT(count_failures(report.verdict, "gradients lazy first residual on bf16 and last: dq_latent errors apart"), 0)
      << joined(report.verdict);
  // pipelines x orders x residual x operands
  EXPECT_EQ(report.gradients.size(), 16U);
  const GradientErrors split = gradients_of(report, "exact", "first", true, Operands::kSplit).errors;
  EXPECT_LT(*split.dkv_latent, 2e-4);
  EXPECT_LT(*split.dk_rope, 2e-4);
}

TEST(OrderTest, CanonicalIsBitwiseEqualAndPassesEveryOtherRule) {
  AuditRequest request = small_request({"canonical", "exact"});
  request.gradients = true;
  const AuditReport report = run_audit(request);
  EXPECT_TRUE(difference_of(report, "canonical").bitwise_equal);
  EXPECT_EQ(difference_of(report, "canonical").out_rel_l2, 0.0);
  EXPECT_FALSE(difference_of(report, "exact").bitwise_equal) << "then canonical proves nothing";
  const GradientErrors first = gradients_of(report, "canonical", "first", true, Operands::kBf16).errors;
  const GradientErrors last = gradients_of(report, "canonical", "last", true, Operands::kBf16).errors;
  EXPECT_EQ(first.dq_latent, last.dq_latent);
  EXPECT_EQ(first.dkv_latent, last.dkv_latent);
  EXPECT_TRUE(report.verdict.passed) << joined(report.verdict);
}

TEST(ResidualTest, PassesWithTheResidualAndFailsWithout) {
  AuditRequest request = small_request({"exact", "exact+no-residual"}, 0.4);
  request.gradients = true;
  const AuditReport report = run_audit(request);
  for (const char* order : {"first", "last"}) {
    const GradientErrors on = gradients_of(report, "exact", order, true, Operands::kBf16).errors;
    const GradientErrors off = gradients_of(report, "exact", order, false, Operands::kBf16).errors;
    EXPECT_LT(*on.dq_latent, kMaxResidualOverNone * *off.dq_latent);
    EXPECT_LT(*on.dq_rope, kMaxResidualOverNone * *off.dq_rope);
    EXPECT_LT(*on.dk_rope, kMaxResidualOverNone * *off.dk_rope);
    EXPECT_LT(*on.dkv_latent, kMaxResidualOverNone * *off.dkv_latent);
  }
  EXPECT_EQ(count_failures(report.verdict, "gradients exact "), 0) << joined(report.verdict);
  EXPECT_GT(count_failures(report.verdict, "gradients exact+no-residual first residual off bf16: dq_latent"), 0)
      << joined(report.verdict);
  EXPECT_GT(count_failures(report.verdict, "over that without the residual"), 0) << joined(report.verdict);
}

TEST(Report, DoesNotDependOnTheNumberOfThreads) {
  AuditRequest request = small_request({"lazy", "exact"});
  request.generated->shape.num_tokens = request.generated->shape.num_keys = 97;
  request.gradients = true;
  request.options.num_threads = 1;
  const std::string one = to_json(run_audit(request));
  request.options.num_threads = 3;
  EXPECT_EQ(one, to_json(run_audit(request)));
}

std::set<std::string> keys_of(const nlohmann::json& object) {
  std::set<std::string> keys;
  for (const auto& item : object.items()) keys.insert(item.key());
  return keys;
}

void expect_keys(const nlohmann::json& object, const std::set<std::string>& wanted) {
  const std::set<std::string> found = keys_of(object);
  for (const std::string& key : wanted) EXPECT_TRUE(found.count(key) == 1) << key << " in " << object.dump();
}

TEST(Report, JsonHasEveryKeyOfTheContract) {
  AuditRequest request = small_request({"lazy", "exact"});
  request.generated->shape.num_tokens = request.generated->shape.num_keys = 80;
  request.gradients = true;
  const auto json = nlohmann::json::parse(to_json(run_audit(request)));
  expect_keys(json, {"setup", "floors", "forward", "order_difference", "gradients", "verdict"});
  expect_keys(json["setup"], {"tokens", "keys", "topk", "heads", "latent_dim", "rope_dim", "beta", "seed",
                              "softmax_scale", "backend", "self_weight_median", "self_weight_p90"});
  expect_keys(json["floors"], {"out_rel_l2", "row_gain_rms"});
  expect_keys(json["forward"][0], {"pipeline", "order", "out_rel_l2", "row_gain_rms", "row_gain_p99", "row_gain_max",
                                   "lse_max_abs", "row_gain_histogram"});
  expect_keys(json["order_difference"][0],
              {"pipeline", "orders", "out_rel_l2", "row_gain_rms", "noise_floor", "ratio", "bitwise_equal"});
  expect_keys(json["gradients"][0], {"pipeline", "order", "residual", "operands", "dq_rope_rel_l2", "dq_latent_rel_l2",
                                     "dk_rope_rel_l2", "dkv_latent_rel_l2", "dq_row_p99", "dq_row_p999"});
  expect_keys(json["verdict"], {"passed", "failures"});
  EXPECT_EQ(json["order_difference"][0]["orders"], nlohmann::json({"first", "last"}));
  const auto& histogram = json["forward"][0]["row_gain_histogram"];
  EXPECT_EQ(histogram["edges"].size(), histogram["counts"].size() + 1);
  EXPECT_DOUBLE_EQ(histogram["edges"].front().get<double>(), 1e-7);
  EXPECT_DOUBLE_EQ(histogram["edges"].back().get<double>(), 1e-1);
  std::int64_t rows = 0;
  for (const auto& count : histogram["counts"]) rows += count.get<std::int64_t>();
  EXPECT_EQ(rows, 80 * 16);
}

TEST(Report, TableHasARowForEachEntryAndTheVerdict) {
  AuditRequest request = small_request({"lazy", "exact"});
  request.gradients = true;
  request.generated->shape.num_tokens = request.generated->shape.num_keys = 80;
  const AuditReport report = run_audit(request);
  const std::string table = to_table(report);
  const auto lines = [&](std::string_view start) {
    std::int64_t count = 0;
    for (std::size_t at = table.find(start); at != std::string::npos; at = table.find(start, at + 1)) {
      count += at == 0 || table[at - 1] == '\n' ? 1 : 0;
    }
    return count;
  };
  EXPECT_EQ(lines("lazy "), 2 + 1 + 8);
  EXPECT_EQ(lines("exact "), 2 + 1 + 8);
  EXPECT_EQ(lines("verdict  "), 1);
}

TEST(Setup, PresetsAreThoseOfTheContract) {
  const auto expect = [](const char* name, std::int64_t tokens, std::int64_t topk, double beta) {
    const GeneratedSource source = preset(name);
    EXPECT_EQ(source.shape.num_tokens, tokens) << name;
    EXPECT_EQ(source.shape.num_keys, tokens) << name;
    EXPECT_EQ(source.shape.topk, topk) << name;
    EXPECT_EQ(source.shape.num_heads, 128) << name;
    EXPECT_EQ(source.beta, beta) << name;
  };
  expect("order", 512, 256, 0.25);
  expect("residual", 512, 256, 0.4);
  expect("peaked-4096", 4096, 2048, 0.25);
  EXPECT_THROW((void)preset("peaked"), Error);
}

TEST(Setup, AFileOfTheSameProblemGivesTheSameFigures) {
  const TemporaryFolder folder;
  AuditRequest request = small_request({"lazy", "exact"});
  request.write_inputs = folder / "inputs.safetensors";
  request.gradients = true;
  const AuditReport generated = run_audit(request);

  AuditRequest from_file = small_request({"lazy", "exact"});
  from_file.generated.reset();
  from_file.input_file = request.write_inputs;
  from_file.gradients = true;
  const AuditReport read = run_audit(from_file);
  // In a file the dominant key is found by its weight. It is the own key wherever that has the largest weight, which at
  // this beta is nearly everywhere.
  EXPECT_NEAR(read.setup.self_weight_median, generated.setup.self_weight_median, 0.02);
  EXPECT_GE(read.setup.self_weight_median, generated.setup.self_weight_median);
  EXPECT_EQ(read.floors.out_rel_l2, generated.floors.out_rel_l2);
  EXPECT_NEAR(difference_of(read, "lazy").ratio, difference_of(generated, "lazy").ratio, 0.3);
  EXPECT_FALSE(read.setup.beta.has_value());
  EXPECT_NEAR(*read.gradients[0].errors.dq_latent, *generated.gradients[0].errors.dq_latent, 1e-5);
  EXPECT_EQ(count_failures(read.verdict, "exact"), 0) << joined(read.verdict);
  EXPECT_GT(count_failures(read.verdict, "lazy"), 0);
}

TEST(Setup, SlotsPastTheLengthStayEmptyInEveryOrder) {
  const TemporaryFolder folder;
  Problem problem = make_peaked({40, 40, 20, 3, kRopeDim, 5}, 0.25, false);
  problem.topk_length.assign(40, 7);  // negative, zero, short, longer than the list
  problem.topk_length[0] = -2;
  problem.topk_length[1] = 0;
  problem.topk_length[2] = 99;
  const AttentionInputs inputs = problem.inputs();
  io::write_safetensors(folder / "in.safetensors", {{"q_latent", inputs.q_latent},
                                                    {"q_rope", inputs.q_rope},
                                                    {"kv_latent", inputs.kv_latent},
                                                    {"k_rope", inputs.k_rope},
                                                    {"indices", inputs.indices},
                                                    {"topk_length", inputs.topk_length}});
  AuditRequest request = small_request({"exact"});
  request.generated.reset();
  request.input_file = folder / "in.safetensors";
  request.orders = {SlotOrder::kRandom, SlotOrder::kAscending, SlotOrder::kDominantFirst, SlotOrder::kDominantLast};
  const AuditReport report = run_audit(request);
  // A slot too many or too few would change lse by far more than rounding.
  for (const ForwardEntry& entry : report.forward) {
    EXPECT_LT(*entry.lse_max_abs, 1e-5) << entry.order;
    EXPECT_EQ(entry.nonfinite_mismatches, 0) << entry.order;
  }
}

TEST(Setup, GradientsOfAFileNeedDout) {
  const TemporaryFolder folder;
  const Problem problem = make_peaked({4, 4, 4, 2, kRopeDim, 5}, 0.25, false);
  const AttentionInputs inputs = problem.inputs();
  io::write_safetensors(folder / "in.safetensors", {{"q_latent", inputs.q_latent},
                                                    {"q_rope", inputs.q_rope},
                                                    {"kv_latent", inputs.kv_latent},
                                                    {"k_rope", inputs.k_rope},
                                                    {"indices", inputs.indices}});
  AuditRequest request = small_request({"exact"});
  request.generated.reset();
  request.input_file = folder / "in.safetensors";
  EXPECT_NO_THROW((void)run_audit(request));
  request.gradients = true;
  try {
    (void)run_audit(request);
    FAIL() << "accepted";
  } catch (const Error& error) {
    EXPECT_EQ(error.argument(), "dout");
  }
}

TEST(Setup, RefusesWhatCannotBeAudited) {
  const auto rejects = [](const AuditRequest& request) { EXPECT_THROW((void)run_audit(request), Error); };
  AuditRequest request = small_request({"exact"});
  request.input_file = "some.safetensors";  // a second source
  rejects(request);
  request = small_request({"exact"});
  request.generated.reset();  // no source
  rejects(request);
  request = small_request({});
  rejects(request);
  request = small_request({"exact"});
  request.orders.clear();
  rejects(request);
  request = small_request({"exact+threshold=128"});
  rejects(request);
  request = small_request({"exact"});
  request.options.backend = "sm90";  // tensors are on the CPU
  rejects(request);
}

}  // namespace
}  // namespace sparsemla::audit
