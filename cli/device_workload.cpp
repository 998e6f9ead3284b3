#include "cli/device_workload.h"

#include <algorithm>
#include <bit>
#include <initializer_list>

#include "numerics/parallel.h"

namespace sparsemla::cli {
namespace {

std::uint64_t mixed(std::uint64_t x) {  // splitmix64
  x += 0x9E3779B97F4A7C15U;
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9U;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBU;
  return x ^ (x >> 31);
}

/// A random order of [0, size): four Feistel rounds over the smallest even number of bits that hold it, again while the
/// result is outside. No table, so each place of each token costs a few instructions.
class RandomOrder {
 public:
  RandomOrder(std::int64_t size, std::uint64_t seed) : size_(static_cast<std::uint64_t>(size)), seed_(seed) {
    half_bits_ = std::max(1, (static_cast<int>(std::bit_width(size_ - 1)) + 1) / 2);
    mask_ = (std::uint64_t{1} << half_bits_) - 1;
  }
  [[nodiscard]] std::int64_t operator[](std::int64_t place) const {
    auto value = static_cast<std::uint64_t>(place);
    do {
      value = permuted(value);
    } while (value >= size_);
    return static_cast<std::int64_t>(value);
  }

 private:
  [[nodiscard]] std::uint64_t permuted(std::uint64_t value) const {
    std::uint64_t left = value >> half_bits_;
    std::uint64_t right = value & mask_;
    for (std::uint64_t round = 0; round < 4; ++round) {
      const std::uint64_t next = left ^ (mixed(seed_ + right * 4 + round) & mask_);
      left = right;
      right = next;
    }
    return left << half_bits_ | right;
  }

  std::uint64_t size_;
  std::uint64_t seed_;
  int half_bits_ = 1;
  std::uint64_t mask_ = 1;
};

/// Four uniform 16-bit numbers: deviation sqrt(4 / 12) of their range.
BFloat16 random_number(std::uint64_t bits) {
  constexpr float kInverseDeviation = 1.7320508F / 65536.0F;
  const auto sum =
      static_cast<std::int32_t>((bits & 0xFFFF) + (bits >> 16 & 0xFFFF) + (bits >> 32 & 0xFFFF) + (bits >> 48));
  return to_bfloat16(static_cast<float>(sum - 131070) * kInverseDeviation);
}

std::int64_t product(std::initializer_list<std::int64_t> extents) {
  std::int64_t result = 1;
  for (const std::int64_t extent : extents) result *= extent;
  return result;
}

constexpr std::int64_t kBlock = 1 << 16;  // of values drawn at a time

}  // namespace

device::DeviceMemory random_numbers(std::int64_t count, std::uint64_t seed, int device) {
  std::vector<BFloat16> values(static_cast<std::size_t>(count));
  parallel_blocks(count, kBlock, 0, [&](std::int64_t begin, std::int64_t end) {
    const std::uint64_t first = mixed(seed);
    for (std::int64_t i = begin; i < end; ++i) {
      values[static_cast<std::size_t>(i)] = random_number(mixed(first + static_cast<std::uint64_t>(i)));
    }
  });
  const std::int64_t bytes = count * static_cast<std::int64_t>(sizeof(BFloat16));
  device::DeviceMemory memory(bytes, device);
  device::copy_to_device(memory.data(), values.data(), bytes);
  return memory;
}

std::vector<std::int32_t> random_lists(const ProblemShape& shape) {
  std::vector<std::int32_t> lists(static_cast<std::size_t>(shape.num_tokens * shape.topk), -1);
  const std::int64_t valid = std::min(shape.topk, shape.num_keys);
  parallel_blocks(shape.num_tokens, 16, 0, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t token = begin; token < end; ++token) {
      const RandomOrder order(shape.num_keys, mixed(shape.seed * 1000003 + static_cast<std::uint64_t>(token)));
      std::int32_t* list = lists.data() + token * shape.topk;
      for (std::int64_t slot = 0; slot < valid; ++slot) list[slot] = static_cast<std::int32_t>(order[slot]);
    }
  });
  return lists;
}

DeviceWorkload::DeviceWorkload(const ProblemShape& shape, int device) : shape_(shape), device_(device) {
  const std::int64_t rows = product({shape.num_tokens, shape.num_heads});
  q_latent_ = random_numbers(rows * kLatentDim, 1, device);
  q_rope_ = random_numbers(rows * shape.rope_dim, 2, device);
  kv_latent_ = random_numbers(shape.num_keys * kLatentDim, 3, device);
  k_rope_ = random_numbers(shape.num_keys * shape.rope_dim, 4, device);
  const std::vector<std::int32_t> lists = random_lists(shape);
  const auto list_bytes = static_cast<std::int64_t>(lists.size() * sizeof(std::int32_t));
  indices_ = device::DeviceMemory(list_bytes, device);
  device::copy_to_device(indices_.data(), lists.data(), list_bytes);
  out_ = device::DeviceMemory(rows * kLatentDim * 2, device);
  out_residual_ = device::DeviceMemory(rows * kLatentDim * 2, device);
  lse_ = device::DeviceMemory(rows * 4, device);
}

std::int64_t DeviceWorkload::valid_slots() const noexcept { return std::min(shape_.topk, shape_.num_keys); }

ForwardArguments DeviceWorkload::arguments(bool residual) const {
  const auto view = [this](const device::DeviceMemory& memory, DataType dtype,
                           std::initializer_list<std::int64_t> shape) {
    return Tensor::contiguous(memory.data(), dtype, shape, {DeviceType::kCuda, device_});
  };
  using enum DataType;
  ForwardArguments arguments;
  arguments.q_latent = view(q_latent_, kBFloat16, {shape_.num_tokens, shape_.num_heads, kLatentDim});
  arguments.kv_latent = view(kv_latent_, kBFloat16, {shape_.num_keys, kLatentDim});
  if (shape_.rope_dim > 0) {
    arguments.q_rope = view(q_rope_, kBFloat16, {shape_.num_tokens, shape_.num_heads, kRopeDim});
    arguments.k_rope = view(k_rope_, kBFloat16, {shape_.num_keys, kRopeDim});
  }
  arguments.indices = view(indices_, kInt32, {shape_.num_tokens, shape_.topk});
  arguments.out = view(out_, kBFloat16, {shape_.num_tokens, shape_.num_heads, kLatentDim});
  arguments.lse = view(lse_, kFloat32, {shape_.num_tokens, shape_.num_heads});
  if (residual) {
    arguments.out_residual = view(out_residual_, kBFloat16, {shape_.num_tokens, shape_.num_heads, kLatentDim});
  }
  return arguments;
}

}  // namespace sparsemla::cli
