// The online softmax over one key block, for all heads of a token at once. Heads are the vector lanes: scores lie as
// [key][head], so that max and sum run down columns and no lane ever talks to another.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>

#include "backends/cpu/buffer.h"
#include "core/exp2.h"
#include "core/softmax_state.h"
#include "sparsemla/bfloat16.h"
#include "sparsemla/pipeline.h"

namespace sparsemla::cpu {

class SoftmaxLanes {
 public:
  explicit SoftmaxLanes(std::int64_t num_lanes)
      : num_lanes_(num_lanes),
        max_(num_lanes),
        true_max_(num_lanes),
        sum_(num_lanes),
        block_max_(num_lanes),
        block_sum_(num_lanes),
        factor_(num_lanes),
        shift_(num_lanes) {}

  void reset() noexcept {
    constexpr float kMinusInfinity = -std::numeric_limits<float>::infinity();
    std::fill_n(max_.get(), num_lanes_, kMinusInfinity);
    std::fill_n(true_max_.get(), num_lanes_, kMinusInfinity);
    std::fill_n(sum_.get(), num_lanes_, 0.0F);
  }

  /// Turns scores[count][num_lanes] into probabilities relative to the max that the threshold rule leaves in force,
  /// adds them to the sums, and sets factor(): what each lane's earlier accumulator must be multiplied by. c =
  /// |softmax_scale| * log2(e).
  void step(float* scores, std::int64_t count, float c, const Pipeline& pipeline) noexcept {
    take_block_max(scores, count);
    move_max(c, pipeline.rescale_threshold_log2);
    if (pipeline.row_sum == RowSum::kRounded) {
      exponentiate<true>(scores, count, c);
    } else {
      exponentiate<false>(scores, count, c);
    }
    for (std::int64_t h = 0; h < num_lanes_; ++h) sum_[h] = sum_[h] * factor_[h] + block_sum_[h];
  }

  [[nodiscard]] float factor(std::int64_t lane) const noexcept { return factor_[lane]; }
  [[nodiscard]] SoftmaxRow row(std::int64_t lane) const noexcept { return {max_[lane], true_max_[lane], sum_[lane]}; }

 private:
  void take_block_max(const float* scores, std::int64_t count) noexcept {
    float* block_max = block_max_.get();
    std::copy_n(scores, num_lanes_, block_max);
    for (std::int64_t k = 1; k < count; ++k) {
      const float* row = scores + k * num_lanes_;
      for (std::int64_t h = 0; h < num_lanes_; ++h) {
        // A NaN is dropped here; it comes back through the sum, since exp2(NaN) is NaN.
        block_max[h] = row[h] > block_max[h] || block_max[h] != block_max[h] ? row[h] : block_max[h];
      }
    }
  }

  void move_max(float c, float threshold_log2) noexcept {
    for (std::int64_t h = 0; h < num_lanes_; ++h) {
      const float block_max = block_max_[h];
      if (block_max > true_max_[h]) true_max_[h] = block_max;
      factor_[h] = 1.0F;
      if (takes_new_max(max_[h], block_max, c, threshold_log2)) {
        factor_[h] = std::isinf(max_[h]) ? 0.0F : exp2_fp32(c * (max_[h] - block_max));
        max_[h] = block_max;
      }
      shift_[h] = subtrahend(max_[h]);
    }
  }

  template <bool kRoundedSum>
  void exponentiate(float* scores, std::int64_t count, float c) noexcept {
    float* block_sum = block_sum_.get();
    const float* shift = shift_.get();
    std::fill_n(block_sum, num_lanes_, 0.0F);
    for (std::int64_t k = 0; k < count; ++k) {
      float* row = scores + k * num_lanes_;
      for (std::int64_t h = 0; h < num_lanes_; ++h) {
        const float p = exp2_fp32(c * (row[h] - shift[h]));
        row[h] = p;
        block_sum[h] += kRoundedSum ? to_float(to_bfloat16(p)) : p;
      }
    }
  }

  std::int64_t num_lanes_;
  Buffer<float> max_;
  Buffer<float> true_max_;
  Buffer<float> sum_;
  Buffer<float> block_max_;
  Buffer<float> block_sum_;
  Buffer<float> factor_;
  Buffer<float> shift_;
};

}  // namespace sparsemla::cpu
