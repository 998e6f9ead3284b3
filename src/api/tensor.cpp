#include "sparsemla/tensor.h"

#include <fmt/format.h>

#include <algorithm>

#include "sparsemla/error.h"

namespace sparsemla {
namespace {

struct DataTypeRow {
  std::string_view name;
  std::int64_t bytes;
};

constexpr DataTypeRow kDataTypes[] = {
    {"nothing", 0}, {"bfloat16", 2},    {"float16", 2},     {"float32", 4}, {"float64", 8},
    {"int8", 1},    {"uint8", 1},       {"int16", 2},       {"int32", 4},   {"int64", 8},
    {"bool", 1},    {"float8_e4m3", 1}, {"float8_e5m2", 1}, {"other", 0},
};

const DataTypeRow& row(DataType dtype) { return kDataTypes[static_cast<std::size_t>(dtype)]; }

}  // namespace

std::int64_t size_bytes(DataType dtype) noexcept { return row(dtype).bytes; }
std::string_view to_string(DataType dtype) noexcept { return row(dtype).name; }

std::string to_string(Device device) {
  switch (device.type) {
    case DeviceType::kCpu:
      return "cpu";
    case DeviceType::kCuda:
      return fmt::format("cuda:{}", device.index);
    case DeviceType::kOther:
      break;
  }
  return "an unknown device";
}

std::int64_t Tensor::num_elements() const noexcept {
  std::int64_t count = 1;
  for (int axis = 0; axis < rank; ++axis) count *= shape[axis];
  return count;
}

bool Tensor::is_contiguous() const noexcept {
  std::int64_t expected = 1;
  for (int axis = rank - 1; axis >= 0; --axis) {
    if (shape[axis] != 1 && strides[axis] != expected) return false;
    expected *= std::max<std::int64_t>(shape[axis], 1);
  }
  return true;
}

Tensor Tensor::contiguous(const void* data, DataType dtype, std::initializer_list<std::int64_t> shape, Device device) {
  if (shape.size() > kMaxRank) throw Error("tensor", fmt::format("rank {}", shape.size()), "rank 5 or less");
  Tensor tensor;
  tensor.data = const_cast<void*>(data);
  tensor.dtype = dtype;
  tensor.rank = static_cast<int>(shape.size());
  std::copy(shape.begin(), shape.end(), tensor.shape.begin());
  tensor.device = device;
  std::int64_t stride = 1;
  for (int axis = tensor.rank - 1; axis >= 0; --axis) {
    if (tensor.shape[axis] < 0) throw Error("tensor", shape_string(tensor), "extents of 0 or more");
    tensor.strides[axis] = stride;
    stride *= std::max<std::int64_t>(tensor.shape[axis], 1);
  }
  return tensor;
}

Tensor Tensor::columns(std::int64_t begin, std::int64_t end) const {
  if (rank == 0 || begin < 0 || begin > end || end > shape[rank - 1]) {
    throw Error("columns", fmt::format("[{}, {}) of {}", begin, end, shape_string(*this)),
                "a range inside the last axis");
  }
  Tensor view = *this;
  view.shape[rank - 1] = end - begin;
  if (data != nullptr) {
    view.data = static_cast<char*>(data) + begin * strides[rank - 1] * size_bytes(dtype);
  }
  return view;
}

Tensor Tensor::squeeze(int axis) const {
  if (axis < 0 || axis >= rank || shape[axis] != 1) {
    throw Error("squeeze", fmt::format("axis {} of {}", axis, shape_string(*this)), "an axis of extent 1");
  }
  Tensor view = *this;
  std::copy(shape.begin() + axis + 1, shape.end(), view.shape.begin() + axis);
  std::copy(strides.begin() + axis + 1, strides.end(), view.strides.begin() + axis);
  --view.rank;
  return view;
}

std::string shape_string(const Tensor& tensor) {
  return fmt::format("[{}]", fmt::join(tensor.shape.begin(), tensor.shape.begin() + tensor.rank, ", "));
}

std::string to_string(const Tensor& tensor) {
  if (!tensor.defined()) return "nothing";
  return fmt::format("{} {} on {}", to_string(tensor.dtype), shape_string(tensor), to_string(tensor.device));
}

}  // namespace sparsemla
