// Tensors of a size on a device, filled with random numbers fast: for timing alone.
#pragma once

#include <cstdint>
#include <vector>

#include "device/device.h"
#include "numerics/problem.h"
#include "sparsemla/attention.h"

namespace sparsemla::cli {

/// `count` bf16 numbers of mean 0 and deviation 1, the sum of four uniform ones each.
[[nodiscard]] device::DeviceMemory random_numbers(std::int64_t count, std::uint64_t seed, int device);

/// [T, W] lists of distinct keys in random order, each token's own; -1 behind them where W > S.
[[nodiscard]] std::vector<std::int32_t> random_lists(const ProblemShape& shape);

class DeviceWorkload {
 public:
  DeviceWorkload(const ProblemShape& shape, int device);

  /// Views; lse is asked for, max_logits is not.
  [[nodiscard]] ForwardArguments arguments(bool residual) const;
  [[nodiscard]] std::int64_t valid_slots() const noexcept;  // a token

 private:
  ProblemShape shape_;
  int device_;
  device::DeviceMemory q_latent_, q_rope_, kv_latent_, k_rope_, indices_;
  device::DeviceMemory out_, out_residual_, lse_;
};

}  // namespace sparsemla::cli
