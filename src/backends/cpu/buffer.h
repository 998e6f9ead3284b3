// Cache-line aligned scratch memory, zero-filled.
#pragma once

#include <cstdint>
#include <cstring>
#include <memory>
#include <new>

namespace sparsemla::cpu {

template <typename T>
class Buffer {
 public:
  Buffer() = default;
  explicit Buffer(std::int64_t count)
      : data_(static_cast<T*>(::operator new (bytes(count), std::align_val_t{kAlignment}))) {
    std::memset(static_cast<void*>(data_.get()), 0, bytes(count));
  }

  [[nodiscard]] T* get() const noexcept { return data_.get(); }
  T& operator[](std::int64_t i) const noexcept { return data_.get()[i]; }

 private:
  static constexpr std::size_t kAlignment = 64;
  static std::size_t bytes(std::int64_t count) { return static_cast<std::size_t>(count) * sizeof(T); }
  struct Deleter {
    void operator()(T* data) const noexcept { ::operator delete (data, std::align_val_t{kAlignment}); }
  };
  std::unique_ptr<T, Deleter> data_;
};

/// Rows and columns of every product are padded to this, so that engines need no edge code.
inline constexpr std::int64_t kPad = 32;
constexpr std::int64_t padded(std::int64_t count) noexcept { return (count + kPad - 1) / kPad * kPad; }

}  // namespace sparsemla::cpu
