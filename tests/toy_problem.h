// Small problems in fp64 for the tests of the reference: any widths, every optional argument.
#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>
#include <random>
#include <utility>
#include <vector>

#include "sparsemla/attention.h"

namespace sparsemla {

struct ToyProblem {
  std::int64_t tokens = 0;
  std::int64_t keys = 0;
  std::int64_t heads = 0;
  std::int64_t width = 0;
  std::int64_t latent = 0;
  std::int64_t rope = 0;

  // fp64, row-major. Empty = not given.
  std::vector<double> q_latent, q_rope, kv_latent, k_rope, sink, dout, dlse;
  std::vector<std::int32_t> indices, topk_length, cu_seqlens_q, cu_seqlens_k;
  bool causal = false;
  std::optional<double> softmax_scale;

  /// Standard-normal tensors; lists of keys drawn from all keys (so with duplicates).
  static ToyProblem random(std::int64_t tokens, std::int64_t keys, std::int64_t heads, std::int64_t width,
                           std::int64_t latent, std::int64_t rope, unsigned seed) {
    ToyProblem p;
    p.tokens = tokens;
    p.keys = keys;
    p.heads = heads;
    p.width = width;
    p.latent = latent;
    p.rope = rope;
    std::mt19937 engine(seed);
    std::normal_distribution<double> normal;
    const auto fill = [&](std::vector<double>& values, std::int64_t count) {
      values.resize(static_cast<std::size_t>(count));
      for (double& value : values) value = normal(engine);
    };
    fill(p.q_latent, tokens * heads * latent);
    fill(p.q_rope, tokens * heads * rope);
    fill(p.kv_latent, keys * latent);
    fill(p.k_rope, keys * rope);
    fill(p.dout, tokens * heads * latent);
    std::uniform_int_distribution<std::int32_t> key(0, static_cast<std::int32_t>(keys) - 1);
    for (std::int64_t i = 0; i < tokens * width; ++i) p.indices.push_back(key(engine));
    return p;
  }

  /// q = 0: every valid slot weighs the same.
  static ToyProblem with_zero_queries(std::int64_t tokens, std::int64_t keys, std::int64_t heads,
                                      std::vector<std::int32_t> indices) {
    const auto slots = static_cast<std::int64_t>(indices.size());
    ToyProblem p = random(tokens, keys, heads, slots / tokens, 6, 2, 11);
    std::fill(p.q_latent.begin(), p.q_latent.end(), 0);
    std::fill(p.q_rope.begin(), p.q_rope.end(), 0);
    p.indices = std::move(indices);
    return p;
  }

  void add_dlse(unsigned seed) {
    std::mt19937 engine(seed);
    std::normal_distribution<double> normal;
    dlse.resize(static_cast<std::size_t>(tokens * heads));
    for (double& value : dlse) value = normal(engine);
  }

  [[nodiscard]] AttentionInputs inputs() const {
    AttentionInputs result;
    result.q_latent = Tensor::contiguous(q_latent.data(), DataType::kFloat64, {tokens, heads, latent});
    result.kv_latent = Tensor::contiguous(kv_latent.data(), DataType::kFloat64, {keys, latent});
    if (rope > 0) {
      result.q_rope = Tensor::contiguous(q_rope.data(), DataType::kFloat64, {tokens, heads, rope});
      result.k_rope = Tensor::contiguous(k_rope.data(), DataType::kFloat64, {keys, rope});
    }
    result.indices = Tensor::contiguous(indices.data(), DataType::kInt32, {tokens, width});
    result.topk_length = optional(topk_length);
    result.sink = optional(sink);
    result.cu_seqlens_q = optional(cu_seqlens_q);
    result.cu_seqlens_k = optional(cu_seqlens_k);
    result.causal = causal;
    result.softmax_scale = softmax_scale;
    return result;
  }
  [[nodiscard]] Tensor dout_tensor() const {
    return Tensor::contiguous(dout.data(), DataType::kFloat64, {tokens, heads, latent});
  }
  [[nodiscard]] Tensor dlse_tensor() const {
    return dlse.empty() ? Tensor{} : Tensor::contiguous(dlse.data(), DataType::kFloat64, {tokens, heads});
  }

 private:
  static Tensor optional(const std::vector<double>& values) {
    if (values.empty()) return {};
    return Tensor::contiguous(values.data(), DataType::kFloat64, {static_cast<std::int64_t>(values.size())});
  }
  static Tensor optional(const std::vector<std::int32_t>& values) {
    if (values.empty()) return {};
    return Tensor::contiguous(values.data(), DataType::kInt32, {static_cast<std::int64_t>(values.size())});
  }
};

}  // namespace sparsemla
