#include "numerics/problem.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <iterator>
#include <numeric>
#include <tuple>
#include <utility>

#include "numerics/parallel.h"
#include "sparsemla/error.h"

namespace sparsemla {
namespace {

// ---------------------------------------------------------------------------------------------------------------------
// Random draws. Counter based: draw i of a row is a hash of (seed, tensor, row, i), so that no draw depends on another
// and rows can be filled by any thread in any order. Only integer and correctly rounded fp32 operations are used (and
// no contraction, see the compile options), so that the same seed gives the same bits on any machine.

// Values are part of what a seed means: never renumber.
enum class Stream : std::uint64_t { kQLatent = 1, kQRope, kKvLatent, kKRope, kDout, kIndices, kSlotOrder };

constexpr std::uint64_t kGoldenGamma = 0x9E3779B97F4A7C15u;  // 2^64 / golden ratio, odd

/// The splitmix64 output function: a bijection whose output bits all depend on all input bits.
constexpr std::uint64_t mix(std::uint64_t x) noexcept {
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
  return x ^ (x >> 31);
}

constexpr std::uint64_t row_key(std::uint64_t seed, Stream stream, std::int64_t row) noexcept {
  const std::uint64_t tensor_key = mix(mix(seed + kGoldenGamma) + static_cast<std::uint64_t>(stream) * kGoldenGamma);
  return mix(tensor_key + static_cast<std::uint64_t>(row) * kGoldenGamma);
}

constexpr std::uint64_t draw(std::uint64_t key, std::int64_t index) noexcept {
  return mix(key + static_cast<std::uint64_t>(index + 1) * kGoldenGamma);
}

/// sqrt(-2 ln u) for u = (k + 1/2) / 2^31, k uniform in 0 .. 2^31 - 1.
/// ln u = exponent * ln 2 + ln m, m in [sqrt(1/2), sqrt(2)), ln m = 2 atanh((m - 1) / (m + 1)); the first term left out
/// of the series is below 1e-9.
inline float normal_radius(std::uint32_t random) noexcept {
  const float u = (static_cast<float>(static_cast<std::int32_t>(random >> 1)) + 0.5F) * 0x1p-31F;
  constexpr std::int32_t kSqrtHalfBits = 0x3F3504F3;
  const auto offset = static_cast<std::int32_t>(std::bit_cast<std::uint32_t>(u)) - kSqrtHalfBits;
  const std::int32_t exponent = offset >> 23;
  const float m = std::bit_cast<float>(static_cast<std::uint32_t>((offset & 0x7FFFFF) + kSqrtHalfBits));
  const float s = (m - 1.0F) / (m + 1.0F);
  const float s2 = s * s;
  const float ln_m = 2.0F * s * (1.0F + s2 * (1.0F / 3 + s2 * (1.0F / 5 + s2 * (1.0F / 7 + s2 * (1.0F / 9)))));
  const float ln_u = static_cast<float>(exponent) * 0.693147181F + ln_m;
  return std::sqrt(std::max(0.0F, -2.0F * ln_u));
}

/// cos and sin of an angle uniform on the circle: the low 30 bits give it within a quarter turn around 0, where the
/// Taylor series is good to 3e-8; the high 2 bits turn it by quarter turns.
inline std::pair<float, float> unit_circle(std::uint32_t random) noexcept {
  const auto within = static_cast<std::int32_t>(random & 0x3FFFFFFFu) - (1 << 29);
  const float x = static_cast<float>(within) * (1.57079633F * 0x1p-30F);
  const float x2 = x * x;
  const float sine = x * (1.0F + x2 * (-1.0F / 6 + x2 * (1.0F / 120 + x2 * (-1.0F / 5040 + x2 * (1.0F / 362880)))));
  const float cosine = 1.0F + x2 * (-1.0F / 2 + x2 * (1.0F / 24 + x2 * (-1.0F / 720 + x2 * (1.0F / 40320))));
  const bool quarter = ((random >> 30) & 1u) != 0;
  const bool half = (random >> 31) != 0;
  const float c = quarter ? -sine : cosine;
  const float s = quarter ? cosine : sine;
  return {half ? -c : c, half ? -s : s};
}

/// Fills `row` (an even number of elements) with independent standard normals by the Box-Muller transform: draw i gives
/// the elements i and i + size/2. Exact up to fp32 rounding, except that the tails end at 6.7.
template <std::int64_t kWidth>
void fill_normal_row(std::uint64_t key, float* row) noexcept {
  constexpr std::int64_t kPairs = kWidth / 2;
  std::array<std::uint32_t, kPairs> radius_bits;
  std::array<std::uint32_t, kPairs> angle_bits;
  for (std::int64_t i = 0; i < kPairs; ++i) {
    const std::uint64_t bits = draw(key, i);
    radius_bits[i] = static_cast<std::uint32_t>(bits >> 32);
    angle_bits[i] = static_cast<std::uint32_t>(bits);
  }
  for (std::int64_t i = 0; i < kPairs; ++i) {
    const float radius = normal_radius(radius_bits[i]);
    const auto [cosine, sine] = unit_circle(angle_bits[i]);
    row[i] = radius * cosine;
    row[i + kPairs] = radius * sine;
  }
}

// ---------------------------------------------------------------------------------------------------------------------
// Tensors.

/// Rows of one tensor, [tokens, heads, width] or [keys, width] with heads = 1. A row's draws are keyed by (token,
/// head).
struct RowBlock {
  std::vector<BFloat16>& values;
  Stream stream;
  std::int64_t tokens;
  std::int64_t heads;
};

/// values[t,h,:] = bf16(normal + beta * addend[t + addend_offset,:]), one rounding. `addend` may be null.
template <std::int64_t kWidth>
void fill_rows(const RowBlock& block, std::uint64_t seed, double beta, const BFloat16* addend,
               std::int64_t addend_offset, int num_threads) {
  block.values.resize(static_cast<std::size_t>(block.tokens * block.heads * kWidth));
  BFloat16* const values = block.values.data();
  const auto weight = static_cast<float>(beta);
  const auto fill = [&](std::int64_t begin, std::int64_t end) {
    std::array<float, kWidth> normal;
    for (std::int64_t row = begin; row < end; ++row) {
      const std::int64_t token = row / block.heads;
      fill_normal_row<kWidth>(row_key(seed, block.stream, token * kMaxHeads + row % block.heads), normal.data());
      if (addend != nullptr) {
        const BFloat16* const own = addend + (token + addend_offset) * kWidth;
        for (std::int64_t d = 0; d < kWidth; ++d) normal[d] += weight * to_float(own[d]);
      }
      BFloat16* const out = values + row * kWidth;
      for (std::int64_t d = 0; d < kWidth; ++d) out[d] = to_bfloat16(normal[d]);
    }
  };
  parallel_blocks(block.tokens * block.heads, 256, num_threads, fill);
}

/// Keys, then queries with beta times their own key added (own key of token t: t + S - T), then dout.
void fill_tensors(Problem& problem, std::uint64_t seed, double beta, bool with_gradient, int num_threads) {
  const auto [tokens, keys, heads] = std::tuple(problem.num_tokens, problem.num_keys, problem.num_heads);
  const bool rope = problem.rope_dim != 0;
  const std::int64_t own = keys - tokens;
  fill_rows<kLatentDim>({problem.kv_latent, Stream::kKvLatent, keys, 1}, seed, 0, nullptr, 0, num_threads);
  const BFloat16* const kv_latent = beta != 0 ? problem.kv_latent.data() : nullptr;
  fill_rows<kLatentDim>({problem.q_latent, Stream::kQLatent, tokens, heads}, seed, beta, kv_latent, own, num_threads);
  if (rope) {
    fill_rows<kRopeDim>({problem.k_rope, Stream::kKRope, keys, 1}, seed, 0, nullptr, 0, num_threads);
    const BFloat16* const k_rope = beta != 0 ? problem.k_rope.data() : nullptr;
    fill_rows<kRopeDim>({problem.q_rope, Stream::kQRope, tokens, heads}, seed, beta, k_rope, own, num_threads);
  }
  if (with_gradient)
    fill_rows<kLatentDim>({problem.dout, Stream::kDout, tokens, heads}, seed, 0, nullptr, 0, num_threads);
}

// ---------------------------------------------------------------------------------------------------------------------
// Index lists.

/// Draws without replacement by a partial Fisher-Yates shuffle of 0..count-1, whose swaps are undone afterwards: the
/// cost is that of the draws, whatever `count` is.
class DistinctDraws {
 public:
  explicit DistinctDraws(std::int64_t max_count) : pool_(static_cast<std::size_t>(max_count)) {
    std::iota(pool_.begin(), pool_.end(), 0);
  }

  /// Writes num_draws <= count <= max_count distinct values of 0..count-1. A shorter list is a prefix of a longer one.
  void operator()(std::uint64_t key, std::int64_t count, std::int64_t num_draws, std::int32_t* out) {
    partners_.resize(static_cast<std::size_t>(num_draws));
    for (std::int64_t i = 0; i < num_draws; ++i) {
      partners_[i] = i + static_cast<std::int64_t>(draw(key, i) % static_cast<std::uint64_t>(count - i));
      std::swap(pool_[i], pool_[partners_[i]]);
      out[i] = pool_[i];
    }
    for (std::int64_t i = num_draws - 1; i >= 0; --i) std::swap(pool_[i], pool_[partners_[i]]);
  }

 private:
  std::vector<std::int32_t> pool_;
  std::vector<std::int64_t> partners_;
};

/// List of token t: its own key t + S - T in slot 0 if `own_key_first`, then distinct keys from those before it (from
/// all keys if not), then -1.
void fill_indices(Problem& problem, std::uint64_t seed, bool own_key_first, int num_threads) {
  const std::int64_t width = problem.topk;
  problem.indices.assign(static_cast<std::size_t>(problem.num_tokens * width), -1);
  if (width == 0) return;
  const auto fill = [&](std::int64_t begin, std::int64_t end) {
    DistinctDraws distinct_draws(problem.num_keys);
    for (std::int64_t token = begin; token < end; ++token) {
      std::int32_t* const list = problem.indices.data() + token * width;
      const std::int64_t own = token + problem.num_keys - problem.num_tokens;
      const std::int64_t first = own_key_first ? 1 : 0;
      const std::int64_t candidates = own_key_first ? own : problem.num_keys;
      if (own_key_first) list[0] = static_cast<std::int32_t>(own);
      distinct_draws(row_key(seed, Stream::kIndices, token), candidates, std::min(width - first, candidates),
                     list + first);
    }
  };
  parallel_blocks(problem.num_tokens, 64, num_threads, fill);
}

// ---------------------------------------------------------------------------------------------------------------------

void require(bool ok, std::string_view argument, std::int64_t found, std::string_view wanted) {
  if (!ok) throw Error(argument, std::to_string(found), wanted);
}

Problem make_problem(const ProblemShape& shape) {
  require(shape.num_tokens >= 0, "num_tokens", shape.num_tokens, "0 or more");
  require(shape.num_keys >= 0 && shape.num_keys <= INT32_MAX, "num_keys", shape.num_keys, "0 .. 2^31 - 1");
  require(shape.topk >= 0, "topk", shape.topk, "0 or more");
  require(shape.num_heads >= 1 && shape.num_heads <= kMaxHeads, "num_heads", shape.num_heads, "1 .. 256");
  require(shape.rope_dim == 0 || shape.rope_dim == kRopeDim, "rope_dim", shape.rope_dim, "0 or 64");
  Problem problem;
  problem.num_tokens = shape.num_tokens;
  problem.num_keys = shape.num_keys;
  problem.num_heads = shape.num_heads;
  problem.topk = shape.topk;
  problem.rope_dim = shape.rope_dim;
  return problem;
}

/// A view of the vector, or an undefined tensor for an empty vector of a tensor that is optional.
template <typename Element>
Tensor view(const std::vector<Element>& values, DataType dtype, std::initializer_list<std::int64_t> shape,
            bool optional) {
  if (optional && values.empty()) return {};
  return Tensor::contiguous(values.data(), dtype, shape);
}

}  // namespace

AttentionInputs Problem::inputs() const {
  AttentionInputs result;
  const auto documents = static_cast<std::int64_t>(cu_seqlens_q.size());
  const bool rope = rope_dim != 0;
  result.q_latent = view(q_latent, DataType::kBFloat16, {num_tokens, num_heads, kLatentDim}, false);
  result.kv_latent = view(kv_latent, DataType::kBFloat16, {num_keys, kLatentDim}, false);
  if (rope) {
    result.q_rope = view(q_rope, DataType::kBFloat16, {num_tokens, num_heads, rope_dim}, false);
    result.k_rope = view(k_rope, DataType::kBFloat16, {num_keys, rope_dim}, false);
  }
  result.indices = view(indices, DataType::kInt32, {num_tokens, topk}, false);
  result.topk_length = view(topk_length, DataType::kInt32, {num_tokens}, true);
  result.sink = view(sink, DataType::kFloat32, {num_heads}, true);
  result.cu_seqlens_q = view(cu_seqlens_q, DataType::kInt32, {documents}, true);
  result.cu_seqlens_k = view(cu_seqlens_k, DataType::kInt32, {static_cast<std::int64_t>(cu_seqlens_k.size())}, true);
  result.causal = causal;
  result.softmax_scale = softmax_scale;
  return result;
}

Tensor Problem::dout_tensor() const {
  return view(dout, DataType::kBFloat16, {num_tokens, num_heads, kLatentDim}, true);
}

Tensor Problem::dlse_tensor() const { return view(dlse, DataType::kFloat32, {num_tokens, num_heads}, true); }

Problem make_iid(const ProblemShape& shape, bool with_gradient, int num_threads) {
  Problem problem = make_problem(shape);
  fill_tensors(problem, shape.seed, 0, with_gradient, num_threads);
  fill_indices(problem, shape.seed, false, num_threads);
  return problem;
}

Problem make_peaked(const ProblemShape& shape, double beta, bool with_gradient, int num_threads) {
  Problem problem = make_problem(shape);
  require(shape.num_keys >= shape.num_tokens, "num_keys", shape.num_keys, "at least num_tokens: each has an own key");
  fill_tensors(problem, shape.seed, beta, with_gradient, num_threads);
  fill_indices(problem, shape.seed, true, num_threads);
  return problem;
}

SlotOrder parse_slot_order(std::string_view text) {
  for (const SlotOrder order :
       {SlotOrder::kDominantFirst, SlotOrder::kDominantLast, SlotOrder::kAscending, SlotOrder::kRandom})
    if (text == to_string(order)) return order;
  throw Error("slot order", text, "first, last, ascending or random");
}

std::string_view to_string(SlotOrder order) noexcept {
  switch (order) {
    case SlotOrder::kDominantFirst:
      return "first";
    case SlotOrder::kDominantLast:
      return "last";
    case SlotOrder::kAscending:
      return "ascending";
    case SlotOrder::kRandom:
      return "random";
  }
  return "unknown";
}

namespace {

/// Moves the first occurrence of `dominant`, if there is one, to the slot that the walk meets first or last.
void move_dominant(std::vector<std::int32_t>& keys, std::int32_t dominant, bool to_front) {
  const auto found = std::find(keys.begin(), keys.end(), dominant);
  if (found == keys.end()) return;
  if (to_front)
    std::rotate(keys.begin(), found, found + 1);
  else
    std::rotate(found, found + 1, keys.end());
}

void shuffle(std::vector<std::int32_t>& keys, std::uint64_t key) {
  for (std::size_t i = keys.size(); i > 1; --i) {
    const std::uint64_t partner = draw(key, static_cast<std::int64_t>(i)) % i;
    std::swap(keys[i - 1], keys[partner]);
  }
}

}  // namespace

std::vector<std::int32_t> reorder_slots(const std::vector<std::int32_t>& indices, std::int64_t num_tokens,
                                        std::int64_t topk, const std::vector<std::int32_t>& dominant, SlotOrder order,
                                        WalkDirection walk, std::uint64_t seed) {
  const auto size = static_cast<std::int64_t>(indices.size());
  require(size == num_tokens * topk, "indices", size,
          std::to_string(num_tokens * topk) + " elements, num_tokens * topk");
  const bool by_dominant = order == SlotOrder::kDominantFirst || order == SlotOrder::kDominantLast;
  const auto num_dominant = static_cast<std::int64_t>(dominant.size());
  require(!by_dominant || num_dominant == num_tokens, "dominant", num_dominant, "one key for each token");
  const bool to_front = (order == SlotOrder::kDominantFirst) == (walk == WalkDirection::kFirstToLast);

  std::vector<std::int32_t> result(indices.size(), -1);
  std::vector<std::int32_t> keys;
  for (std::int64_t token = 0; token < num_tokens; ++token) {
    const auto list = indices.begin() + token * topk;
    keys.clear();
    std::copy_if(list, list + topk, std::back_inserter(keys), [](std::int32_t key) { return key >= 0; });
    if (by_dominant) move_dominant(keys, dominant[token], to_front);
    if (order == SlotOrder::kAscending) std::sort(keys.begin(), keys.end());
    if (order == SlotOrder::kRandom) shuffle(keys, row_key(seed, Stream::kSlotOrder, token));
    std::copy(keys.begin(), keys.end(), result.begin() + token * topk);
  }
  return result;
}

}  // namespace sparsemla
