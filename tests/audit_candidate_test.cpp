// The audit's judgement of another kernel's outputs: right ones pass, each planted fault is found, bad files are
// refused.
#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <limits>
#include <map>

#include "audit/candidate.h"
#include "audit_test_support.h"
#include "io/safetensors.h"
#include "reference/reference.h"
#include "sparsemla/bfloat16.h"
#include "sparsemla/error.h"

namespace sparsemla::audit {
namespace {

constexpr std::int64_t kTokens = 96;
constexpr std::int64_t kHeads = 8;

ProblemShape shape() { return {kTokens, kTokens, 64, kHeads, kRopeDim, 11}; }

/// fp64 tensors by name, and the file they become.
class Candidate {
 public:
  Candidate() {
    const Problem problem = make_peaked(shape(), 0.25, true);
    const reference::ForwardResult forward = reference::forward(problem.inputs());
    const reference::BackwardResult backward =
        reference::backward(problem.inputs(), problem.dout_tensor(), problem.dlse_tensor());
    tensors_ = {{"out", {forward.out, {kTokens, kHeads, 512}}},
                {"lse", {forward.lse, {kTokens, kHeads}}},
                {"dq_latent", {backward.dq_latent, {kTokens, kHeads, 512}}},
                {"dq_rope", {backward.dq_rope, {kTokens, kHeads, 64}}},
                {"dkv_latent", {backward.dkv_latent, {kTokens, 512}}},
                {"dk_rope", {backward.dk_rope, {kTokens, 64}}}};
  }

  struct Entry {
    std::vector<double> data;
    std::vector<std::int64_t> shape;
  };
  Entry& operator[](const std::string& name) { return tensors_[name]; }
  void erase(const std::string& name) { tensors_.erase(name); }
  std::vector<double>& data(const std::string& name) { return tensors_.at(name).data; }

  /// Every value through bf16, as a kernel with bf16 outputs gives it.
  void round(const std::string& name) {
    for (double& value : data(name)) value = to_float(to_bfloat16(static_cast<float>(value)));
  }

  /// [rows, 512] beside [rows, 64], under a new name.
  void fuse(const std::string& latent, const std::string& rope, const std::string& name) {
    Entry fused{{}, tensors_.at(latent).shape};
    fused.shape.back() = 576;
    for (std::size_t row = 0; row < data(latent).size() / 512; ++row) {
      fused.data.insert(fused.data.end(), data(latent).begin() + static_cast<std::ptrdiff_t>(row * 512),
                        data(latent).begin() + static_cast<std::ptrdiff_t>((row + 1) * 512));
      fused.data.insert(fused.data.end(), data(rope).begin() + static_cast<std::ptrdiff_t>(row * 64),
                        data(rope).begin() + static_cast<std::ptrdiff_t>((row + 1) * 64));
    }
    erase(latent);
    erase(rope);
    tensors_[name] = fused;
  }

  void write(const std::filesystem::path& path) const {
    std::vector<std::pair<std::string, Tensor>> views;
    for (const auto& [name, entry] : tensors_) {
      Tensor view =
          Tensor::contiguous(entry.data.data(), DataType::kFloat64, {static_cast<std::int64_t>(entry.data.size())});
      view.rank = static_cast<int>(entry.shape.size());
      std::int64_t stride = 1;
      for (int axis = view.rank - 1; axis >= 0; --axis) {
        view.shape[axis] = entry.shape[axis];
        view.strides[axis] = stride;
        stride *= entry.shape[axis];
      }
      views.emplace_back(name, view);
    }
    io::write_safetensors(path, views);
  }

 private:
  std::map<std::string, Entry> tensors_;
};

AuditReport audit(const Candidate& candidate) {
  const TemporaryFolder folder;
  candidate.write(folder / "candidate.safetensors");
  AuditRequest request;
  request.generated = GeneratedSource{shape(), 0.25};
  request.candidate_file = folder / "candidate.safetensors";
  return run_audit(request);
}

void expect_refused(const Candidate& candidate, const std::string& argument) {
  try {
    (void)audit(candidate);
    FAIL() << "accepted: " << argument;
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.argument()).find(argument), std::string::npos) << error.what();
  }
}

TEST(Candidate, TheReferenceItselfPassesWithErrorsOfZero) {
  const AuditReport report = audit(Candidate());
  ASSERT_EQ(report.forward.size(), 1U);
  EXPECT_EQ(report.forward[0].pipeline, "candidate");
  EXPECT_EQ(report.forward[0].order, "given");
  EXPECT_EQ(report.forward[0].out_rel_l2, 0.0);
  EXPECT_EQ(report.forward[0].lse_max_abs, 0.0);
  ASSERT_EQ(report.gradients.size(), 1U);
  EXPECT_EQ(report.gradients[0].errors.dq_latent, 0.0);
  EXPECT_EQ(report.gradients[0].errors.dk_rope, 0.0);
  EXPECT_TRUE(report.verdict.passed) << joined(report.verdict);
}

TEST(Candidate, OneRoundingToBf16PassesAndStandsOnTheFloors) {
  Candidate candidate;
  for (const char* name : {"out", "dq_latent", "dq_rope"}) candidate.round(name);
  const AuditReport report = audit(candidate);
  EXPECT_DOUBLE_EQ(report.forward[0].out_rel_l2, report.floors.out_rel_l2);
  EXPECT_DOUBLE_EQ(report.forward[0].row_gain.rms, report.floors.row_gain_rms);
  EXPECT_NEAR(*report.gradients[0].errors.dq_latent, 1.66e-3, 5e-5);
  EXPECT_TRUE(report.verdict.passed) << joined(report.verdict);
}

TEST(Candidate, PartsMayBeMissingAndGradientsFused) {
  Candidate candidate;
  candidate.fuse("dq_latent", "dq_rope", "dq");
  candidate.fuse("dkv_latent", "dk_rope", "dkv");
  candidate["dkv"].shape = {kTokens, 1, 576};
  candidate.erase("lse");
  const AuditReport report = audit(candidate);
  EXPECT_FALSE(report.forward[0].lse_max_abs.has_value());
  EXPECT_EQ(report.gradients[0].errors.dq_rope, 0.0);
  EXPECT_EQ(report.gradients[0].errors.dkv_latent, 0.0);
  EXPECT_TRUE(report.verdict.passed) << joined(report.verdict);

  Candidate forward_only;
  for (const char* name : {"dq_latent", "dq_rope", "dkv_latent", "dk_rope"}) forward_only.erase(name);
  EXPECT_TRUE(audit(forward_only).gradients.empty());
}

/// A fault, and words of the sentence that must report it.
struct Fault {
  const char* name;
  std::function<void(Candidate&)> plant;
  const char* sentence;
};

class PlantedFault : public testing::TestWithParam<Fault> {};

TEST_P(PlantedFault, IsFound) {
  Candidate candidate;
  GetParam().plant(candidate);
  const AuditReport report = audit(candidate);
  EXPECT_FALSE(report.verdict.passed);
  EXPECT_GE(count_failures(report.verdict, GetParam().sentence), 1) << joined(report.verdict);
}

void scale(std::vector<double>& values, double factor) {
  for (double& value : values) value *= factor;
}

const Fault kFaults[] = {
    // Far below the rounding of single elements, but the same way on a whole row.
    {"CoherentGain", [](Candidate& c) { scale(c.data("out"), 1.0005); }, "candidate given: row gain rms"},
    {"IncoherentNoise",
     [](Candidate& c) {
       for (std::size_t i = 0; i < c.data("out").size(); ++i) c.data("out")[i] *= i % 2 == 0 ? 1.004 : 0.996;
     },
     "candidate given: out rel_l2"},
    {"OneNan", [](Candidate& c) { c.data("out")[777] = std::numeric_limits<double>::quiet_NaN(); }, "not finite"},
    {"OneInfinity", [](Candidate& c) { c.data("dkv_latent")[5] = std::numeric_limits<double>::infinity(); },
     "gradients candidate given: 1 elements are not finite"},
    {"LseOfBase2", [](Candidate& c) { scale(c.data("lse"), 1.4426950408889634); }, "lse max abs error"},
    {"LseOfOneRow", [](Candidate& c) { c.data("lse")[100] += 1e-3; }, "lse max abs error"},
    {"DqLatent", [](Candidate& c) { scale(c.data("dq_latent"), 1.01); }, "gradients candidate given: dq_latent"},
    {"DqRope", [](Candidate& c) { scale(c.data("dq_rope"), 0.99); }, "gradients candidate given: dq_rope"},
    {"DkvLatent", [](Candidate& c) { scale(c.data("dkv_latent"), 1.01); }, "gradients candidate given: dkv_latent"},
    {"DkRope", [](Candidate& c) { scale(c.data("dk_rope"), -1); }, "gradients candidate given: dk_rope"},
    {"SquaresThatOverflow", [](Candidate& c) { c.data("dk_rope")[0] = 1e200; }, "gradients candidate given: dk_rope"},
};

INSTANTIATE_TEST_SUITE_P(Faults, PlantedFault, testing::ValuesIn(kFaults),
                         [](const testing::TestParamInfo<Fault>& param) { return param.param.name; });

TEST(Candidate, BadFilesAreRefusedByName) {
  Candidate candidate;
  candidate.erase("out");
  expect_refused(candidate, "out");

  for (const char* name : {"out", "lse", "dq_latent", "dq_rope", "dkv_latent", "dk_rope"}) {
    candidate = Candidate();
    candidate[name].shape.insert(candidate[name].shape.begin(), 1);
    expect_refused(candidate, name);
  }
  candidate = Candidate();
  candidate["output"] = candidate["out"];
  expect_refused(candidate, "output");
  candidate = Candidate();
  candidate["dq"] = candidate["dq_latent"];
  expect_refused(candidate, "dq");
  candidate = Candidate();
  candidate["dsink"] = {std::vector<double>(kHeads), {kHeads}};  // the problem has no sink
  expect_refused(candidate, "dsink");
}

TEST(Candidate, AnOutputOfRunIsAccepted) {
  Candidate candidate;
  candidate["max_logits"] = candidate["lse"];
  candidate["out_residual"] = candidate["out"];
  const AuditReport report = audit(candidate);
  EXPECT_TRUE(report.verdict.passed) << joined(report.verdict);
  EXPECT_EQ(report.notes.size(), 2U) << "what is not judged is said";
}

TEST(Candidate, PipelinesShownForComparisonAreNotJudged) {
  const TemporaryFolder folder;
  Candidate().write(folder / "candidate.safetensors");
  AuditRequest request = small_request({"lazy"});
  request.generated->shape = shape();
  request.generated->shape.topk = 64;
  request.candidate_file = folder / "candidate.safetensors";
  request.pipelines = {{"lazy+key=16", parse_pipeline("lazy+key=16"), false}};
  EXPECT_TRUE(run_audit(request).verdict.passed);
  request.pipelines[0].judged = true;
  EXPECT_FALSE(run_audit(request).verdict.passed);
}

}  // namespace
}  // namespace sparsemla::audit
