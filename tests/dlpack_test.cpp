// Tensor <-> DLTensor: every dtype and device, layouts, offsets, and what is refused.
#include "sparsemla/dlpack.h"

#include <gtest/gtest.h>

#include <array>
#include <cstdint>
#include <functional>
#include <limits>
#include <string>

#include "sparsemla/error.h"

namespace sparsemla {
namespace {

alignas(64) std::array<std::int32_t, 24> storage{};

struct Layout {
  std::array<std::int64_t, 3> shape{2, 3, 4};
  std::array<std::int64_t, 3> strides{12, 4, 1};

  DLTensor tensor() { return {storage.data(), {kDLCPU, 0}, 3, {kDLInt, 32, 1}, shape.data(), strides.data(), 0}; }
};

TEST(FromDlpack, TakesShapeStridesAndAddress) {
  Layout layout;
  layout.strides = {-12, 1, 3};
  const Tensor tensor = from_dlpack(layout.tensor());
  EXPECT_EQ(tensor.data, storage.data());
  EXPECT_EQ(tensor.dtype, DataType::kInt32);
  EXPECT_EQ(tensor.rank, 3);
  EXPECT_EQ(shape_string(tensor), "[2, 3, 4]");
  EXPECT_EQ(tensor.strides[0], -12);
  EXPECT_EQ(tensor.strides[1], 1);
  EXPECT_EQ(tensor.strides[2], 3);
}

TEST(FromDlpack, NullStridesMeanPacked) {
  Layout layout;
  DLTensor source = layout.tensor();
  source.strides = nullptr;
  const Tensor tensor = from_dlpack(source);
  EXPECT_EQ(tensor.strides[0], 12);
  EXPECT_EQ(tensor.strides[1], 4);
  EXPECT_EQ(tensor.strides[2], 1);
  EXPECT_TRUE(tensor.is_contiguous());
}

TEST(FromDlpack, RankZeroNeedsNoShape) {
  DLTensor source{storage.data(), {kDLCPU, 0}, 0, {kDLInt, 32, 1}, nullptr, nullptr, 0};
  EXPECT_EQ(from_dlpack(source).num_elements(), 1);
}

TEST(FromDlpack, HonoursByteOffset) {
  Layout layout;
  DLTensor source = layout.tensor();
  source.byte_offset = 8;
  EXPECT_EQ(from_dlpack(source).data, storage.data() + 2);
}

TEST(FromDlpack, NullDataStaysNull) {
  Layout layout;
  DLTensor source = layout.tensor();
  source.data = nullptr;
  source.byte_offset = 8;
  EXPECT_EQ(from_dlpack(source).data, nullptr);
}

TEST(FromDlpack, AnEmptyTensorMayStandAnywhere) {
  Layout layout;
  layout.shape[1] = 0;
  DLTensor source = layout.tensor();
  source.byte_offset = 3;
  EXPECT_EQ(from_dlpack(source).num_elements(), 0);
}

TEST(FromDlpack, EveryDtypeComesBack) {
  for (const DataType dtype : {DataType::kBFloat16, DataType::kFloat16, DataType::kFloat32, DataType::kFloat64,
                               DataType::kInt8, DataType::kUInt8, DataType::kInt16, DataType::kInt32, DataType::kInt64,
                               DataType::kBool, DataType::kFloat8E4M3, DataType::kFloat8E5M2}) {
    Tensor tensor = Tensor::contiguous(storage.data(), dtype, {2, 3});
    const DLTensor exported = to_dlpack(tensor);
    EXPECT_EQ(exported.dtype.bits, 8 * size_bytes(dtype)) << to_string(dtype);
    EXPECT_EQ(from_dlpack(exported).dtype, dtype) << to_string(dtype);
  }
}

TEST(FromDlpack, CodesAreDlpacks) {
  // Literal numbers: the header that this compiles against may be older than the codes.
  EXPECT_EQ(dtype_from_dlpack({4, 16, 1}), DataType::kBFloat16);
  EXPECT_EQ(dtype_from_dlpack({2, 16, 1}), DataType::kFloat16);
  EXPECT_EQ(dtype_from_dlpack({2, 32, 1}), DataType::kFloat32);
  EXPECT_EQ(dtype_from_dlpack({0, 32, 1}), DataType::kInt32);
  EXPECT_EQ(dtype_from_dlpack({1, 8, 1}), DataType::kUInt8);
  EXPECT_EQ(dtype_from_dlpack({6, 8, 1}), DataType::kBool);
  EXPECT_EQ(dtype_from_dlpack({10, 8, 1}), DataType::kFloat8E4M3);
  EXPECT_EQ(dtype_from_dlpack({12, 8, 1}), DataType::kFloat8E5M2);
}

TEST(FromDlpack, Devices) {
  Layout layout;
  DLTensor source = layout.tensor();
  source.device = {kDLCUDAHost, 1};
  EXPECT_EQ(from_dlpack(source).device, (Device{DeviceType::kCpu, 0}));
  source.device = {kDLCUDA, 3};
  EXPECT_EQ(from_dlpack(source).device, (Device{DeviceType::kCuda, 3}));
  source.device = {kDLCUDAManaged, 2};
  EXPECT_EQ(from_dlpack(source).device, (Device{DeviceType::kCuda, 2}));
}

struct Refusal {
  const char* name;
  std::function<void(Layout&, DLTensor&)> break_it;
  const char* found;
};

class FromDlpackRefuses : public testing::TestWithParam<Refusal> {};

TEST_P(FromDlpackRefuses, NamingTheArgument) {
  Layout layout;
  DLTensor source = layout.tensor();
  GetParam().break_it(layout, source);
  try {
    (void)from_dlpack(source, "kv_latent");
    FAIL() << "accepted";
  } catch (const Error& error) {
    EXPECT_EQ(error.argument(), "kv_latent");
    EXPECT_NE(error.found().find(GetParam().found), std::string::npos) << error.what();
  }
}

constexpr std::int64_t kHuge = std::int64_t{1} << 40;

const Refusal kRefusals[] = {
    Refusal{"Lanes", [](Layout&, DLTensor& t) { t.dtype.lanes = 4; }, "4 lanes"},
    Refusal{"NoLanes", [](Layout&, DLTensor& t) { t.dtype.lanes = 0; }, "0 lanes"},
    Refusal{"Complex",
            [](Layout&, DLTensor& t) {
              t.dtype = {kDLComplex, 64, 1};
            },
            "code 5 of 64 bits"},
    Refusal{"FourBits",
            [](Layout&, DLTensor& t) {
              t.dtype = {kDLInt, 4, 1};
            },
            "code 0 of 4 bits"},
    Refusal{"BrainFloat32",
            [](Layout&, DLTensor& t) {
              t.dtype = {kDLBfloat, 32, 1};
            },
            "code 4 of 32 bits"},
    Refusal{"Vulkan", [](Layout&, DLTensor& t) { t.device.device_type = kDLVulkan; }, "device type 7"},
    Refusal{"RankSix", [](Layout&, DLTensor& t) { t.ndim = 6; }, "rank 6"},
    Refusal{"NegativeRank", [](Layout&, DLTensor& t) { t.ndim = -1; }, "rank -1"},
    Refusal{"NullShape", [](Layout&, DLTensor& t) { t.shape = nullptr; }, "null shape"},
    Refusal{"NegativeExtent", [](Layout& l, DLTensor&) { l.shape[1] = -3; }, "extent -3 on axis 1"},
    Refusal{"TooManyElements",
            [](Layout& l, DLTensor&) {
              l.shape = {kHuge, kHuge, 1};
            },
            "product"},
    Refusal{"TooManyElementsPacked",
            [](Layout& l, DLTensor& t) {
              l.shape = {0, kHuge, kHuge};
              t.strides = nullptr;
            },
            "product"},
    Refusal{"MisalignedOffset", [](Layout&, DLTensor& t) { t.byte_offset = 2; }, "byte_offset 2"},
    Refusal{"MisalignedPointer", [](Layout&, DLTensor& t) { t.data = reinterpret_cast<char*>(storage.data()) + 1; },
            "misaligned"},
    Refusal{"OffsetBeyondAddresses",
            [](Layout&, DLTensor& t) { t.byte_offset = std::numeric_limits<std::uint64_t>::max() - 3; },
            "byte_offset 18446744073709551612"}};

INSTANTIATE_TEST_SUITE_P(All, FromDlpackRefuses, testing::ValuesIn(kRefusals),
                         [](const auto& refusal) { return refusal.param.name; });

TEST(ToDlpack, PointsIntoTheTensor) {
  Tensor tensor = Tensor::contiguous(storage.data(), DataType::kInt32, {2, 12}).columns(2, 6);
  const DLTensor exported = to_dlpack(tensor);
  EXPECT_EQ(exported.data, storage.data() + 2);
  EXPECT_EQ(exported.byte_offset, 0U);
  EXPECT_EQ(exported.ndim, 2);
  EXPECT_EQ(exported.shape, tensor.shape.data());
  EXPECT_EQ(exported.strides[0], 12);
  EXPECT_EQ(exported.strides[1], 1);
  EXPECT_EQ(exported.device.device_type, kDLCPU);
}

TEST(ToDlpack, KeepsTheCudaDevice) {
  Tensor tensor = Tensor::contiguous(storage.data(), DataType::kFloat32, {2}, {DeviceType::kCuda, 5});
  EXPECT_EQ(to_dlpack(tensor).device.device_type, kDLCUDA);
  EXPECT_EQ(to_dlpack(tensor).device.device_id, 5);
}

TEST(ToDlpack, Refuses) {
  Tensor nothing;
  EXPECT_THROW((void)to_dlpack(nothing), Error);
  Tensor other = Tensor::contiguous(storage.data(), DataType::kOther, {2});
  EXPECT_THROW((void)to_dlpack(other), Error);
  Tensor elsewhere = Tensor::contiguous(storage.data(), DataType::kFloat32, {2}, {DeviceType::kOther, 0});
  EXPECT_THROW((void)to_dlpack(elsewhere), Error);
}

}  // namespace
}  // namespace sparsemla
