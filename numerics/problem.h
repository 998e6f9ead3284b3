// An attention problem that owns its tensors, and the seeded generators that fill one.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "sparsemla/attention.h"
#include "sparsemla/bfloat16.h"

namespace sparsemla {

/// Inputs (and, if filled, dout and dlse) in contiguous row-major storage. An empty vector = tensor not given.
struct Problem {
  std::int64_t num_tokens = 0;
  std::int64_t num_keys = 0;
  std::int64_t num_heads = 0;
  std::int64_t topk = 0;
  std::int64_t rope_dim = kRopeDim;  // 64 or 0

  std::vector<BFloat16> q_latent;          // [T, H, 512]
  std::vector<BFloat16> q_rope;            // [T, H, 64]
  std::vector<BFloat16> kv_latent;         // [S, 512]
  std::vector<BFloat16> k_rope;            // [S, 64]
  std::vector<std::int32_t> indices;       // [T, W]
  std::vector<std::int32_t> topk_length;   // [T]
  std::vector<float> sink;                 // [H]
  std::vector<std::int32_t> cu_seqlens_q;  // [B+1]
  std::vector<std::int32_t> cu_seqlens_k;  // [B+1]
  std::vector<BFloat16> dout;              // [T, H, 512]
  std::vector<float> dlse;                 // [T, H]
  bool causal = false;
  std::optional<double> softmax_scale;

  /// Views into this object; valid while it lives and its vectors are not resized.
  [[nodiscard]] AttentionInputs inputs() const;
  [[nodiscard]] Tensor dout_tensor() const;  // undefined if empty
  [[nodiscard]] Tensor dlse_tensor() const;
};

/// Sizes and seed of a generated problem. Draws depend only on (seed, tensor, row), so they are the same for any thread
/// count, and a smaller problem's rows are a larger one's first rows.
struct ProblemShape {
  std::int64_t num_tokens = 512;
  std::int64_t num_keys = 512;
  std::int64_t topk = 256;
  std::int64_t num_heads = 128;
  std::int64_t rope_dim = kRopeDim;
  std::uint64_t seed = 1;
};

/// iid standard-normal q, k, v and dout; each token's list: distinct keys drawn uniformly from all S (W <= S; the rest
/// is -1 if W > S).
[[nodiscard]] Problem make_iid(const ProblemShape& shape, bool with_gradient, int num_threads = 0);

/// Setup P of docs/numerics.md. iid inputs, then q_rope_t += beta*k_rope_t, q_latent_t += beta*kv_latent_t (token t's
/// own key is t + S - T); list of token t: its own key in slot 0, then distinct random earlier keys, then -1 (all
/// earlier keys while they fit). Needs S >= T.
[[nodiscard]] Problem make_peaked(const ProblemShape& shape, double beta, bool with_gradient, int num_threads = 0);

/// Where in the visiting order of a walk the dominant key stands.
enum class SlotOrder : std::uint8_t {
  kDominantFirst,  // "first": met first
  kDominantLast,   // "last": met last
  kAscending,      // by key index
  kRandom,         // seeded shuffle
};
[[nodiscard]] SlotOrder parse_slot_order(std::string_view text);  // "first" "last" "ascending" "random"
[[nodiscard]] std::string_view to_string(SlotOrder order) noexcept;

/// A copy of `indices` [T, W] with each token's entries >= 0 reordered in place among
/// the slots 0..n-1, empty slots after them. `dominant` [T]: the key index of each token's dominant key, or -1.
/// For kDominantFirst / kDominantLast the dominant key is put into the slot that `walk` visits first / last and the
/// others keep their relative order.
[[nodiscard]] std::vector<std::int32_t> reorder_slots(const std::vector<std::int32_t>& indices, std::int64_t num_tokens,
                                                      std::int64_t topk, const std::vector<std::int32_t>& dominant,
                                                      SlotOrder order, WalkDirection walk, std::uint64_t seed);

}  // namespace sparsemla
