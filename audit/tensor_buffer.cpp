#include "audit/tensor_buffer.h"

#include <cstring>
#include <new>

namespace sparsemla::audit {
namespace {
constexpr std::align_val_t kAlignment{64};
}

void TensorBuffer::Free::operator()(std::byte* memory) const noexcept { ::operator delete(memory, kAlignment); }

TensorBuffer::TensorBuffer(DataType dtype, std::initializer_list<std::int64_t> shape) {
  std::size_t bytes = static_cast<std::size_t>(size_bytes(dtype));
  for (const std::int64_t extent : shape) {
    bytes *= static_cast<std::size_t>(extent);
  }
  if (bytes > 0) {
    memory_.reset(static_cast<std::byte*>(::operator new(bytes, kAlignment)));
  }
  view_ = Tensor::contiguous(memory_.get(), dtype, shape);
}

std::size_t TensorBuffer::bytes() const noexcept {
  return defined() ? static_cast<std::size_t>(view_.num_elements() * size_bytes(view_.dtype)) : 0;
}

void TensorBuffer::reset() noexcept {
  memory_.reset();
  view_ = {};
}

bool bitwise_equal(const TensorBuffer& a, const TensorBuffer& b) {
  const Tensor& x = a.view();
  const Tensor& y = b.view();
  if (x.dtype != y.dtype || x.rank != y.rank || x.shape != y.shape) {
    return false;
  }
  return a.bytes() == 0 || std::memcmp(x.data, y.data, a.bytes()) == 0;
}

}  // namespace sparsemla::audit
