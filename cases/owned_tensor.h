// A tensor that owns its memory, in any of several layouts, and knows which bytes around it must not change.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

#include "sparsemla/tensor.h"

namespace sparsemla::cases {

/// Where the elements of a tensor stand in memory. All but kBroadcast give every element a place of its own.
enum class Layout : std::uint8_t {
  kContiguous,   // packed rows, one guard row before and after
  kFused,        // a latent or rope part is a column range of a 576-wide tensor: row pitch 576
  kPadded,       // odd pitches on every axis, first element on an odd (2-byte) boundary
  kTransposed,   // axes permuted: [H,T,D] for [T,H,D], column-major for a matrix
  kReversed,     // every stride negative
  kInterleaved,  // last axis with stride 2
  kAlignedRows,  // last axis packed, every row at a multiple of 16 bytes, gaps after each; first axis backwards
  kBroadcast,    // inputs only: stride 0 on the token axis. Outputs of such a case are contiguous
};
[[nodiscard]] std::string_view to_string(Layout layout) noexcept;

/// Memory starts out filled with `fill` in every byte (0xFF.. is a NaN in every float type, 0xA5 a finite number).
class OwnedTensor {
 public:
  OwnedTensor() = default;                        // a tensor that is not given
  OwnedTensor(OwnedTensor&&) noexcept = default;  // the view stays right: the heap block does not move
  OwnedTensor& operator=(OwnedTensor&&) noexcept = default;
  OwnedTensor(DataType dtype, std::vector<std::int64_t> shape, Layout layout = Layout::kContiguous,
              unsigned char fill = 0xA5);

  [[nodiscard]] const Tensor& tensor() const noexcept { return view_; }
  [[nodiscard]] bool defined() const noexcept { return view_.defined(); }
  /// All of its memory: elements, gaps and guards.
  [[nodiscard]] std::span<std::byte> storage() noexcept { return storage_; }

  /// Copies packed row-major elements of the same dtype in; num_elements() of them.
  void assign(const void* packed);
  /// Every byte outside the elements still holds the fill / every byte does.
  [[nodiscard]] bool gaps_untouched() const;
  [[nodiscard]] bool untouched() const;
  /// The elements' bytes, packed row-major: equal vectors = bitwise equal tensors.
  [[nodiscard]] std::vector<std::byte> bytes() const;

 private:
  std::vector<std::byte> storage_;
  unsigned char fill_ = 0;
  Tensor view_;
};

/// Packed row-major element bytes of any CPU tensor.
[[nodiscard]] std::vector<std::byte> packed_bytes(const Tensor& tensor);
/// The same as fp64. Errors: a dtype that is not bf16, fp32, fp64 or int32.
[[nodiscard]] std::vector<double> packed_values(const Tensor& tensor);

}  // namespace sparsemla::cases
