// A non-owning view of a strided tensor. No allocation, no ownership, no dependency.
#pragma once

#include <array>
#include <cstdint>
#include <initializer_list>
#include <string>
#include <string_view>

namespace sparsemla {

enum class DataType : std::uint8_t {
  kNone,  // no tensor
  kBFloat16,
  kFloat16,
  kFloat32,
  kFloat64,
  kInt8,
  kUInt8,
  kInt16,
  kInt32,
  kInt64,
  kBool,
  kFloat8E4M3,
  kFloat8E5M2,
  kOther,
};

/// Bytes of one element; 0 for kNone and kOther.
[[nodiscard]] std::int64_t size_bytes(DataType dtype) noexcept;
/// "bfloat16", "float32", "int32", ...
[[nodiscard]] std::string_view to_string(DataType dtype) noexcept;

enum class DeviceType : std::uint8_t { kCpu, kCuda, kOther };

struct Device {
  DeviceType type = DeviceType::kCpu;
  int index = 0;

  friend constexpr bool operator==(Device, Device) = default;
};

/// "cpu", "cuda:1".
[[nodiscard]] std::string to_string(Device device);

/// A view: pointer, element type, shape, strides in elements (any sign, any value; inputs may repeat elements by stride
/// 0, outputs may not), device. A default-constructed Tensor means "not given".
struct Tensor {
  static constexpr int kMaxRank = 5;

  void* data = nullptr;
  DataType dtype = DataType::kNone;
  int rank = 0;
  std::array<std::int64_t, kMaxRank> shape{};
  std::array<std::int64_t, kMaxRank> strides{};
  Device device{};

  [[nodiscard]] bool defined() const noexcept { return dtype != DataType::kNone; }
  /// Product of the shape; 1 for rank 0.
  [[nodiscard]] std::int64_t num_elements() const noexcept;
  /// Rows packed one after the other, last axis contiguous (axes of extent 1 are free).
  [[nodiscard]] bool is_contiguous() const noexcept;

  /// A contiguous view. `data` may be null only when the tensor has no elements.
  /// Errors: a rank above kMaxRank or a negative extent.
  static Tensor contiguous(const void* data, DataType dtype, std::initializer_list<std::int64_t> shape,
                           Device device = {});
  /// Columns [begin, end) of the last axis: a view, no copy. This is how a fused [.., 576] tensor becomes its latent
  /// part (0, 512) and its rope part (512, 576). Errors: rank 0, or a range outside the axis.
  [[nodiscard]] Tensor columns(std::int64_t begin, std::int64_t end) const;
  /// The view without axis `axis`, which must have extent 1 (the head axis of [S,1,576]).
  [[nodiscard]] Tensor squeeze(int axis) const;
};

/// "bfloat16 [4096, 128, 512] on cpu"; "nothing" for a tensor that was not given.
[[nodiscard]] std::string to_string(const Tensor& tensor);
/// "[4096, 128, 512]".
[[nodiscard]] std::string shape_string(const Tensor& tensor);

}  // namespace sparsemla
