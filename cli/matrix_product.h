// A large bf16 product of cuBLAS: the unit that a kernel's rate is read in. The library is loaded at run time.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "device/device.h"

namespace sparsemla::cli {

class MatrixProduct {
 public:
  static constexpr std::int64_t kSize = 8192;
  static constexpr double kFlops = 2.0 * kSize * kSize * kSize;

  /// Looks for libcublas where the loader looks. What is not there is no error: see why_not().
  MatrixProduct(int device, void* stream);
  ~MatrixProduct();
  MatrixProduct(const MatrixProduct&) = delete;
  MatrixProduct& operator=(const MatrixProduct&) = delete;

  [[nodiscard]] bool available() const noexcept { return why_not_.empty(); }
  [[nodiscard]] const std::string& why_not() const noexcept { return why_not_; }
  [[nodiscard]] const std::string& library() const noexcept { return library_; }
  /// Enqueues one product of random numbers. Errors: cuBLAS refuses.
  void enqueue();

 private:
  struct Cublas;
  std::unique_ptr<Cublas> cublas_;
  std::string library_;
  std::string why_not_;
  device::DeviceMemory a_, b_, c_;
};

}  // namespace sparsemla::cli
