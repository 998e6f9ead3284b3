// Every case of the table, through every engine of this machine and a cover of pipelines, against the fp64 reference.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <fstream>
#include <set>
#include <sstream>

#include "cases/conformance.h"

namespace sparsemla {
namespace {

using cases::Case;
using cases::Conformance;
using cases::Failures;

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
constexpr bool kSanitized = true;
#else
constexpr bool kSanitized = false;
#endif

/// What a pipeline can be: both thresholds and an odd one, block sizes that divide nothing, both walks, both row sums,
/// with and without the residual, split operands, canonical order, and mixtures.
const std::vector<std::string>& pipelines() {
  static const std::vector<std::string> kPipelines = {"exact",
                                                      "lazy+no-residual",
                                                      "exact+key=1",
                                                      "exact+split",
                                                      "lazy+key=128",
                                                      "exact+key=7+canonical",
                                                      "exact+first-to-last",
                                                      "exact+key=1000",
                                                      "lazy+first-to-last+key=128",
                                                      "exact+rounded-sum",
                                                      "exact+no-residual",
                                                      "threshold=60+key=7",
                                                      "lazy+rounded-sum+canonical",
                                                      "lazy+split+key=100"};
  return kPipelines;
}

struct Variant {
  CpuEngine engine;
  std::string pipeline;
  DataType dq_dtype;
};

std::string describe(const Variant& setup) {
  return setup.pipeline + (setup.engine == CpuEngine::kAmx ? " on amx" : " on fp32") +
         (setup.dq_dtype == DataType::kFloat32 ? ", dq fp32" : ", dq bf16");
}

/// Small cases meet everything. Larger ones meet the training default on every engine and, by their place in the table,
/// some of the other pipelines, so that neighbouring cases (which are alike) meet different ones.
std::vector<Variant> cover(const Case& entry, const Problem& problem, std::size_t place) {
  const std::int64_t pairs = problem.num_tokens * problem.num_heads * problem.topk;
  const std::size_t count = pipelines().size();
  const std::size_t others = pairs <= 1000 && !kSanitized ? count - 1 : (entry.has(cases::kLarge) ? 1 : 4);
  std::vector<Variant> runs;
  for (const CpuEngine engine : cases::engines()) {
    runs.push_back({engine, pipelines()[0], DataType::kBFloat16});
    if (entry.has(cases::kLarge)) break;  // the one other run takes the other engine
  }
  for (std::size_t i = 0; i < others; ++i) {
    const std::size_t pipeline = 1 + (place * 4 + i) % (count - 1);
    const DataType dq = (place + i) % 2 == 0 ? DataType::kFloat32 : DataType::kBFloat16;
    if (others == count - 1) {
      for (const CpuEngine engine : cases::engines()) runs.push_back({engine, pipelines()[pipeline], dq});
    } else {
      const std::size_t engine =
          entry.has(cases::kLarge) ? cases::engines().size() - 1 : (place + i) % cases::engines().size();
      runs.push_back({cases::engines()[engine], pipelines()[pipeline], dq});
    }
  }
  return runs;
}

class ConformanceTest : public testing::TestWithParam<std::size_t> {};

TEST_P(ConformanceTest, AgreesWithTheReference) {
  const Case& entry = cases::table()[GetParam()];
  if (!entry.has(cases::kCpu)) GTEST_SKIP() << "not for the CPU";
  if (kSanitized && entry.has(cases::kLarge) && std::getenv("SPARSEMLA_LARGE_CASES") == nullptr) {
    GTEST_SKIP() << "takes minutes under a sanitizer; SPARSEMLA_LARGE_CASES=1 runs it";
  }
  Conformance conformance(entry);
  for (const std::string& failure : conformance.check_reference()) ADD_FAILURE() << "reference: " << failure;
  for (const Variant& setup : cover(entry, conformance.problem(), GetParam())) {
    // AMX reads subnormal bf16 numbers as 0; the case is about those.
    if (entry.has(cases::kSubnormal) && setup.engine == CpuEngine::kAmx) continue;
    Options options;
    options.pipeline = parse_pipeline(setup.pipeline);
    options.cpu_engine = setup.engine;
    for (const std::string& failure : conformance.check_run(options, setup.dq_dtype)) {
      ADD_FAILURE() << describe(setup) << ": " << failure;
    }
  }
  RecordProperty("worst_share_of_bound", std::to_string(conformance.worst_ratio()));
}

std::vector<std::size_t> all_places() {
  std::vector<std::size_t> places(cases::table().size());
  for (std::size_t i = 0; i < places.size(); ++i) places[i] = i;
  return places;
}

INSTANTIATE_TEST_SUITE_P(Table, ConformanceTest, testing::ValuesIn(all_places()),
                         [](const auto& test) { return cases::table()[test.param].name; });

TEST(CaseTable, NamesAreUniqueAndStandInTheDocument) {
  std::ifstream file(std::string(SPARSEMLA_TEST_DATA) + "/../../docs/cases.md");
  ASSERT_TRUE(file.good());
  std::stringstream text;
  text << file.rdbuf();
  std::set<std::string> names;
  for (const Case& entry : cases::table()) {
    EXPECT_TRUE(names.insert(entry.name).second) << entry.name;
    EXPECT_NE(text.str().find("`" + entry.name + "`"), std::string::npos) << entry.name << " is not in docs/cases.md";
    for (const std::string& report : entry.reports) {
      EXPECT_NE(text.str().find(report), std::string::npos) << report << " is not in docs/cases.md";
    }
  }
}

TEST(CaseTable, TheCoverMeetsEveryPipelineOnEveryEngine) {
  std::set<std::string> met;
  for (std::size_t place = 0; place < cases::table().size(); ++place) {
    const Case& entry = cases::table()[place];
    if (entry.has(cases::kLarge)) continue;
    for (const Variant& setup : cover(entry, entry.make(), place)) met.insert(describe(setup));
  }
  for (const std::string& pipeline : pipelines()) {
    for (const CpuEngine engine : cases::engines()) {
      const bool bf16 = met.count(describe({engine, pipeline, DataType::kBFloat16})) != 0;
      const bool fp32 = met.count(describe({engine, pipeline, DataType::kFloat32})) != 0;
      EXPECT_TRUE(bf16 || fp32) << pipeline;
    }
  }
}

// A comparer that cannot fail proves nothing: each of these is a fault that some kernel has had.
class Checker : public testing::Test {
 protected:
  static Failures damaged(const char* name, const std::function<void(cases::ForwardOutputs&)>& damage) {
    Conformance conformance(cases::find(name));
    const Options options;
    cases::ForwardOutputs outputs = cases::run_forward(conformance.problem().inputs(), options);
    EXPECT_TRUE(conformance.check_forward(outputs, cases::pipeline_of(options)).empty());
    damage(outputs);
    return conformance.check_forward(outputs, cases::pipeline_of(options));
  }
};

TEST_F(Checker, SeesOneRowInAHundredWrongByTwoPercent) {
  EXPECT_FALSE(damaged("heads_40", [](cases::ForwardOutputs& outputs) {
                 auto* row = static_cast<BFloat16*>(outputs.out.tensor().data) + 77 * kLatentDim;
                 for (std::int64_t d = 0; d < kLatentDim; ++d) row[d] = to_bfloat16(to_float(row[d]) * 1.02F);
               }).empty());
}

TEST_F(Checker, SeesOneElementWrong) {
  EXPECT_FALSE(damaged("topk_300", [](cases::ForwardOutputs& outputs) {
                 static_cast<BFloat16*>(outputs.out.tensor().data)[5 * kLatentDim + 3] = to_bfloat16(0.9F);
               }).empty());
}

TEST_F(Checker, SeesAZeroInPlaceOfANan) {
  EXPECT_FALSE(damaged("nan_in_key_latent", [](cases::ForwardOutputs& outputs) {
                 static_cast<BFloat16*>(outputs.out.tensor().data)[0] = to_bfloat16(0.0F);
               }).empty());
}

TEST_F(Checker, SeesAnLseInBaseTwo) {
  EXPECT_FALSE(damaged("lse_is_natural", [](cases::ForwardOutputs& outputs) {
                 static_cast<float*>(outputs.lse.tensor().data)[0] *= 1.44269504F;
               }).empty());
}

TEST_F(Checker, SeesALargeResidual) {
  EXPECT_FALSE(damaged("heads_3", [](cases::ForwardOutputs& outputs) {
                 static_cast<BFloat16*>(outputs.out_residual.tensor().data)[100] = to_bfloat16(0.01F);
               }).empty());
}

TEST_F(Checker, SeesAWriteBesideTheOutput) {
  EXPECT_FALSE(damaged("heads_3", [](cases::ForwardOutputs& outputs) {
                 static_cast<BFloat16*>(outputs.out.tensor().data)[-1] = to_bfloat16(0.0F);
               }).empty());
}

TEST_F(Checker, SeesADroppedGradientIntoLse) {
  Conformance conformance(cases::find("dlse_and_sink"));
  const Options options;
  const auto outputs = cases::run_forward(conformance.problem().inputs(), options);
  const auto gradients = cases::run_backward(conformance.problem().inputs(), outputs,
                                             conformance.problem().dout_tensor(), Tensor{}, options);
  EXPECT_FALSE(conformance.check_backward(gradients, cases::pipeline_of(options), DataType::kBFloat16).empty());
}

}  // namespace
}  // namespace sparsemla
