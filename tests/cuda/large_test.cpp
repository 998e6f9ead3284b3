// More tokens than a grid axis holds, and offsets past 32 bits in every tensor.
#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstring>
#include <string>
#include <vector>

#include "tests/cuda/fixture.h"

namespace sparsemla::cuda_test {
namespace {

using cases::ForwardOutputs;
using cases::packed_bytes;
using cases::run_forward;

class CudaLarge : public CudaTest {
 protected:
  static bool has_memory(std::int64_t bytes) {
    std::size_t free = 0;
    std::size_t total = 0;
    EXPECT_EQ(cudaMemGetInfo(&free, &total), cudaSuccess);
    return static_cast<std::int64_t>(free) > bytes + (std::int64_t{1} << 30);
  }
};

/// A device tensor with far strides, of which only the elements are ever written.
class WideTensor {
 public:
  /// `host` is packed; `strides` in elements, one an axis, none negative.
  WideTensor(const Tensor& host, const std::vector<std::int64_t>& strides) : tensor_(host) {
    std::copy(strides.begin(), strides.end(), tensor_.strides.begin());
    memory_ = device::DeviceMemory(bytes_of(host, strides));
    tensor_.data = memory_.data();
    tensor_.device = {DeviceType::kCuda, 0};
    each_run([&](std::int64_t packed, std::int64_t wide, std::int64_t bytes) {
      device::copy_to_device(memory_.data() + wide, static_cast<const std::byte*>(host.data) + packed, bytes);
    });
  }

  static std::int64_t bytes_of(const Tensor& host, const std::vector<std::int64_t>& strides) {
    std::int64_t elements = 1;
    int axis = 0;
    for (const std::int64_t stride : strides) elements += (host.shape[axis++] - 1) * stride;
    return elements * size_bytes(host.dtype);
  }
  [[nodiscard]] const Tensor& tensor() const { return tensor_; }
  [[nodiscard]] std::vector<std::byte> bytes() const {
    std::vector<std::byte> result(static_cast<std::size_t>(tensor_.num_elements() * size_bytes(tensor_.dtype)));
    each_run([&](std::int64_t packed, std::int64_t wide, std::int64_t count) {
      device::copy_to_host(result.data() + packed, memory_.data() + wide, count);
    });
    return result;
  }

 private:
  /// Calls visit(packed offset, wide offset, bytes) for each run of neighbouring elements.
  template <typename Visit>
  void each_run(const Visit& visit) const {
    const std::int64_t element = size_bytes(tensor_.dtype);
    const int last = tensor_.rank - 1;
    const std::int64_t run = tensor_.strides[last] == 1 ? tensor_.shape[last] : 1;
    for (std::int64_t first = 0; first < tensor_.num_elements(); first += run) {
      std::int64_t rest = first;
      std::int64_t wide = 0;
      for (int axis = last; axis >= 0; --axis) {
        wide += rest % tensor_.shape[axis] * tensor_.strides[axis];
        rest /= tensor_.shape[axis];
      }
      visit(first * element, wide * element, run * element);
    }
  }

  device::DeviceMemory memory_;
  Tensor tensor_;
};

struct FarTensor {
  const char* name;
  Tensor ForwardArguments::*member;
  std::vector<std::int64_t> strides;  // the last element lies past 2^32 bytes
};

constexpr std::int64_t k2to24 = std::int64_t{1} << 24;
constexpr std::int64_t k2to30 = std::int64_t{1} << 30;
constexpr std::int64_t k2to31 = std::int64_t{1} << 31;

/// Three tokens, three heads, 300 keys, 70 slots.
const FarTensor kFarTensors[] = {
    {"q_latent tokens", &ForwardArguments::q_latent, {k2to31 + 8, 512, 1}},
    {"q_latent heads", &ForwardArguments::q_latent, {512, k2to31 + 8, 1}},
    {"q_rope tokens", &ForwardArguments::q_rope, {k2to31 + 64, 64, 1}},
    {"q_rope heads", &ForwardArguments::q_rope, {64, k2to31 + 64, 1}},
    {"kv_latent keys", &ForwardArguments::kv_latent, {k2to24 + 8, 1}},
    {"k_rope keys", &ForwardArguments::k_rope, {k2to24 + 8, 1}},
    {"indices tokens", &ForwardArguments::indices, {k2to31 + 1, 1}},
    {"indices slots", &ForwardArguments::indices, {1, k2to31 / 32 + 3}},
    {"topk_length", &ForwardArguments::topk_length, {k2to31 + 1}},
    {"sink", &ForwardArguments::sink, {k2to31 + 1}},
    {"out tokens", &ForwardArguments::out, {k2to31 + 8, 512, 1}},
    {"out heads", &ForwardArguments::out, {512, k2to31 + 8, 1}},
    {"out_residual tokens", &ForwardArguments::out_residual, {k2to31 + 8, 512, 1}},
    {"lse tokens", &ForwardArguments::lse, {k2to31 + 1, 1}},
    {"lse heads", &ForwardArguments::lse, {1, k2to31 + 1}},
    {"max_logits tokens", &ForwardArguments::max_logits, {k2to31 + 1, 1}},
};

Problem small_problem() {
  Problem problem = make_iid({.num_tokens = 3, .num_keys = 300, .topk = 70, .num_heads = 3, .seed = 41}, false);
  problem.indices[5] = 299;
  problem.topk_length = {70, 66, 69};
  problem.sink = {0.5F, -1.0F, 2.0F};
  return problem;
}

constexpr Tensor ForwardArguments::*kOutputs[] = {&ForwardArguments::out, &ForwardArguments::lse,
                                                  &ForwardArguments::max_logits, &ForwardArguments::out_residual};

void expect_equal_with_far(const FarTensor& far, const Problem& problem, const std::string& pipeline) {
  const ForwardOutputs expected = run_forward(problem.inputs(), options_of(pipeline));
  const ForwardArguments wanted = cases::forward_arguments(problem.inputs(), expected);
  const ForwardOutputs blank = cases::make_forward_outputs(problem.inputs(), true);
  DeviceProblem run(problem, options_of(pipeline));
  const WideTensor wide(cases::forward_arguments(problem.inputs(), blank).*far.member, far.strides);
  ForwardArguments arguments = run.arguments();
  arguments.*far.member = wide.tensor();
  forward(arguments, run.options());
  const ForwardArguments found = cases::forward_arguments(problem.inputs(), run.outputs());
  for (const auto output : kOutputs) {
    const std::vector<std::byte> bytes = output == far.member ? wide.bytes() : packed_bytes(found.*output);
    EXPECT_TRUE(bytes == packed_bytes(wanted.*output)) << far.name << ", " << pipeline;
  }
}

TEST_F(CudaLarge, OffsetsPastThirtyTwoBits) {
  const Problem problem = small_problem();
  const ForwardOutputs blank = cases::make_forward_outputs(problem.inputs(), true);
  for (const FarTensor& far : kFarTensors) {
    const std::int64_t bytes =
        WideTensor::bytes_of(cases::forward_arguments(problem.inputs(), blank).*far.member, far.strides);
    ASSERT_GT(bytes, std::int64_t{1} << 32) << far.name;
    if (!has_memory(bytes)) GTEST_SKIP() << "not enough device memory";
    for (const char* pipeline : {"exact", "exact+canonical"}) expect_equal_with_far(far, problem, pipeline);
  }
}

/// The 300 keys of a problem, each `kSpacing` rows of a packed tensor behind the one before.
TEST_F(CudaLarge, KeysPastThirtyTwoBitOffsets) {
  constexpr std::int64_t kSpacing = 28333;
  const Problem problem = small_problem();
  const std::int64_t num_keys = (problem.num_keys - 1) * kSpacing + 1;
  ASSERT_GT(num_keys * kLatentDim, std::int64_t{1} << 32);
  if (!has_memory(num_keys * (kLatentDim + kRopeDim) * 2)) GTEST_SKIP() << "not enough device memory";
  Problem spread = problem;
  for (std::int32_t& index : spread.indices) index = static_cast<std::int32_t>(index * kSpacing);
  Problem with_holes = problem;
  with_holes.indices[7] = -1;
  spread.indices[7] = static_cast<std::int32_t>(num_keys);  // one past the end
  const AttentionInputs inputs = problem.inputs();
  const WideTensor latent(inputs.kv_latent, {kSpacing * kLatentDim, 1});
  const WideTensor rope(inputs.k_rope, {kSpacing * kRopeDim, 1});
  for (const char* pipeline : {"exact", "exact+canonical", "lazy"}) {
    DeviceProblem run(spread, options_of(pipeline));
    ForwardArguments arguments = run.arguments();
    arguments.kv_latent = latent.tensor();
    arguments.k_rope = rope.tensor();
    for (Tensor* keys : {&arguments.kv_latent, &arguments.k_rope}) {
      keys->shape[0] = num_keys;
      keys->strides[0] /= kSpacing;
    }
    forward(arguments, run.options());
    EXPECT_EQ(cases::differences(run.outputs(), run_forward(with_holes.inputs(), options_of(pipeline))), "")
        << pipeline;
  }
}

/// A packed device tensor of `count` rows that repeats the rows of a host tensor.
class RepeatedTensor {
 public:
  RepeatedTensor(const Tensor& host, std::int64_t count) : tensor_(host) {
    const std::int64_t period = host.num_elements() * size_bytes(host.dtype);
    const std::int64_t bytes = period / host.shape[0] * count;
    memory_ = device::DeviceMemory(bytes);
    for (std::int64_t at = 0; at < bytes; at += period) {
      device::copy_to_device(memory_.data() + at, host.data, std::min(period, bytes - at));
    }
    tensor_.data = memory_.data();
    tensor_.shape[0] = count;
    tensor_.device = {DeviceType::kCuda, 0};
  }

  [[nodiscard]] const Tensor& tensor() const { return tensor_; }
  /// Rows that are not those of `host`, each counted once.
  [[nodiscard]] std::int64_t count_wrong_rows(const Tensor& host) const {
    const std::int64_t row = host.num_elements() * size_bytes(host.dtype) / host.shape[0];
    const std::vector<std::byte> wanted = packed_bytes(host);
    std::vector<std::byte> found(wanted.size());
    std::int64_t wrong = 0;
    for (std::int64_t first = 0; first < tensor_.shape[0]; first += host.shape[0]) {
      const std::int64_t rows = std::min(host.shape[0], tensor_.shape[0] - first);
      device::copy_to_host(found.data(), memory_.data() + first * row, rows * row);
      if (std::memcmp(found.data(), wanted.data(), static_cast<std::size_t>(rows * row)) == 0) continue;
      for (std::int64_t i = 0; i < rows; ++i) {
        wrong += std::memcmp(&found[i * row], &wanted[i * row], static_cast<std::size_t>(row)) != 0 ? 1 : 0;
      }
    }
    return wrong;
  }

 private:
  device::DeviceMemory memory_;
  Tensor tensor_;
};

/// Queries and lists repeat with a period that no tile divides, so every row of the outputs is known.
void expect_repeats(std::int64_t num_tokens, std::int64_t heads) {
  const Problem problem =
      make_iid({.num_tokens = 509, .num_keys = 600, .topk = 8, .num_heads = heads, .seed = 42}, false);
  const ForwardOutputs blank = cases::make_forward_outputs(problem.inputs(), false);
  ForwardArguments host = cases::forward_arguments(problem.inputs(), blank);
  const RepeatedTensor q_latent(host.q_latent, num_tokens);
  const RepeatedTensor q_rope(host.q_rope, num_tokens);
  const RepeatedTensor indices(host.indices, num_tokens);
  for (const char* pipeline : {"exact+no-residual", "lazy+canonical+no-residual"}) {
    const ForwardOutputs expected = run_forward(problem.inputs(), options_of(pipeline));
    const RepeatedTensor out(host.out, num_tokens);  // begins as what no run gives
    const RepeatedTensor lse(host.lse, num_tokens);
    DeviceProblem run(problem, options_of(pipeline));
    ForwardArguments arguments = run.arguments();
    arguments.q_latent = q_latent.tensor();
    arguments.q_rope = q_rope.tensor();
    arguments.indices = indices.tensor();
    arguments.out = out.tensor();
    arguments.lse = lse.tensor();
    arguments.max_logits = {};
    Options options = options_of(pipeline);
    const device::DeviceMemory workspace(workspace_bytes(arguments, options));
    options.workspace = workspace.data();
    options.workspace_bytes = workspace.bytes();
    forward(arguments, options);
    device::synchronize();
    EXPECT_EQ(out.count_wrong_rows(expected.out.tensor()), 0) << num_tokens << " tokens, " << pipeline;
    EXPECT_EQ(lse.count_wrong_rows(expected.lse.tensor()), 0) << num_tokens << " tokens, " << pipeline;
  }
}

TEST_F(CudaLarge, MoreTokensThanAGridAxisHolds) {
  if (!has_memory(std::int64_t{14} << 30)) GTEST_SKIP() << "not enough device memory";
  expect_repeats(70001, 65);
}

TEST_F(CudaLarge, MoreThanAMillionTokens) {
  if (!has_memory(std::int64_t{6} << 30)) GTEST_SKIP() << "not enough device memory";
  expect_repeats((1 << 20) + 5, 1);
}

}  // namespace
}  // namespace sparsemla::cuda_test
