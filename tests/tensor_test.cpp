#include "sparsemla/tensor.h"

#include <gtest/gtest.h>

#include <cmath>
#include <vector>

#include "sparsemla/bfloat16.h"
#include "sparsemla/error.h"

namespace sparsemla {
namespace {

TEST(TensorTest, ContiguousStrides) {
  const std::vector<float> data(24);
  const Tensor tensor = Tensor::contiguous(data.data(), DataType::kFloat32, {2, 3, 4});
  EXPECT_EQ(tensor.strides[0], 12);
  EXPECT_EQ(tensor.strides[1], 4);
  EXPECT_EQ(tensor.strides[2], 1);
  EXPECT_EQ(tensor.num_elements(), 24);
  EXPECT_TRUE(tensor.is_contiguous());
  EXPECT_EQ(to_string(tensor), "float32 [2, 3, 4] on cpu");
}

TEST(TensorTest, ColumnsAreAView) {
  std::vector<BFloat16> data(2 * 576);
  const Tensor fused = Tensor::contiguous(data.data(), DataType::kBFloat16, {2, 576});
  const Tensor rope = fused.columns(512, 576);
  EXPECT_EQ(rope.data, data.data() + 512);
  EXPECT_EQ(rope.shape[1], 64);
  EXPECT_EQ(rope.strides[0], 576);
  EXPECT_FALSE(rope.is_contiguous());
  EXPECT_THROW((void)fused.columns(512, 577), Error);
  EXPECT_THROW((void)fused.columns(5, 4), Error);
}

TEST(TensorTest, SqueezeDropsAnAxisOfOne) {
  const std::vector<BFloat16> data(5 * 576);
  const Tensor tensor = Tensor::contiguous(data.data(), DataType::kBFloat16, {5, 1, 576});
  const Tensor flat = tensor.squeeze(1);
  EXPECT_EQ(shape_string(flat), "[5, 576]");
  EXPECT_EQ(flat.strides[0], 576);
  EXPECT_THROW((void)tensor.squeeze(0), Error);
}

TEST(TensorTest, NotGiven) {
  EXPECT_FALSE(Tensor{}.defined());
  EXPECT_EQ(to_string(Tensor{}), "nothing");
}

TEST(BFloat16Test, EveryValueSurvivesTheRoundTrip) {
  for (std::uint32_t bits = 0; bits < 0x10000U; ++bits) {
    const BFloat16 value{static_cast<std::uint16_t>(bits)};
    const BFloat16 back = to_bfloat16(to_float(value));
    if (std::isnan(to_float(value))) {
      EXPECT_TRUE(std::isnan(to_float(back)));
    } else {
      EXPECT_EQ(value.bits, back.bits);
    }
  }
}

TEST(BFloat16Test, RoundsToNearestTiesToEven) {
  EXPECT_EQ(to_bfloat16(1.0F + 0x1p-8F).bits, 0x3F80);             // halfway, down to even
  EXPECT_EQ(to_bfloat16(1.0F + 0x3p-8F).bits, 0x3F82);             // halfway, up to even
  EXPECT_EQ(to_bfloat16(1.0F + 0x1p-8F + 0x1p-20F).bits, 0x3F81);  // just above halfway
  EXPECT_EQ(to_bfloat16(0x1.FFp127F).bits, 0x7F80);                // past the largest finite value
  EXPECT_EQ(to_bfloat16(-0.0F).bits, 0x8000);
}

}  // namespace
}  // namespace sparsemla
