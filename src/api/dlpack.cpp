#include "sparsemla/dlpack.h"

#include <fmt/format.h>

#include <cstddef>
#include <cstdint>
#include <limits>

#include "sparsemla/error.h"

namespace sparsemla {
namespace {

// Codes that DLPack gained after the oldest header this compiles against (0.6). Numbers are part of its ABI.
constexpr std::uint8_t kDlBoolCode = 6;
constexpr std::uint8_t kDlFloat8E4M3Code = 10;  // kDLFloat8_e4m3fn
constexpr std::uint8_t kDlFloat8E5M2Code = 12;

struct DtypeRow {
  DataType ours;
  std::uint8_t code;
  std::uint8_t bits;
};

constexpr DtypeRow kDtypes[] = {
    {DataType::kBFloat16, kDLBfloat, 16},
    {DataType::kFloat16, kDLFloat, 16},
    {DataType::kFloat32, kDLFloat, 32},
    {DataType::kFloat64, kDLFloat, 64},
    {DataType::kInt8, kDLInt, 8},
    {DataType::kUInt8, kDLUInt, 8},
    {DataType::kInt16, kDLInt, 16},
    {DataType::kInt32, kDLInt, 32},
    {DataType::kInt64, kDLInt, 64},
    {DataType::kBool, kDlBoolCode, 8},
    {DataType::kFloat8E4M3, kDlFloat8E4M3Code, 8},
    {DataType::kFloat8E5M2, kDlFloat8E5M2Code, 8},
};

Device device_of(const DLTensor& tensor, std::string_view argument) {
  const auto type = static_cast<int>(tensor.device.device_type);
  switch (type) {
    case kDLCPU:
    case kDLCUDAHost:
      return {DeviceType::kCpu, 0};
    case kDLCUDA:
    case kDLCUDAManaged:
      return {DeviceType::kCuda, tensor.device.device_id};
    default:
      throw Error(argument, fmt::format("DLPack device type {}", type),
                  "1 (CPU), 2 (CUDA), 3 or 13 (their shared memory)");
  }
}

void copy_layout(const DLTensor& source, std::string_view argument, Tensor& view) {
  if (source.ndim < 0 || source.ndim > Tensor::kMaxRank) {
    throw Error(argument, fmt::format("rank {}", source.ndim), fmt::format("rank 0 to {}", Tensor::kMaxRank));
  }
  view.rank = source.ndim;
  if (view.rank > 0 && source.shape == nullptr) throw Error(argument, "a null shape", "one extent per axis");
  std::int64_t packed = 1;  // elements inside the axes seen so far, extents of 0 taken as 1
  for (int axis = view.rank - 1; axis >= 0; --axis) {
    const std::int64_t extent = source.shape[axis];
    if (extent < 0) throw Error(argument, fmt::format("extent {} on axis {}", extent, axis), "extents of 0 or more");
    view.shape[axis] = extent;
    view.strides[axis] = source.strides == nullptr ? packed : source.strides[axis];
    if (__builtin_mul_overflow(packed, extent == 0 ? 1 : extent, &packed)) {
      throw Error(argument, "extents whose product exceeds 64 bits", "fewer elements");
    }
  }
}

void* address_of(const DLTensor& source, std::string_view argument, const Tensor& view) {
  if (source.data == nullptr)
    return nullptr;  // an offset into nothing stays nothing, which is rejected where it matters
  if (source.byte_offset > static_cast<std::uint64_t>(std::numeric_limits<std::ptrdiff_t>::max())) {
    throw Error(argument, fmt::format("byte_offset {}", source.byte_offset), "an offset that an address can have");
  }
  char* address = static_cast<char*>(source.data) + source.byte_offset;
  const auto element_bytes = static_cast<std::uintptr_t>(size_bytes(view.dtype));
  if (view.num_elements() > 0 && reinterpret_cast<std::uintptr_t>(address) % element_bytes != 0) {
    throw Error(argument, fmt::format("a misaligned address (byte_offset {})", source.byte_offset),
                fmt::format("alignment to {} bytes", element_bytes));
  }
  return address;
}

}  // namespace

DataType dtype_from_dlpack(DLDataType dtype, std::string_view argument) {
  if (dtype.lanes != 1) throw Error(argument, fmt::format("elements of {} lanes", dtype.lanes), "1 lane");
  for (const DtypeRow& row : kDtypes) {
    if (row.code == dtype.code && row.bits == dtype.bits) return row.ours;
  }
  throw Error(argument, fmt::format("DLPack dtype code {} of {} bits", dtype.code, dtype.bits),
              "bfloat16, float16/32/64, int8/16/32/64, uint8, bool, float8_e4m3fn or float8_e5m2");
}

Tensor from_dlpack(const DLTensor& tensor, std::string_view argument) {
  Tensor view;
  view.dtype = dtype_from_dlpack(tensor.dtype, argument);
  view.device = device_of(tensor, argument);
  copy_layout(tensor, argument, view);
  view.data = address_of(tensor, argument, view);
  return view;
}

DLTensor to_dlpack(Tensor& tensor) {
  DLTensor result{};
  for (const DtypeRow& row : kDtypes) {
    if (row.ours == tensor.dtype) result.dtype = {row.code, row.bits, 1};
  }
  if (result.dtype.lanes == 0) throw Error("tensor", to_string(tensor), "a dtype that DLPack has");
  if (tensor.device.type == DeviceType::kOther) throw Error("tensor", to_string(tensor), "a tensor on cpu or cuda");
  result.device = {tensor.device.type == DeviceType::kCuda ? kDLCUDA : kDLCPU, tensor.device.index};
  result.data = tensor.data;
  result.ndim = tensor.rank;
  result.shape = tensor.shape.data();
  result.strides = tensor.strides.data();
  return result;
}

}  // namespace sparsemla
