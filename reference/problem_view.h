// How the reference reads a call's arguments: its own decoding of numbers and its own rule for which slots count.
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <initializer_list>
#include <limits>
#include <string>
#include <string_view>
#include <tuple>
#include <vector>

#include "sparsemla/attention.h"
#include "sparsemla/error.h"

namespace sparsemla::reference {

// ---------------------------------------------------------------------------------------------------------------------
// Numbers.

[[nodiscard]] inline double decode_bfloat16(std::uint16_t bits) noexcept {
  return std::bit_cast<float>(static_cast<std::uint32_t>(bits) << 16);
}

/// Sign, 5 bits of exponent, 10 bits of fraction.
[[nodiscard]] inline double decode_float16(std::uint16_t bits) noexcept {
  const int exponent = (bits >> 10) & 31;
  const int fraction = bits & 1023;
  double magnitude = 0;
  if (exponent == 31)
    magnitude = fraction == 0 ? std::numeric_limits<double>::infinity() : std::numeric_limits<double>::quiet_NaN();
  else if (exponent == 0)
    magnitude = std::ldexp(fraction, -24);
  else
    magnitude = std::ldexp(1024 + fraction, exponent - 25);
  return (bits >> 15) != 0 ? -magnitude : magnitude;
}

/// out[i] = tensor element at `offset + i * stride`, offsets in elements.
inline void decode(const Tensor& tensor, std::int64_t offset, std::int64_t stride, std::int64_t count, double* out) {
  switch (tensor.dtype) {
    case DataType::kBFloat16: {
      const auto* const from = static_cast<const std::uint16_t*>(tensor.data) + offset;
      if (stride == 1)  // the usual case: this loop is vectorised
        for (std::int64_t i = 0; i < count; ++i) out[i] = decode_bfloat16(from[i]);
      else
        for (std::int64_t i = 0; i < count; ++i) out[i] = decode_bfloat16(from[i * stride]);
      return;
    }
    case DataType::kFloat16: {
      const auto* const from = static_cast<const std::uint16_t*>(tensor.data) + offset;
      for (std::int64_t i = 0; i < count; ++i) out[i] = decode_float16(from[i * stride]);
      return;
    }
    case DataType::kFloat32: {
      const auto* const from = static_cast<const float*>(tensor.data) + offset;
      for (std::int64_t i = 0; i < count; ++i) out[i] = from[i * stride];
      return;
    }
    default: {
      const auto* const from = static_cast<const double*>(tensor.data) + offset;
      for (std::int64_t i = 0; i < count; ++i) out[i] = from[i * stride];
      return;
    }
  }
}

/// tensor[row, :] of a rank-2 tensor.
inline void decode_row(const Tensor& tensor, std::int64_t row, double* out) {
  decode(tensor, row * tensor.strides[0], tensor.strides[1], tensor.shape[1], out);
}

/// tensor[token, head, :] of a rank-3 tensor.
inline void decode_row(const Tensor& tensor, std::int64_t token, std::int64_t head, double* out) {
  decode(tensor, token * tensor.strides[0] + head * tensor.strides[1], tensor.strides[2], tensor.shape[2], out);
}

/// Element `index` of a rank-1 int32 tensor.
[[nodiscard]] inline std::int64_t integer_at(const Tensor& tensor, std::int64_t index) {
  return static_cast<const std::int32_t*>(tensor.data)[index * tensor.strides[0]];
}

// ---------------------------------------------------------------------------------------------------------------------
// Arguments.

struct Extents {
  std::int64_t tokens = 0;  // T
  std::int64_t keys = 0;    // S
  std::int64_t heads = 0;   // H
  std::int64_t width = 0;   // W
  std::int64_t latent = 0;  // D
  std::int64_t rope = 0;    // R, 0 without rope
  double scale = 0;
};

enum class Kind : std::uint8_t { kFloat, kInteger };

/// Throws Error unless the tensor is on the CPU, has this shape and holds numbers of this kind. -1 = any extent.
inline void require(const Tensor& tensor, std::string_view name, Kind kind, std::initializer_list<std::int64_t> shape) {
  const bool is_float = tensor.dtype == DataType::kBFloat16 || tensor.dtype == DataType::kFloat16 ||
                        tensor.dtype == DataType::kFloat32 || tensor.dtype == DataType::kFloat64;
  const bool right_kind = kind == Kind::kFloat ? is_float : tensor.dtype == DataType::kInt32;
  if (!right_kind) throw Error(name, "another dtype or no tensor", kind == Kind::kFloat ? "a float tensor" : "int32");
  if (tensor.device.type != DeviceType::kCpu) throw Error(name, "a device tensor", "a tensor on the cpu");
  bool right_shape = tensor.rank == static_cast<int>(shape.size());
  std::string found;
  std::string wanted;
  for (int axis = 0; axis < tensor.rank; ++axis) found += std::to_string(tensor.shape[axis]) + " ";
  int axis = 0;
  for (const std::int64_t extent : shape) {
    wanted += extent < 0 ? "any " : std::to_string(extent) + " ";
    right_shape = right_shape && (extent < 0 || tensor.shape[axis] == extent);
    ++axis;
  }
  if (!right_shape) throw Error(name, "shape [ " + found + "]", "shape [ " + wanted + "]");
}

inline void require_documents(const AttentionInputs& inputs, const Extents& extents) {
  if (!inputs.cu_seqlens_q.defined() && !inputs.cu_seqlens_k.defined()) return;
  require(inputs.cu_seqlens_q, "cu_seqlens_q", Kind::kInteger, {-1});
  const std::int64_t count = inputs.cu_seqlens_q.shape[0];
  require(inputs.cu_seqlens_k, "cu_seqlens_k", Kind::kInteger, {count});
  for (const auto& [tensor, name, end] : {std::tuple(inputs.cu_seqlens_q, "cu_seqlens_q", extents.tokens),
                                          std::tuple(inputs.cu_seqlens_k, "cu_seqlens_k", extents.keys)}) {
    bool ok = count > 0 && integer_at(tensor, 0) == 0 && integer_at(tensor, count - 1) <= end;
    for (std::int64_t i = 1; ok && i < count; ++i) ok = integer_at(tensor, i - 1) <= integer_at(tensor, i);
    if (!ok) throw Error(name, "other values", "values that start at 0, never decrease and end within the tensor");
  }
}

/// Reads the extents off the shapes. Errors: shapes or dtypes that do not fit together.
[[nodiscard]] inline Extents check(const AttentionInputs& inputs) {
  Extents e;
  require(inputs.q_latent, "q_latent", Kind::kFloat, {-1, -1, -1});
  e.tokens = inputs.q_latent.shape[0];
  e.heads = inputs.q_latent.shape[1];
  e.latent = inputs.q_latent.shape[2];
  require(inputs.kv_latent, "kv_latent", Kind::kFloat, {-1, e.latent});
  e.keys = inputs.kv_latent.shape[0];
  if (inputs.q_rope.defined() || inputs.k_rope.defined()) {
    require(inputs.q_rope, "q_rope", Kind::kFloat, {e.tokens, e.heads, -1});
    e.rope = inputs.q_rope.shape[2];
    require(inputs.k_rope, "k_rope", Kind::kFloat, {e.keys, e.rope});
  }
  require(inputs.indices, "indices", Kind::kInteger, {e.tokens, -1});
  e.width = inputs.indices.shape[1];
  if (inputs.topk_length.defined()) require(inputs.topk_length, "topk_length", Kind::kInteger, {e.tokens});
  if (inputs.sink.defined()) require(inputs.sink, "sink", Kind::kFloat, {e.heads});
  require_documents(inputs, e);
  e.scale = inputs.softmax_scale.value_or(1.0 / std::sqrt(static_cast<double>(e.latent + e.rope)));
  return e;
}

// ---------------------------------------------------------------------------------------------------------------------
// Which slots count.

/// The rows of kv_latent that token t attends to, in list order, duplicates kept.
inline void selected_keys(const AttentionInputs& inputs, const Extents& extents, std::int64_t token,
                          std::vector<std::int64_t>& keys) {
  keys.clear();
  // The document of the token: tokens up to q_end over keys [k_begin, k_end).
  std::int64_t q_end = extents.tokens;
  std::int64_t k_begin = 0;
  std::int64_t k_end = extents.keys;
  if (inputs.cu_seqlens_q.defined()) {
    const std::int64_t num_documents = inputs.cu_seqlens_q.shape[0] - 1;
    std::int64_t document = 0;
    while (document < num_documents && token >= integer_at(inputs.cu_seqlens_q, document + 1)) ++document;
    if (document == num_documents) return;  // past the last document
    q_end = integer_at(inputs.cu_seqlens_q, document + 1);
    k_begin = integer_at(inputs.cu_seqlens_k, document);
    k_end = integer_at(inputs.cu_seqlens_k, document + 1);
  }
  // Causal: the last token of the document sees all its keys, the one before it all but the last, ...
  const std::int64_t num_later_tokens = inputs.causal ? q_end - 1 - token : 0;
  const std::int64_t num_visible = (k_end - k_begin) - num_later_tokens;
  std::int64_t num_slots = extents.width;
  if (inputs.topk_length.defined()) num_slots = std::min(num_slots, integer_at(inputs.topk_length, token));
  if (num_slots <= 0) return;
  const auto* const list = static_cast<const std::int32_t*>(inputs.indices.data) + token * inputs.indices.strides[0];
  for (std::int64_t slot = 0; slot < num_slots; ++slot) {
    const std::int64_t index = list[slot * inputs.indices.strides[1]];
    if (index >= 0 && index < num_visible) keys.push_back(k_begin + index);
  }
}

}  // namespace sparsemla::reference
