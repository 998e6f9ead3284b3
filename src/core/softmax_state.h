// The threshold rule of the online softmax: written once, for every backend. Host and device.
#pragma once

#include <limits>

#include "core/host_device.h"

namespace sparsemla {

/// One row of an online softmax. The max is kept in score units, before the factor c = softmax_scale * log2(e): a
/// probability is 2^(c * (score - max)), so that scores of any size lose nothing but their own rounding.
struct SoftmaxRow {
  float max = -std::numeric_limits<float>::infinity();  // the one that probabilities are taken against; may be stale
  float true_max = -std::numeric_limits<float>::infinity();
  float sum = 0.0F;
};

/// Whether a block whose largest score is `block_max` moves the max. Exact: threshold_log2 = 0. The first block always
/// does, since the difference is then infinite. `c` >= 0.
SPARSEMLA_HOST_DEVICE inline bool takes_new_max(float max, float block_max, float c, float threshold_log2) {
  return block_max > max && !((block_max - max) * c <= threshold_log2);
}

/// The max as an operand of score - max: a row that has met only -inf scores subtracts 0, so that exp2(-inf) = 0 comes
/// out and not NaN.
SPARSEMLA_HOST_DEVICE inline float subtrahend(float max) {
  return max == -std::numeric_limits<float>::infinity() ? 0.0F : max;
}

}  // namespace sparsemla
