// A contiguous CPU tensor that owns its memory.
#pragma once

#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <memory>
#include <utility>

#include "sparsemla/tensor.h"

namespace sparsemla::audit {

class TensorBuffer {
 public:
  TensorBuffer() = default;  // not given
  /// Uninitialised, 64-byte aligned.
  TensorBuffer(DataType dtype, std::initializer_list<std::int64_t> shape);
  TensorBuffer(TensorBuffer&& other) noexcept
      : memory_(std::move(other.memory_)), view_(std::exchange(other.view_, Tensor{})) {}
  TensorBuffer& operator=(TensorBuffer&& other) noexcept {
    memory_ = std::move(other.memory_);
    view_ = std::exchange(other.view_, Tensor{});
    return *this;
  }

  [[nodiscard]] const Tensor& view() const noexcept { return view_; }
  [[nodiscard]] bool defined() const noexcept { return view_.defined(); }
  [[nodiscard]] std::size_t bytes() const noexcept;
  void reset() noexcept;

 private:
  struct Free {
    void operator()(std::byte* memory) const noexcept;
  };
  std::unique_ptr<std::byte, Free> memory_;
  Tensor view_;
};

/// Same dtype, shape and bits.
[[nodiscard]] bool bitwise_equal(const TensorBuffer& a, const TensorBuffer& b);

}  // namespace sparsemla::audit
