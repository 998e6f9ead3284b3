// Strided rows of the caller's tensors, to and from packed scratch memory.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "sparsemla/attention.h"
#include "sparsemla/bfloat16.h"
#include "sparsemla/tensor.h"

namespace sparsemla::cpu {

/// Copies row (i, j) of a [.., .., width] tensor, or row i of a [.., width] one (j = 0), into packed memory.
inline void read_row(const Tensor& tensor, std::int64_t i, std::int64_t j, BFloat16* to) noexcept {
  const int last = tensor.rank - 1;
  const auto* from = static_cast<const BFloat16*>(tensor.data) + i * tensor.strides[0];
  if (tensor.rank == 3) from += j * tensor.strides[1];
  const std::int64_t width = tensor.shape[last];
  const std::int64_t step = tensor.strides[last];
  if (step == 1) {
    std::memcpy(to, from, static_cast<std::size_t>(width) * sizeof(BFloat16));
  } else {
    for (std::int64_t d = 0; d < width; ++d) to[d] = from[d * step];
  }
}

/// Writes packed fp32 values into row (i, j) of a bf16 or fp32 [.., .., width] tensor.
inline void write_row(const Tensor& tensor, std::int64_t i, std::int64_t j, const float* from) noexcept {
  const std::int64_t offset = i * tensor.strides[0] + j * tensor.strides[1];
  const std::int64_t width = tensor.shape[2];
  const std::int64_t step = tensor.strides[2];
  if (tensor.dtype == DataType::kFloat32) {
    auto* to = static_cast<float*>(tensor.data) + offset;
    for (std::int64_t d = 0; d < width; ++d) to[d * step] = from[d];
  } else {
    auto* to = static_cast<BFloat16*>(tensor.data) + offset;
    if (step == 1) {
      for (std::int64_t d = 0; d < width; ++d) to[d] = to_bfloat16(from[d]);
    } else {
      for (std::int64_t d = 0; d < width; ++d) to[d * step] = to_bfloat16(from[d]);
    }
  }
}

/// Adds packed values to row i of an fp32 [S, width] tensor.
inline void add_to_row(const Tensor& tensor, std::int64_t i, const float* values) noexcept {
  auto* to = static_cast<float*>(tensor.data) + i * tensor.strides[0];
  const std::int64_t width = tensor.shape[1];
  const std::int64_t step = tensor.strides[1];
  if (step == 1) {
    for (std::int64_t d = 0; d < width; ++d) to[d] += values[d];
  } else {
    for (std::int64_t d = 0; d < width; ++d) to[d * step] += values[d];
  }
}

/// Element (i, j) of a [.., ..] fp32 tensor.
inline float& element(const Tensor& tensor, std::int64_t i, std::int64_t j) noexcept {
  return static_cast<float*>(tensor.data)[i * tensor.strides[0] + j * tensor.strides[1]];
}

/// Key rows keys[0..count) as packed [padded(count), score_dim] (latent columns, then rope), padding rows zero.
inline void gather_keys(const Tensor& kv_latent, const Tensor& k_rope, const std::int64_t* keys, std::int64_t count,
                        std::int64_t padded_count, std::int64_t score_dim, BFloat16* to) noexcept {
  for (std::int64_t i = 0; i < count; ++i) {
    read_row(kv_latent, keys[i], 0, to + i * score_dim);
    if (k_rope.defined()) read_row(k_rope, keys[i], 0, to + i * score_dim + kLatentDim);
  }
  std::fill(to + count * score_dim, to + padded_count * score_dim, BFloat16{});
}

}  // namespace sparsemla::cpu
