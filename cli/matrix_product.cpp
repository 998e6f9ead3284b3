#include "cli/matrix_product.h"

#include <dlfcn.h>
#include <fmt/format.h>

#include "cli/device_workload.h"
#include "sparsemla/error.h"

namespace sparsemla::cli {
namespace {

// Of cublas_api.h and library_types.h, which are no part of this build. The same in cuBLAS 12 and 13.
constexpr int kSuccess = 0;
constexpr int kNotTransposed = 0;
constexpr int kBFloat16 = 14;
constexpr int kComputeFp32 = 68;
constexpr int kDefaultAlgorithm = -1;
using Create = int (*)(void** handle);
using Destroy = int (*)(void* handle);
using SetStream = int (*)(void* handle, void* stream);
using GemmEx = int (*)(void* handle, int op_a, int op_b, int m, int n, int k, const void* alpha, const void* a,
                       int type_a, int lda, const void* b, int type_b, int ldb, const void* beta, void* c, int type_c,
                       int ldc, int compute, int algorithm);

}  // namespace

struct MatrixProduct::Cublas {
  void* library = nullptr;
  void* handle = nullptr;
  Destroy destroy = nullptr;
  GemmEx gemm = nullptr;
};

MatrixProduct::MatrixProduct(int device, void* stream) : cublas_(std::make_unique<Cublas>()) {
  for (const char* name : {"libcublas.so.13", "libcublas.so.12"}) {
    cublas_->library = ::dlopen(name, RTLD_NOW | RTLD_LOCAL);
    if (cublas_->library == nullptr) continue;
    library_ = name;
    break;
  }
  if (cublas_->library == nullptr) {
    why_not_ = "no libcublas.so.13 or .12 where the loader looks (LD_LIBRARY_PATH)";
    return;
  }
  const auto create = reinterpret_cast<Create>(::dlsym(cublas_->library, "cublasCreate_v2"));
  const auto set_stream = reinterpret_cast<SetStream>(::dlsym(cublas_->library, "cublasSetStream_v2"));
  cublas_->destroy = reinterpret_cast<Destroy>(::dlsym(cublas_->library, "cublasDestroy_v2"));
  cublas_->gemm = reinterpret_cast<GemmEx>(::dlsym(cublas_->library, "cublasGemmEx"));
  if (create == nullptr || set_stream == nullptr || cublas_->destroy == nullptr || cublas_->gemm == nullptr) {
    why_not_ = library_ + " lacks a function of cuBLAS";
  } else if (create(&cublas_->handle) != kSuccess || set_stream(cublas_->handle, stream) != kSuccess) {
    why_not_ = library_ + " does not start on this device";
  }
  if (!available()) return;
  a_ = random_numbers(kSize * kSize, 101, device);
  b_ = random_numbers(kSize * kSize, 102, device);
  c_ = device::DeviceMemory(kSize * kSize * size_bytes(DataType::kBFloat16), device);
}

MatrixProduct::~MatrixProduct() {
  if (cublas_->handle != nullptr) (void)cublas_->destroy(cublas_->handle);
  if (cublas_->library != nullptr) (void)::dlclose(cublas_->library);
}

void MatrixProduct::enqueue() {
  const float one = 1.0F;
  const float zero = 0.0F;
  const int size = kSize;
  const int status =
      cublas_->gemm(cublas_->handle, kNotTransposed, kNotTransposed, size, size, size, &one, a_.data(), kBFloat16, size,
                    b_.data(), kBFloat16, size, &zero, c_.data(), kBFloat16, size, kComputeFp32, kDefaultAlgorithm);
  if (status != kSuccess) throw Error("cublas", fmt::format("status {} of cublasGemmEx", status), "a product");
}

}  // namespace sparsemla::cli
