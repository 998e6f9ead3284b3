// Which slots of a list are keys. One rule, for every backend.
#pragma once

#include <algorithm>
#include <cstdint>

#include "sparsemla/attention.h"

namespace sparsemla {

/// The keys that one token may select: rows key_begin + [0, limit), through its first num_slots slots.
struct RowKeys {
  std::int64_t key_begin = 0;
  std::int64_t limit = 0;
  std::int64_t num_slots = 0;

  [[nodiscard]] bool selects(std::int32_t index) const noexcept { return index >= 0 && index < limit; }
};

template <typename T>
T load(const Tensor& tensor, std::int64_t i) noexcept {
  return static_cast<const T*>(tensor.data)[i * tensor.strides[0]];
}

/// Resolves documents, causality and lengths for a token. Reads CPU tensors.
class IndexRules {
 public:
  explicit IndexRules(const AttentionInputs& inputs) noexcept
      : inputs_(inputs),
        num_tokens_(inputs.q_latent.shape[0]),
        num_keys_(inputs.kv_latent.shape[0]),
        topk_(inputs.indices.shape[1]) {}

  [[nodiscard]] RowKeys row(std::int64_t token) const noexcept {
    RowKeys keys;
    std::int64_t query_begin = 0;
    std::int64_t query_end = num_tokens_;
    std::int64_t key_end = num_keys_;
    if (inputs_.cu_seqlens_q.defined()) {
      const std::int64_t document = find_document(token);
      if (document < 0) return keys;
      query_begin = load<std::int32_t>(inputs_.cu_seqlens_q, document);
      query_end = load<std::int32_t>(inputs_.cu_seqlens_q, document + 1);
      keys.key_begin = load<std::int32_t>(inputs_.cu_seqlens_k, document);
      key_end = load<std::int32_t>(inputs_.cu_seqlens_k, document + 1);
    }
    keys.limit = key_end - keys.key_begin;
    if (inputs_.causal) {
      const std::int64_t position = token - query_begin;
      keys.limit = std::clamp<std::int64_t>(position + 1 + keys.limit - (query_end - query_begin), 0, keys.limit);
    }
    keys.num_slots = topk_;
    if (inputs_.topk_length.defined()) {
      keys.num_slots = std::clamp<std::int64_t>(load<std::int32_t>(inputs_.topk_length, token), 0, topk_);
    }
    return keys;
  }

 private:
  /// The last document that begins at or before `token`; -1 past the end of the last one.
  [[nodiscard]] std::int64_t find_document(std::int64_t token) const noexcept {
    const Tensor& offsets = inputs_.cu_seqlens_q;
    std::int64_t low = 0;
    std::int64_t high = offsets.shape[0] - 1;
    if (high < 1 || token >= load<std::int32_t>(offsets, high)) return -1;
    while (high - low > 1) {
      const std::int64_t middle = (low + high) / 2;
      (load<std::int32_t>(offsets, middle) <= token ? low : high) = middle;
    }
    return low;
  }

  const AttentionInputs& inputs_;
  std::int64_t num_tokens_;
  std::int64_t num_keys_;
  std::int64_t topk_;
};

}  // namespace sparsemla
