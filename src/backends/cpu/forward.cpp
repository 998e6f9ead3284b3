#include "backends/cpu/operation.h"

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
#include "backends/cpu/rows.h"
#include "backends/cpu/softmax.h"
#include "backends/cpu/threads.h"
#include "core/sizes.h"

namespace sparsemla::cpu {
namespace {

std::int64_t largest_block(const Sizes& sizes, const Pipeline& pipeline) {
  return std::max<std::int64_t>(1, std::min<std::int64_t>(pipeline.key_block, sizes.topk));
}

/// One thread's scratch memory and the walk over one token's keys.
template <typename Engine>
class ForwardWorker {
 public:
  ForwardWorker(const ForwardArguments& arguments, const Plan& plan)
      : arguments_(arguments),
        pipeline_(plan.pipeline),
        rules_(make_index_rules(arguments)),
        sizes_(sizes_of(arguments)),
        heads_(padded(sizes_.num_heads)),
        score_dim_(sizes_.score_dim()),
        scale_(softmax_scale_of(arguments)),
        c_(static_cast<float>(std::abs(scale_) * std::numbers::log2e)),
        key_blocks_(sizes_.topk),
        queries_(heads_ * score_dim_),
        keys_(kKeyTile * score_dim_),
        scores_(padded(largest_block(sizes_, pipeline_)) * heads_),
        accumulator_(heads_ * kLatentDim),
        row_(kLatentDim),
        softmax_(heads_),
        query_operand_(heads_ * score_dim_),
        key_operand_(kKeyTile * score_dim_),
        value_operand_(kKeyTile * kLatentDim),
        weight_operand_(heads_ * kKeyTile) {}

  void run(std::int64_t token) {
    key_blocks_.assign(
        rules_.row(token),
        static_cast<const std::int32_t*>(arguments_.indices.data) + token * arguments_.indices.strides[0],
        arguments_.indices.strides[1], pipeline_);
    softmax_.reset();
    if (!key_blocks_.blocks().empty()) load_queries(token);
    bool first = true;
    for (const KeyBlock& block : key_blocks_.blocks()) {
      score(block);
      softmax_.step(scores_.get(), block.count, c_, pipeline_);
      if (!first) rescale_accumulator();
      add_values(block, first);
      first = false;
    }
    for (std::int64_t head = 0; head < sizes_.num_heads; ++head) finish(token, head, first);
  }

 private:
  void load_queries(std::int64_t token) {
    for (std::int64_t head = 0; head < sizes_.num_heads; ++head) {
      BFloat16* to = queries_.get() + head * score_dim_;
      read_row(arguments_.q_latent, token, head, to);
      if (sizes_.rope_dim > 0) read_row(arguments_.q_rope, token, head, to + kLatentDim);
    }
    query_operand_.set_rows_transposed(queries_.get(), score_dim_, heads_, score_dim_);
  }

  void gather(std::int64_t begin, std::int64_t count) {
    gather_keys(arguments_.kv_latent, arguments_.k_rope, key_blocks_.keys().data() + begin, count, padded(count),
                score_dim_, keys_.get());
  }

  /// scores_[key][head] for the whole block.
  void score(const KeyBlock& block) {
    for (std::int64_t done = 0; done < block.count; done += kKeyTile) {
      const std::int64_t count = std::min(kKeyTile, block.count - done);
      gather(block.begin + done, count);
      key_operand_.set_rows(keys_.get(), padded(count), score_dim_, score_dim_);
      Engine::multiply(key_operand_, query_operand_, scores_.get() + done * heads_, heads_, false);
    }
    if (scale_ < 0.0) {  // the softmax works on the scores whose largest weighs most
      for (std::int64_t i = 0; i < block.count * heads_; ++i) scores_[i] = -scores_[i];
    }
  }

  /// accumulator_[head][:] += P * V. Probabilities of padding keys are zero.
  void add_values(const KeyBlock& block, bool first) {
    std::fill(scores_.get() + block.count * heads_, scores_.get() + padded(block.count) * heads_, 0.0F);
    const bool regather = block.count > kKeyTile;  // keys_ holds only the last tile of a larger block
    for (std::int64_t done = 0; done < block.count; done += kKeyTile) {
      const std::int64_t count = std::min(kKeyTile, block.count - done);
      if (regather) gather(block.begin + done, count);
      value_operand_.set_rows(keys_.get(), padded(count), kLatentDim, score_dim_);
      add_weighted(scores_.get() + done * heads_, padded(count), Part::kHigh, !(first && done == 0));
      if (pipeline_.operands == Operands::kSplit) {
        add_weighted(scores_.get() + done * heads_, padded(count), Part::kLow, true);
      }
    }
  }

  void add_weighted(const float* weights, std::int64_t count, Part part, bool accumulate) {
    weight_operand_.set_weights_transposed(weights, heads_, count, heads_, part);
    Engine::multiply(weight_operand_, value_operand_, accumulator_.get(), kLatentDim, accumulate);
  }

  void rescale_accumulator() {
    for (std::int64_t head = 0; head < sizes_.num_heads; ++head) {
      const float factor = softmax_.factor(head);
      if (factor == 1.0F) continue;
      float* row = accumulator_.get() + head * kLatentDim;
      for (std::int64_t d = 0; d < kLatentDim; ++d) row[d] *= factor;
    }
  }

  void finish(std::int64_t token, std::int64_t head, bool empty) {
    const SoftmaxRow state = softmax_.row(head);
    float lse = -std::numeric_limits<float>::infinity();
    float max_logit = lse;
    float inverse = 0.0F;
    if (!empty) {
      const double scale = std::abs(scale_);
      const double max = scale * static_cast<double>(state.max);
      double total = state.sum;
      if (std::isinf(state.max)) total = std::numeric_limits<double>::quiet_NaN();  // inf - inf among its scores
      lse = static_cast<float>(max + std::log(total));
      const bool has_nan = std::isnan(state.sum) && state.true_max != std::numeric_limits<float>::infinity();
      max_logit = has_nan ? lse : static_cast<float>(scale * static_cast<double>(state.true_max));
      if (arguments_.sink.defined()) total += std::exp(static_cast<double>(load<float>(arguments_.sink, head)) - max);
      inverse = static_cast<float>(1.0 / total);
    }
    if (arguments_.lse.defined()) element(arguments_.lse, token, head) = lse;
    if (arguments_.max_logits.defined()) element(arguments_.max_logits, token, head) = max_logit;
    write_output(token, head, inverse, empty);
  }

  /// out = bf16(O32), out_residual = bf16(O32 - float(out)) from the same fp32 values.
  void write_output(std::int64_t token, std::int64_t head, float inverse, bool empty) {
    const float* sums = accumulator_.get() + head * kLatentDim;
    for (std::int64_t d = 0; d < kLatentDim; ++d) row_[d] = empty ? 0.0F : sums[d] * inverse;
    write_row(arguments_.out, token, head, row_.get());
    if (!arguments_.out_residual.defined()) return;
    for (std::int64_t d = 0; d < kLatentDim; ++d) {
      const float rounded = to_float(to_bfloat16(row_[d]));
      row_[d] = std::isfinite(rounded) ? row_[d] - rounded : 0.0F;
    }
    write_row(arguments_.out_residual, token, head, row_.get());
  }

  const ForwardArguments& arguments_;
  Pipeline pipeline_;
  IndexRuleView rules_;
  Sizes sizes_;
  std::int64_t heads_;  // padded
  std::int64_t score_dim_;
  double scale_;
  float c_;
  KeyBlocks key_blocks_;
  Buffer<BFloat16> queries_;   // [heads, score_dim]
  Buffer<BFloat16> keys_;      // [kKeyTile, score_dim]
  Buffer<float> scores_;       // [block, heads]: scores, then probabilities
  Buffer<float> accumulator_;  // [heads, 512]
  Buffer<float> row_;          // [512]
  SoftmaxLanes softmax_;
  typename Engine::Right query_operand_;
  typename Engine::Left key_operand_;
  typename Engine::Right value_operand_;
  typename Engine::Left weight_operand_;
};

}  // namespace

template <typename Engine>
void forward(const ForwardArguments& arguments, const Plan& plan) {
  const std::int64_t num_tokens = arguments.q_latent.shape[0];
  std::vector<std::unique_ptr<ForwardWorker<Engine>>> workers;
  for (int i = 0; i < plan.num_threads; ++i) {
    workers.push_back(std::make_unique<ForwardWorker<Engine>>(arguments, plan));
  }
  std::atomic<std::int64_t> next{0};
  run_workers(plan.num_threads, [&](int index) {
    [[maybe_unused]] const typename Engine::ThreadScope scope;
    for (;;) {
      const std::int64_t token = next.fetch_add(1, std::memory_order_relaxed);
      if (token >= num_tokens) return;
      workers[static_cast<std::size_t>(index)]->run(token);
    }
  });
}

template void forward<Fp32Engine>(const ForwardArguments&, const Plan&);
template void forward<AmxEngine>(const ForwardArguments&, const Plan&);

std::int64_t forward_scratch_bytes(const AttentionInputs& inputs, const Pipeline& pipeline,
                                   std::int64_t element_bytes) {
  const Sizes sizes = sizes_of(inputs);
  const std::int64_t heads = padded(sizes.num_heads);
  const std::int64_t dim = sizes.score_dim();
  const std::int64_t operands = heads * dim + kKeyTile * dim + kKeyTile * kLatentDim + heads * kKeyTile;
  const std::int64_t lists = sizes.topk * static_cast<std::int64_t>(sizeof(std::int64_t) + sizeof(KeyBlock));
  return 2 * (heads + kKeyTile) * dim + 4 * padded(largest_block(sizes, pipeline)) * heads +
         4 * heads * (kLatentDim + 7) + 4 * kLatentDim + element_bytes * operands + lists;
}

}  // namespace sparsemla::cpu
