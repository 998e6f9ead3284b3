// Every case of the table on the device, in each pipeline that is built there, against the fp64 reference.
#include <algorithm>
#include <array>
#include <string_view>

#include "sparsemla/error.h"
#include "tests/cuda/fixture.h"

namespace sparsemla::cuda_test {
namespace {

using cases::Case;
using cases::Layout;

/// Rows of bf16 tensors must be packed and begin at multiples of 16 bytes; the other layouts are refused.
bool is_taken(Layout layout) {
  return layout == Layout::kContiguous || layout == Layout::kFused || layout == Layout::kBroadcast ||
         layout == Layout::kAlignedRows;
}

/// What a caller gets who names no pipeline, then those he can name.
std::vector<Options> runs_of(const Case& entry) {
  Options training;
  training.backend = cases::kDeviceBackend;
  Options inference = training;
  inference.purpose = Purpose::kInference;
  std::vector<Options> runs{training, inference, options_of("lazy+no-residual"), options_of("exact+canonical")};
  if (entry.has(cases::kLarge)) return runs;
  for (const char* pipeline : {"lazy", "exact+first-to-last", "lazy+first-to-last+no-residual",
                               "lazy+canonical+no-residual", "threshold=60", "threshold=0.5+first-to-last"}) {
    runs.push_back(options_of(pipeline));
  }
  return runs;
}

void expect_refused(const Case& entry) {
  const Problem problem = entry.make();
  const cases::LaidOutProblem laid_out(problem, entry.layout);
  cases::ForwardOutputs outputs = cases::make_forward_outputs(laid_out.inputs(), true, entry.layout);
  try {
    cases::run_forward_into(outputs, laid_out.inputs(), options_of("exact"));
    ADD_FAILURE() << to_string(entry.layout) << " was taken";
  } catch (const Error& error) {
    constexpr std::array<std::string_view, 6> kRows = {"q_latent", "q_rope", "kv_latent",
                                                       "k_rope",   "out",    "out_residual"};
    EXPECT_NE(std::find(kRows.begin(), kRows.end(), error.argument()), kRows.end()) << error.what();
    EXPECT_NE(std::string(error.what()).find("16 bytes"), std::string::npos) << error.what();
  }
  EXPECT_TRUE(outputs.untouched());
}

class CudaForwardCases : public CudaTest, public testing::WithParamInterface<std::size_t> {};

TEST_P(CudaForwardCases, AgreesWithTheReference) {
  const Case& original = cases::table()[GetParam()];
  if (!original.has(cases::kGpu) || !original.has(cases::kForward)) GTEST_SKIP() << "not for a device";
  Case entry = cases::forward_only(original);
  if (!is_taken(entry.layout)) {
    expect_refused(entry);
    entry.layout = Layout::kContiguous;
  }
  cases::Conformance conformance(entry);
  for (const Options& options : runs_of(entry)) {
    const std::string name = options.pipeline ? to_string(*options.pipeline)
                                              : (options.purpose == Purpose::kTraining ? "training" : "inference");
    for (const std::string& failure : conformance.check_run(options)) ADD_FAILURE() << name << ": " << failure;
  }
  RecordProperty("worst_share_of_bound", std::to_string(conformance.worst_ratio()));
}

std::vector<std::size_t> all_places() {
  std::vector<std::size_t> places(cases::table().size());
  for (std::size_t i = 0; i < places.size(); ++i) places[i] = i;
  return places;
}

INSTANTIATE_TEST_SUITE_P(Table, CudaForwardCases, testing::ValuesIn(all_places()),
                         [](const auto& test) { return cases::table()[test.param].name; });

}  // namespace
}  // namespace sparsemla::cuda_test
