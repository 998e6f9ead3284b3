#include "cases/owned_tensor.h"

#include <algorithm>
#include <cstring>

#include "sparsemla/bfloat16.h"
#include "sparsemla/error.h"

namespace sparsemla::cases {
namespace {

constexpr std::int64_t kFusedPitch = 576;
constexpr std::int64_t kGuardElements =
    576;                                  // before and after the elements, whatever the layout; a multiple of 16 bytes
constexpr std::int64_t kRowElements = 8;  // 16 bytes of bf16

/// Element offset of the row-major `index`-th element.
std::int64_t offset_of(const Tensor& view, std::int64_t index) {
  std::int64_t offset = 0;
  for (int axis = view.rank - 1; axis >= 0; --axis) {
    offset += index % view.shape[axis] * view.strides[axis];
    index /= view.shape[axis];
  }
  return offset;
}

/// Strides of axes packed in the order `axes` (outermost first), each axis padded by `padding` of its extent's unit.
void pack(Tensor& view, const std::vector<int>& axes, std::int64_t unit, std::int64_t padding) {
  std::int64_t stride = unit;
  for (auto axis = axes.rbegin(); axis != axes.rend(); ++axis) {
    view.strides[*axis] = stride;
    stride *= std::max<std::int64_t>(view.shape[*axis], 1) + padding;
  }
}

void place(Tensor& view, Layout layout) {
  std::vector<int> axes;
  for (int axis = 0; axis < view.rank; ++axis) axes.push_back(axis);
  switch (layout) {
    case Layout::kContiguous:
    case Layout::kBroadcast:
    case Layout::kReversed:
      pack(view, axes, 1, 0);
      break;
    case Layout::kFused: {
      pack(view, axes, 1, 0);
      const std::int64_t width = view.rank > 0 ? view.shape[view.rank - 1] : 0;
      if (view.rank < 2 || (width != 512 && width != 64)) break;  // nothing to fuse: lse, indices, sink
      std::int64_t stride = kFusedPitch;
      for (int axis = view.rank - 2; axis >= 0; --axis) {
        view.strides[axis] = stride;
        stride *= std::max<std::int64_t>(view.shape[axis], 1);
      }
      break;
    }
    case Layout::kPadded:
      pack(view, axes, 1, 3);
      break;
    case Layout::kTransposed:
      if (axes.size() == 2) std::swap(axes[0], axes[1]);
      if (axes.size() >= 3) std::swap(axes[0], axes[1]);
      pack(view, axes, 1, 0);
      break;
    case Layout::kInterleaved:
      pack(view, axes, 2, 1);
      break;
    case Layout::kAlignedRows: {
      std::int64_t stride = 1;
      for (int axis = view.rank - 1; axis >= 0; --axis) {
        view.strides[axis] = stride;
        const std::int64_t span = stride * std::max<std::int64_t>(view.shape[axis], 1);
        stride = (span + kRowElements - 1) / kRowElements * kRowElements + kRowElements;
      }
      break;
    }
  }
}

bool is_backwards(Layout layout, int axis) {
  return layout == Layout::kReversed || (layout == Layout::kAlignedRows && axis == 0);
}

}  // namespace

std::string_view to_string(Layout layout) noexcept {
  switch (layout) {
    case Layout::kContiguous:
      return "contiguous";
    case Layout::kFused:
      return "fused";
    case Layout::kPadded:
      return "padded";
    case Layout::kTransposed:
      return "transposed";
    case Layout::kReversed:
      return "reversed";
    case Layout::kInterleaved:
      return "interleaved";
    case Layout::kAlignedRows:
      return "aligned_rows";
    case Layout::kBroadcast:
      return "broadcast";
  }
  return "?";
}

OwnedTensor::OwnedTensor(DataType dtype, std::vector<std::int64_t> shape, Layout layout, unsigned char fill)
    : fill_(fill) {
  view_.dtype = dtype;
  view_.rank = static_cast<int>(shape.size());
  std::copy(shape.begin(), shape.end(), view_.shape.begin());
  place(view_, layout);
  std::int64_t span = 1;  // elements from the first to one past the last
  for (int axis = 0; axis < view_.rank; ++axis) {
    span += std::max<std::int64_t>(view_.shape[axis] - 1, 0) * view_.strides[axis];
  }
  std::int64_t first = kGuardElements + (layout == Layout::kPadded ? 1 : 0);
  const std::int64_t element = size_bytes(dtype);
  storage_.assign(static_cast<std::size_t>((first + span + kGuardElements) * element), std::byte{fill});
  for (int axis = 0; axis < view_.rank; ++axis) {
    if (!is_backwards(layout, axis)) continue;
    first += std::max<std::int64_t>(view_.shape[axis] - 1, 0) * view_.strides[axis];
    view_.strides[axis] = -view_.strides[axis];
  }
  view_.data = storage_.data() + first * element;
}

void OwnedTensor::assign(const void* packed) {
  const std::int64_t element = size_bytes(view_.dtype);
  const std::int64_t count = view_.num_elements();
  auto* base = static_cast<std::byte*>(view_.data);
  const auto* source = static_cast<const std::byte*>(packed);
  if (count == 0) return;
  if (view_.is_contiguous()) {
    std::memcpy(base, source, static_cast<std::size_t>(count * element));
    return;
  }
  for (std::int64_t i = 0; i < count; ++i) {
    std::memcpy(base + offset_of(view_, i) * element, source + i * element, static_cast<std::size_t>(element));
  }
}

bool OwnedTensor::untouched() const {
  return std::all_of(storage_.begin(), storage_.end(), [this](std::byte b) { return b == std::byte{fill_}; });
}

bool OwnedTensor::gaps_untouched() const {
  if (!defined()) return true;
  const auto filled = [this](std::byte b) { return b == std::byte{fill_}; };
  const std::int64_t element = size_bytes(view_.dtype);
  const std::int64_t count = view_.num_elements();
  const std::int64_t first = static_cast<const std::byte*>(view_.data) - storage_.data();
  if (view_.is_contiguous()) {
    return std::all_of(storage_.begin(), storage_.begin() + first, filled) &&
           std::all_of(storage_.begin() + first + count * element, storage_.end(), filled);
  }
  std::vector<std::byte> rest = storage_;  // elements overwritten by the fill: what remains is gaps
  for (std::int64_t i = 0; i < count; ++i) {
    std::memset(rest.data() + first + offset_of(view_, i) * element, fill_, static_cast<std::size_t>(element));
  }
  return std::all_of(rest.begin(), rest.end(), filled);
}

std::vector<std::byte> OwnedTensor::bytes() const { return packed_bytes(view_); }

std::vector<std::byte> packed_bytes(const Tensor& tensor) {
  const std::int64_t element = size_bytes(tensor.dtype);
  const std::int64_t count = tensor.defined() ? tensor.num_elements() : 0;
  std::vector<std::byte> packed(static_cast<std::size_t>(count * element));
  const auto* base = static_cast<const std::byte*>(tensor.data);
  if (count > 0 && tensor.is_contiguous()) {
    std::memcpy(packed.data(), base, packed.size());
    return packed;
  }
  for (std::int64_t i = 0; i < count; ++i) {
    std::memcpy(packed.data() + i * element, base + offset_of(tensor, i) * element, static_cast<std::size_t>(element));
  }
  return packed;
}

std::vector<double> packed_values(const Tensor& tensor) {
  const std::vector<std::byte> packed = packed_bytes(tensor);
  const auto count = static_cast<std::size_t>(tensor.defined() ? tensor.num_elements() : 0);
  std::vector<double> values(count);
  const auto decode = [&]<typename T>(T, auto convert) {
    for (std::size_t i = 0; i < count; ++i) {
      T element;
      std::memcpy(&element, packed.data() + i * sizeof(T), sizeof(T));
      values[i] = convert(element);
    }
  };
  switch (tensor.dtype) {
    case DataType::kNone:
      break;
    case DataType::kBFloat16:
      decode(BFloat16{}, [](BFloat16 x) { return static_cast<double>(to_float(x)); });
      break;
    case DataType::kFloat32:
      decode(float{}, [](float x) { return static_cast<double>(x); });
      break;
    case DataType::kFloat64:
      decode(double{}, [](double x) { return x; });
      break;
    case DataType::kInt32:
      decode(std::int32_t{}, [](std::int32_t x) { return static_cast<double>(x); });
      break;
    default:
      throw Error("values", to_string(tensor.dtype), "bfloat16, float32, float64 or int32");
  }
  return values;
}

}  // namespace sparsemla::cases
