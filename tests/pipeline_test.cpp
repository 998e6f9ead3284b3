#include "sparsemla/pipeline.h"

#include <gtest/gtest.h>

#include <limits>

#include "core/softmax_state.h"
#include "sparsemla/error.h"

namespace sparsemla {
namespace {

TEST(PipelineTest, NamesRoundTrip) {
  for (const char* name : {"exact", "lazy", "threshold=3.5", "lazy+key=128", "exact+first-to-last", "lazy+rounded-sum",
                           "exact+no-residual", "exact+split", "exact+canonical",
                           "threshold=2+key=7+first-to-last+rounded-sum+no-residual+split+canonical"}) {
    EXPECT_EQ(to_string(parse_pipeline(name)), name);
  }
  EXPECT_EQ(parse_pipeline("canonical"), parse_pipeline("exact+canonical"));
  EXPECT_EQ(parse_pipeline("exact"), Pipeline::training());
  EXPECT_EQ(parse_pipeline("lazy+no-residual"), Pipeline::lazy_inference());
}

TEST(PipelineTest, UnknownWordsAreNamed) {
  for (const char* name : {"", "eager", "exact+", "exact+key=", "exact+key=1x", "threshold=", "lazy++split"}) {
    EXPECT_THROW((void)parse_pipeline(name), Error) << name;
  }
  try {
    (void)parse_pipeline("lazy+keys=3");
    FAIL();
  } catch (const Error& error) {
    EXPECT_EQ(error.argument(), "pipeline");
    EXPECT_EQ(error.found(), "\"keys=3\"");
  }
}

TEST(PipelineTest, ThresholdBoundsAreThoseOfThePDtype) {
  EXPECT_NEAR(rescale_threshold_bound_log2(DataType::kBFloat16), 127.99, 0.01);
  EXPECT_NEAR(rescale_threshold_bound_log2(DataType::kFloat16), 15.999, 0.001);
  EXPECT_NEAR(rescale_threshold_bound_log2(DataType::kFloat8E4M3), 8.807, 0.001);
  EXPECT_NEAR(rescale_threshold_bound_log2(DataType::kFloat16, 4.0), 11.999, 0.001);
  EXPECT_THROW((void)rescale_threshold_bound_log2(DataType::kInt32), Error);
}

TEST(SoftmaxRuleTest, ExactTakesEveryLargerMaxLazyWaits) {
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  EXPECT_TRUE(takes_new_max(1.0F, 1.001F, 1.0F, 0.0F));
  EXPECT_FALSE(takes_new_max(1.0F, 1.0F, 1.0F, 0.0F));
  EXPECT_FALSE(takes_new_max(1.0F, 0.0F, 1.0F, 0.0F));
  EXPECT_FALSE(takes_new_max(1.0F, 9.0F, 1.0F, 8.0F));  // exactly 8 log2 units: still stale
  EXPECT_TRUE(takes_new_max(1.0F, 9.5F, 1.0F, 8.0F));
  EXPECT_TRUE(takes_new_max(-kInfinity, -3.0e38F, 1.0F, 8.0F));  // the first block
  EXPECT_FALSE(takes_new_max(-kInfinity, -kInfinity, 1.0F, 0.0F));
  EXPECT_EQ(subtrahend(-kInfinity), 0.0F);
  EXPECT_EQ(subtrahend(2.5F), 2.5F);
}

}  // namespace
}  // namespace sparsemla
