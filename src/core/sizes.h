// The axes of a validated call.
#pragma once

#include <cmath>
#include <cstdint>

#include "sparsemla/attention.h"

namespace sparsemla {

struct Sizes {
  std::int64_t num_tokens = 0;
  std::int64_t num_keys = 0;
  std::int64_t num_heads = 0;
  std::int64_t topk = 0;
  std::int64_t rope_dim = 0;  // 64 or 0

  [[nodiscard]] std::int64_t score_dim() const noexcept { return kLatentDim + rope_dim; }
};

[[nodiscard]] inline Sizes sizes_of(const AttentionInputs& inputs) noexcept {
  return {inputs.q_latent.shape[0], inputs.kv_latent.shape[0], inputs.q_latent.shape[1], inputs.indices.shape[1],
          inputs.q_rope.defined() ? inputs.q_rope.shape[2] : 0};
}

[[nodiscard]] inline double softmax_scale_of(const AttentionInputs& inputs) noexcept {
  return inputs.softmax_scale.value_or(1.0 / std::sqrt(static_cast<double>(sizes_of(inputs).score_dim())));
}

}  // namespace sparsemla
