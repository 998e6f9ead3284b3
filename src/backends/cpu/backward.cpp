// The CPU backward, one token at a time, in ascending key order whatever walk the forward took: dq sums over keys in
// fp32, where the order is below every rounding that matters, and ascending keys let threads add into dkv in token
// order.
#include <algorithm>
#include <atomic>
#include <cmath>
#include <limits>
#include <memory>
#include <numbers>
#include <vector>

#include "backends/cpu/buffer.h"
#include "backends/cpu/engine.h"
#include "backends/cpu/key_blocks.h"
#include "backends/cpu/operation.h"
#include "backends/cpu/rows.h"
#include "backends/cpu/threads.h"
#include "core/exp2.h"
#include "core/sizes.h"

namespace sparsemla::cpu {
namespace {

/// log(exp(a) + exp(b)) of a finite or infinite pair.
double log_add_exp(double a, double b) {
  if (std::isnan(a) || std::isnan(b)) return std::numeric_limits<double>::quiet_NaN();
  const double high = std::max(a, b);
  if (std::isinf(high)) return high;
  return high + std::log1p(std::exp(std::min(a, b) - high));
}

/// sum_d dout * (out + out_residual) of one row, in fp64; without the residual where the pipeline has none.
double dpsum_of(const BackwardArguments& arguments, std::int64_t token, std::int64_t head, const BFloat16* dout,
                BFloat16* out, BFloat16* residual) {
  read_row(arguments.out, token, head, out);
  double sum = 0.0;
  if (arguments.out_residual.defined()) {
    read_row(arguments.out_residual, token, head, residual);
    for (std::int64_t d = 0; d < kLatentDim; ++d) {
      const double exact = static_cast<double>(to_float(out[d])) + static_cast<double>(to_float(residual[d]));
      sum += static_cast<double>(to_float(dout[d])) * exact;
    }
  } else {
    for (std::int64_t d = 0; d < kLatentDim; ++d) {
      sum += static_cast<double>(to_float(dout[d])) * static_cast<double>(to_float(out[d]));
    }
  }
  return sum;
}

/// lse over keys and sink, natural log.
double lse_total_of(const BackwardArguments& arguments, std::int64_t token, std::int64_t head) {
  const double lse = element(arguments.lse, token, head);
  return arguments.sink.defined() ? log_add_exp(lse, load<float>(arguments.sink, head)) : lse;
}

/// What turns a score into a probability: P = 2^(c * (score - base) - offset_log2), which is exp(scale * score - lse)
/// with the large part subtracted before the multiplication. Deep scores then lose only what the fp32 lse had lost.
struct Exponent {
  float base = 0.0F;
  float offset_log2 = std::numeric_limits<float>::infinity();  // P = 0

  static Exponent of(double lse, double scale, float c) {
    Exponent exponent;
    const double base = lse / scale;
    if (std::isfinite(base) && std::isfinite(static_cast<float>(base))) exponent.base = static_cast<float>(base);
    exponent.offset_log2 =
        static_cast<float>(lse * std::numbers::log2e - static_cast<double>(c) * static_cast<double>(exponent.base));
    return exponent;
  }
};

template <typename Engine>
class BackwardWorker {
 public:
  BackwardWorker(const BackwardArguments& arguments, const Plan& plan, OrderedTokens& order, int index)
      : arguments_(arguments),
        order_(order),
        index_(index),
        split_(plan.pipeline.operands == Operands::kSplit),
        needs_dq_(arguments.dq_latent.defined() || arguments.dq_rope.defined()),
        needs_dkv_(arguments.dkv_latent.defined() || arguments.dk_rope.defined()),
        rules_(make_index_rules(arguments)),
        sizes_(sizes_of(arguments)),
        heads_(padded(sizes_.num_heads)),
        score_dim_(sizes_.score_dim()),
        scale_(softmax_scale_of(arguments)),
        c_(static_cast<float>(scale_ * std::numbers::log2e)),
        key_blocks_(sizes_.topk),
        queries_(heads_ * score_dim_),
        douts_(heads_ * kLatentDim),
        keys_(kKeyTile * score_dim_),
        row_(2 * kLatentDim),
        base_(heads_),
        offset_(heads_),
        key_offset_(heads_),
        dpsum_(heads_),
        dlse_(heads_),
        probabilities_(kKeyTile * heads_),
        dscores_(kKeyTile * heads_),
        dqueries_(heads_ * score_dim_),
        dkeys_(kKeyTile * score_dim_),
        query_transposed_(heads_ * score_dim_),
        dout_transposed_(heads_ * kLatentDim),
        query_operand_(heads_ * score_dim_),
        dout_operand_(heads_ * kLatentDim),
        key_rows_(kKeyTile * score_dim_),
        key_operand_(kKeyTile * score_dim_),
        weight_operand_(heads_ * kKeyTile) {}

  void run(std::int64_t token) {
    const Tensor& indices = arguments_.indices;
    key_blocks_.assign_ascending(rules_.row(token),
                                 static_cast<const std::int32_t*>(indices.data) + token * indices.strides[0],
                                 indices.strides[1], kKeyTile);
    if (key_blocks_.blocks().empty()) {
      std::fill_n(dqueries_.get(), heads_ * score_dim_, 0.0F);
    } else {
      load_token(token);
    }
    bool first = true;
    for (const KeyBlock& block : key_blocks_.blocks()) {
      rebuild(block);
      if (needs_dq_) add_dqueries(padded(block.count), first);
      if (needs_dkv_) scatter_dkeys(token, block);
      first = false;
    }
    if (needs_dq_) write_dqueries(token);
  }

 private:
  void load_token(std::int64_t token) {
    for (std::int64_t head = 0; head < sizes_.num_heads; ++head) {
      BFloat16* query = queries_.get() + head * score_dim_;
      read_row(arguments_.q_latent, token, head, query);
      if (sizes_.rope_dim > 0) read_row(arguments_.q_rope, token, head, query + kLatentDim);
      BFloat16* dout = douts_.get() + head * kLatentDim;
      read_row(arguments_.dout, token, head, dout);
      dpsum_[head] = static_cast<float>(dpsum_of(arguments_, token, head, dout, row_.get(), row_.get() + kLatentDim));
      dlse_[head] = arguments_.dlse.defined() ? element(arguments_.dlse, token, head) : 0.0F;
      const Exponent total = Exponent::of(lse_total_of(arguments_, token, head), scale_, c_);
      base_[head] = total.base;
      offset_[head] = total.offset_log2;
      key_offset_[head] = key_offset(token, head, total.base);
    }
    std::fill(offset_.get() + sizes_.num_heads, offset_.get() + heads_, std::numeric_limits<float>::infinity());
    std::fill(key_offset_.get() + sizes_.num_heads, key_offset_.get() + heads_, std::numeric_limits<float>::infinity());
    query_transposed_.set_rows_transposed(queries_.get(), score_dim_, heads_, score_dim_);
    dout_transposed_.set_rows_transposed(douts_.get(), kLatentDim, heads_, kLatentDim);
    if (needs_dkv_) {
      query_operand_.set_rows(queries_.get(), heads_, score_dim_, score_dim_);
      dout_operand_.set_rows(douts_.get(), heads_, kLatentDim, kLatentDim);
    }
  }

  /// The offset that makes P_keys = exp(scale * score - lse), lse over the keys alone, from the same base.
  float key_offset(std::int64_t token, std::int64_t head, float base) const {
    const double lse = element(arguments_.lse, token, head);
    return static_cast<float>(lse * std::numbers::log2e - static_cast<double>(c_) * static_cast<double>(base));
  }

  /// probabilities_[key][head] = P and dscores_[key][head] = dS; rows of padding keys are zero.
  void rebuild(const KeyBlock& block) {
    const std::int64_t rows = padded(block.count);
    gather_keys(arguments_.kv_latent, arguments_.k_rope, key_blocks_.keys().data() + block.begin, block.count, rows,
                score_dim_, keys_.get());
    key_rows_.set_rows(keys_.get(), rows, score_dim_, score_dim_);
    Engine::multiply(key_rows_, query_transposed_, probabilities_.get(), heads_, false);
    key_rows_.set_rows(keys_.get(), rows, kLatentDim, score_dim_);
    Engine::multiply(key_rows_, dout_transposed_, dscores_.get(), heads_, false);
    if (arguments_.dlse.defined()) {
      differentiate<true>(block.count);
    } else {
      differentiate<false>(block.count);
    }
    std::fill(probabilities_.get() + block.count * heads_, probabilities_.get() + rows * heads_, 0.0F);
    std::fill(dscores_.get() + block.count * heads_, dscores_.get() + rows * heads_, 0.0F);
  }

  /// P = exp(scale*score - lse_total), dS = (P * (dP - dpsum) + P_keys * dlse) * scale.
  template <bool kHasDlse>
  void differentiate(std::int64_t count) {
    const auto scale = static_cast<float>(scale_);
    for (std::int64_t k = 0; k < count; ++k) {
      float* p_row = probabilities_.get() + k * heads_;
      float* ds_row = dscores_.get() + k * heads_;
      for (std::int64_t h = 0; h < heads_; ++h) {
        const float above_base = c_ * (p_row[h] - base_[h]);
        const float p = exp2_fp32(above_base - offset_[h]);
        float ds = p * (ds_row[h] - dpsum_[h]);
        if constexpr (kHasDlse) ds += exp2_fp32(above_base - key_offset_[h]) * dlse_[h];
        p_row[h] = p;
        ds_row[h] = ds * scale;
      }
    }
  }

  /// dqueries_[head][:] += dS * K.
  void add_dqueries(std::int64_t rows, bool first) {
    key_operand_.set_rows(keys_.get(), rows, score_dim_, score_dim_);
    for_each_part(first, [&](Part part, bool accumulate) {
      weight_operand_.set_weights_transposed(dscores_.get(), heads_, rows, heads_, part);
      Engine::multiply(weight_operand_, key_operand_, dqueries_.get(), score_dim_, accumulate);
    });
  }

  /// dkeys_[key][:] = dS^T * q (+ P^T * dout in the latent columns), then into dkv_latent and dk_rope when it is this
  /// token's turn.
  void scatter_dkeys(std::int64_t token, const KeyBlock& block) {
    const std::int64_t rows = padded(block.count);
    for_each_part(true, [&](Part part, bool accumulate) {
      weight_operand_.set_weights(dscores_.get(), rows, heads_, heads_, part);
      Engine::multiply(weight_operand_, query_operand_, dkeys_.get(), score_dim_, accumulate);
    });
    for_each_part(false, [&](Part part, bool accumulate) {
      weight_operand_.set_weights(probabilities_.get(), rows, heads_, heads_, part);
      Engine::multiply(weight_operand_, dout_operand_, dkeys_.get(), score_dim_, accumulate);
    });
    const std::int64_t* keys = key_blocks_.keys().data() + block.begin;
    const std::int64_t last_key = keys[block.count - 1];
    order_.wait_to_touch(index_, token, last_key);
    for (std::int64_t i = 0; i < block.count; ++i) {
      const float* values = dkeys_.get() + i * score_dim_;
      if (arguments_.dkv_latent.defined()) add_to_row(arguments_.dkv_latent, keys[i], values);
      if (arguments_.dk_rope.defined()) add_to_row(arguments_.dk_rope, keys[i], values + kLatentDim);
    }
    // The next block may begin with the same key, listed twice.
    order_.pass(index_, last_key - 1);
  }

  template <typename Product>
  void for_each_part(bool overwrite, const Product& product) {
    product(Part::kHigh, !overwrite);
    if (split_) product(Part::kLow, true);
  }

  void write_dqueries(std::int64_t token) {
    for (std::int64_t head = 0; head < sizes_.num_heads; ++head) {
      const float* row = dqueries_.get() + head * score_dim_;
      if (arguments_.dq_latent.defined()) write_row(arguments_.dq_latent, token, head, row);
      if (arguments_.dq_rope.defined()) write_row(arguments_.dq_rope, token, head, row + kLatentDim);
    }
  }

  const BackwardArguments& arguments_;
  OrderedTokens& order_;
  int index_;
  bool split_;
  bool needs_dq_;
  bool needs_dkv_;
  IndexRuleView rules_;
  Sizes sizes_;
  std::int64_t heads_;  // padded
  std::int64_t score_dim_;
  double scale_;
  float c_;
  KeyBlocks key_blocks_;
  Buffer<BFloat16> queries_;  // [heads, score_dim]
  Buffer<BFloat16> douts_;    // [heads, 512]
  Buffer<BFloat16> keys_;     // [kKeyTile, score_dim]
  Buffer<BFloat16> row_;      // out and out_residual of one row
  Buffer<float> base_;        // [heads], as are the next four: see Exponent
  Buffer<float> offset_;
  Buffer<float> key_offset_;
  Buffer<float> dpsum_;
  Buffer<float> dlse_;
  Buffer<float> probabilities_;  // [kKeyTile, heads]: scores, then P
  Buffer<float> dscores_;        // [kKeyTile, heads]: dP, then dS
  Buffer<float> dqueries_;       // [heads, score_dim]
  Buffer<float> dkeys_;          // [kKeyTile, score_dim]
  typename Engine::Right query_transposed_;
  typename Engine::Right dout_transposed_;
  typename Engine::Right query_operand_;
  typename Engine::Right dout_operand_;
  typename Engine::Left key_rows_;
  typename Engine::Right key_operand_;
  typename Engine::Left weight_operand_;
};

void clear_rows(const Tensor& tensor) {
  if (!tensor.defined()) return;
  for (std::int64_t i = 0; i < tensor.shape[0]; ++i) {
    for (std::int64_t d = 0; d < tensor.shape[1]; ++d) element(tensor, i, d) = 0.0F;
  }
}

/// dsink = -sum over rows of exp(sink - lse_total) * dpsum. Rows without a valid key give nothing. Partial sums of
/// fixed token chunks are added in chunk order, so the thread count does not show.
void compute_dsink(const BackwardArguments& arguments, int num_threads) {
  constexpr std::int64_t kChunk = 64;
  const Sizes sizes = sizes_of(arguments);
  const std::int64_t num_chunks = (sizes.num_tokens + kChunk - 1) / kChunk;
  std::vector<double> partial(static_cast<std::size_t>(num_chunks * sizes.num_heads), 0.0);
  std::vector<Buffer<BFloat16>> rows;
  for (int i = 0; i < num_threads; ++i) rows.emplace_back(3 * kLatentDim);
  std::atomic<std::int64_t> next{0};
  run_workers(num_threads, [&](int worker) {
    const IndexRuleView rules = make_index_rules(arguments);
    BFloat16* dout = rows[static_cast<std::size_t>(worker)].get();
    for (std::int64_t chunk = next.fetch_add(1); chunk < num_chunks; chunk = next.fetch_add(1)) {
      for (std::int64_t t = chunk * kChunk; t < std::min((chunk + 1) * kChunk, sizes.num_tokens); ++t) {
        const Tensor& indices = arguments.indices;
        const auto* list = static_cast<const std::int32_t*>(indices.data) + t * indices.strides[0];
        if (!has_key(rules.row(t), list, indices.strides[1])) continue;
        for (std::int64_t h = 0; h < sizes.num_heads; ++h) {
          const double sink = load<float>(arguments.sink, h);
          if (std::isinf(sink)) continue;  // -inf takes no part; +inf takes it all, and out is constantly 0
          read_row(arguments.dout, t, h, dout);
          const double dpsum = dpsum_of(arguments, t, h, dout, dout + kLatentDim, dout + 2 * kLatentDim);
          partial[static_cast<std::size_t>(chunk * sizes.num_heads + h)] -=
              std::exp(sink - lse_total_of(arguments, t, h)) * dpsum;
        }
      }
    }
  });
  for (std::int64_t h = 0; h < sizes.num_heads; ++h) {
    double sum = 0.0;
    for (std::int64_t chunk = 0; chunk < num_chunks; ++chunk) {
      sum += partial[static_cast<std::size_t>(chunk * sizes.num_heads + h)];
    }
    static_cast<float*>(arguments.dsink.data)[h * arguments.dsink.strides[0]] = static_cast<float>(sum);
  }
}

}  // namespace

template <typename Engine>
void backward(const BackwardArguments& arguments, const Plan& plan) {
  const std::int64_t num_tokens = arguments.q_latent.shape[0];
  OrderedTokens order(num_tokens, plan.num_threads);
  std::vector<std::unique_ptr<BackwardWorker<Engine>>> workers;
  for (int i = 0; i < plan.num_threads; ++i) {
    workers.push_back(std::make_unique<BackwardWorker<Engine>>(arguments, plan, order, i));
  }
  if (!arguments.accumulate_dkv) {
    clear_rows(arguments.dkv_latent);
    clear_rows(arguments.dk_rope);
  }
  const bool only_dsink = !arguments.dq_latent.defined() && !arguments.dq_rope.defined() &&
                          !arguments.dkv_latent.defined() && !arguments.dk_rope.defined();
  if (!only_dsink) {
    run_workers(plan.num_threads, [&](int index) {
      [[maybe_unused]] const typename Engine::ThreadScope scope;
      for (std::int64_t token = order.take(index); token < num_tokens; token = order.take(index)) {
        workers[static_cast<std::size_t>(index)]->run(token);
        order.finish(index);
      }
    });
  }
  if (arguments.dsink.defined()) compute_dsink(arguments, plan.num_threads);
}

template void backward<Fp32Engine>(const BackwardArguments&, const Plan&);
template void backward<AmxEngine>(const BackwardArguments&, const Plan&);

std::int64_t backward_scratch_bytes(const AttentionInputs& inputs, std::int64_t element_bytes) {
  const Sizes sizes = sizes_of(inputs);
  const std::int64_t heads = padded(sizes.num_heads);
  const std::int64_t dim = sizes.score_dim();
  const std::int64_t operands = 2 * heads * (dim + kLatentDim) + 2 * kKeyTile * dim + heads * kKeyTile;
  const std::int64_t lists = sizes.topk * static_cast<std::int64_t>(sizeof(std::int64_t) + sizeof(KeyBlock));
  return 2 * (heads * (dim + kLatentDim) + kKeyTile * dim + 2 * kLatentDim) +
         4 * (5 * heads + 2 * kKeyTile * heads + heads * dim + kKeyTile * dim) + element_bytes * operands + lists;
}

}  // namespace sparsemla::cpu
