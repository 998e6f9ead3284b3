// Which slots of a list are keys. One rule, for every backend. Host and device.
#pragma once

#include <cstdint>

#include "core/host_device.h"
#include "sparsemla/attention.h"

namespace sparsemla {

/// The keys that one token may select: rows key_begin + [0, limit), through its first num_slots slots.
struct RowKeys {
  std::int64_t key_begin = 0;
  std::int64_t limit = 0;
  std::int64_t num_slots = 0;

  [[nodiscard]] SPARSEMLA_HOST_DEVICE bool selects(std::int32_t index) const noexcept {
    return index >= 0 && index < limit;
  }
};

template <typename T>
T load(const Tensor& tensor, std::int64_t i) noexcept {
  return static_cast<const T*>(tensor.data)[i * tensor.strides[0]];
}

/// Resolves documents, causality and lengths for a token. Plain pointers and numbers, so that a kernel takes it by
/// value; row() runs where the pointers can be read. Offsets on a device have never been checked: whatever they hold,
/// row() reads only cu_seqlens and topk_length, and what it allows lies within [0, num_keys) and [0, topk).
struct IndexRuleView {
  const std::int32_t* cu_seqlens_q = nullptr;  // [num_documents + 1]; null: one document of all tokens and keys
  const std::int32_t* cu_seqlens_k = nullptr;
  const std::int32_t* topk_length = nullptr;  // [num_tokens]; null: every slot counts
  std::int64_t cu_seqlens_q_stride = 0;
  std::int64_t cu_seqlens_k_stride = 0;
  std::int64_t topk_length_stride = 0;
  std::int64_t num_documents = 0;
  std::int64_t num_tokens = 0;
  std::int64_t num_keys = 0;
  std::int64_t topk = 0;
  bool causal = false;

  [[nodiscard]] SPARSEMLA_HOST_DEVICE RowKeys row(std::int64_t token) const noexcept {
    RowKeys keys;
    std::int64_t query_begin = 0;
    std::int64_t query_end = num_tokens;
    std::int64_t key_end = num_keys;
    if (cu_seqlens_q != nullptr) {
      const std::int64_t document = find_document(token);
      if (document < 0) return keys;
      query_begin = clamped(cu_seqlens_q[document * cu_seqlens_q_stride], num_tokens);
      query_end = clamped(cu_seqlens_q[(document + 1) * cu_seqlens_q_stride], num_tokens);
      keys.key_begin = clamped(cu_seqlens_k[document * cu_seqlens_k_stride], num_keys);
      key_end = clamped(cu_seqlens_k[(document + 1) * cu_seqlens_k_stride], num_keys);
    }
    keys.limit = key_end > keys.key_begin ? key_end - keys.key_begin : 0;
    if (causal) {
      keys.limit = clamped(token - query_begin + 1 + keys.limit - (query_end - query_begin), keys.limit);
    }
    keys.num_slots = topk_length == nullptr ? topk : clamped(topk_length[token * topk_length_stride], topk);
    return keys;
  }

 private:
  /// `value` within [0, end].
  [[nodiscard]] SPARSEMLA_HOST_DEVICE static std::int64_t clamped(std::int64_t value, std::int64_t end) noexcept {
    return value < 0 ? 0 : (value > end ? end : value);
  }

  /// The last document that begins at or before `token`; -1 past the end of the last one. log2(num_documents) reads.
  [[nodiscard]] SPARSEMLA_HOST_DEVICE std::int64_t find_document(std::int64_t token) const noexcept {
    std::int64_t low = 0;
    std::int64_t high = num_documents;
    if (high < 1 || token >= cu_seqlens_q[high * cu_seqlens_q_stride]) return -1;
    while (high - low > 1) {
      const std::int64_t middle = (low + high) / 2;
      (cu_seqlens_q[middle * cu_seqlens_q_stride] <= token ? low : high) = middle;
    }
    return low;
  }
};

[[nodiscard]] inline IndexRuleView make_index_rules(const AttentionInputs& inputs) noexcept {
  IndexRuleView rules;
  rules.num_tokens = inputs.q_latent.shape[0];
  rules.num_keys = inputs.kv_latent.shape[0];
  rules.topk = inputs.indices.shape[1];
  rules.causal = inputs.causal;
  if (inputs.cu_seqlens_q.defined()) {
    rules.cu_seqlens_q = static_cast<const std::int32_t*>(inputs.cu_seqlens_q.data);
    rules.cu_seqlens_k = static_cast<const std::int32_t*>(inputs.cu_seqlens_k.data);
    rules.cu_seqlens_q_stride = inputs.cu_seqlens_q.strides[0];
    rules.cu_seqlens_k_stride = inputs.cu_seqlens_k.strides[0];
    rules.num_documents = inputs.cu_seqlens_q.shape[0] - 1;
  }
  if (inputs.topk_length.defined()) {
    rules.topk_length = static_cast<const std::int32_t*>(inputs.topk_length.data);
    rules.topk_length_stride = inputs.topk_length.strides[0];
  }
  return rules;
}

}  // namespace sparsemla
