// Which key of each token draws the most weight: fp64, its own loops.
#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <limits>

#include "audit/subject.h"
#include "numerics/parallel.h"
#include "sparsemla/bfloat16.h"

namespace sparsemla::audit {
namespace {

std::size_t at(std::int64_t index) { return static_cast<std::size_t>(index); }

/// First key row and number of usable keys (before the causal limit) of a token's document.
struct Document {
  std::int64_t first_token = 0;
  std::int64_t num_tokens = 0;
  std::int64_t first_key = 0;
  std::int64_t num_keys = 0;
};

Document document_of(const Subject& subject, std::int64_t token) {
  const Tensor& cu_q = subject.inputs.cu_seqlens_q;
  const Tensor& cu_k = subject.inputs.cu_seqlens_k;
  if (!cu_q.defined()) {
    return {0, subject.sizes.num_tokens, 0, subject.sizes.num_keys};
  }
  const auto* q = static_cast<const std::int32_t*>(cu_q.data);
  const auto* k = static_cast<const std::int32_t*>(cu_k.data);
  for (std::int64_t b = 0; b + 1 < cu_q.shape[0]; ++b) {
    const std::int64_t begin = q[b * cu_q.strides[0]];
    const std::int64_t end = q[(b + 1) * cu_q.strides[0]];
    if (token >= begin && token < end) {
      const std::int64_t first_key = k[b * cu_k.strides[0]];
      return {begin, end - begin, first_key, k[(b + 1) * cu_k.strides[0]] - first_key};
    }
  }
  return {token, 0, 0, 0};  // past the last document: no keys
}

/// Appends row `row` of a bf16 matrix [.., columns] at element offset `offset`.
void append_row(const Tensor& tensor, std::int64_t offset, std::vector<double>& row) {
  if (!tensor.defined()) return;
  const std::size_t last = static_cast<std::size_t>(tensor.rank - 1);
  const auto* data = static_cast<const BFloat16*>(tensor.data);
  for (std::int64_t d = 0; d < tensor.shape[last]; ++d) {
    row.push_back(static_cast<double>(to_float(data[offset + d * tensor.strides[last]])));
  }
}

/// Eight partial sums, so that the loop runs in vector registers.
double dot(const double* a, const double* b, std::size_t count) {
  std::array<double, 8> sums{};
  std::size_t i = 0;
  for (; i + 8 <= count; i += 8) {
    for (std::size_t lane = 0; lane < 8; ++lane) sums[lane] += a[i + lane] * b[i + lane];
  }
  double total = 0;
  for (; i < count; ++i) total += a[i] * b[i];
  for (const double sum : sums) total += sum;
  return total;
}

struct TokenResult {
  std::int32_t key = -1;
  std::vector<double> weights;  // [H]
};

TokenResult find_for_token(const Subject& subject, const std::vector<double>& lse, std::int64_t token) {
  const AttentionInputs& inputs = subject.inputs;
  const std::int64_t heads = subject.sizes.num_heads;
  const auto width = at(subject.sizes.latent_dim + subject.sizes.rope_dim);
  const Document document = document_of(subject, token);
  const std::int64_t limit =
      inputs.causal ? token - document.first_token + 1 + document.num_keys - document.num_tokens : document.num_keys;
  std::vector<double> query;
  query.reserve(at(heads) * width);
  for (std::int64_t head = 0; head < heads; ++head) {
    for (const Tensor* part : {&inputs.q_latent, &inputs.q_rope}) {
      append_row(*part, token * part->strides[0] + head * part->strides[1], query);
    }
  }
  TokenResult best;
  double best_sum = -1;
  std::vector<double> key;
  std::vector<double> weights(at(heads));
  for (std::int64_t slot = 0; slot < subject.sizes.topk; ++slot) {
    const std::int32_t index = subject.indices[at(token * subject.sizes.topk + slot)];
    const bool considered = subject.own_keys.empty() || index == subject.own_keys[at(token)];
    if (index < 0 || index >= std::min(limit, document.num_keys) || !considered) continue;
    key.clear();
    for (const Tensor* part : {&inputs.kv_latent, &inputs.k_rope}) {
      append_row(*part, (document.first_key + index) * part->strides[0], key);
    }
    double sum = 0;
    for (std::int64_t head = 0; head < heads; ++head) {
      const double score = dot(&query[at(head) * width], key.data(), width);
      weights[at(head)] = std::exp(*inputs.softmax_scale * score - lse[at(token * heads + head)]);
      sum += weights[at(head)];
    }
    if (sum > best_sum) {
      best_sum = sum;
      best.key = index;
      best.weights = weights;
    }
  }
  return best;
}

double percentile(std::vector<double>& values, double fraction) {
  if (values.empty()) return std::numeric_limits<double>::quiet_NaN();
  const auto rank = static_cast<std::ptrdiff_t>(std::lround(fraction * static_cast<double>(values.size() - 1)));
  std::nth_element(values.begin(), values.begin() + rank, values.end());
  return values[static_cast<std::size_t>(rank)];
}

}  // namespace

Dominant find_dominant(const Subject& subject, const std::vector<double>& lse, int num_threads) {
  std::vector<TokenResult> tokens(at(subject.sizes.num_tokens));
  parallel_blocks(subject.sizes.num_tokens, 1, num_threads, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t token = begin; token < end; ++token) tokens[at(token)] = find_for_token(subject, lse, token);
  });
  Dominant result;
  std::vector<double> weights;
  for (const TokenResult& token : tokens) {
    result.keys.push_back(token.key);
    std::copy_if(token.weights.begin(), token.weights.end(), std::back_inserter(weights),
                 [](double weight) { return std::isfinite(weight); });
  }
  result.weight_median = percentile(weights, 0.5);
  result.weight_p90 = percentile(weights, 0.9);
  return result;
}

}  // namespace sparsemla::audit
