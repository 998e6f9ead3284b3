// What the tests of the device share: they skip themselves where there is none.
#pragma once

#include <gtest/gtest.h>

#include <cstddef>
#include <cstdlib>
#include <string>
#include <vector>

#include "cases/conformance.h"
#include "device/mirror.h"
#include "sparsemla/backend.h"

namespace sparsemla::cuda_test {

/// Skips where the Hopper backend does not run. SPARSEMLA_REQUIRE_DEVICE=1 makes that a failure, for machines that are
/// there to run these tests.
class CudaTest : public testing::Test {
 protected:
  void SetUp() override {
    for (const BackendInfo& info : backends()) {
      if (info.name != cases::kDeviceBackend || info.available) continue;
      if (std::getenv("SPARSEMLA_REQUIRE_DEVICE") != nullptr) FAIL() << info.detail;
      GTEST_SKIP() << info.detail;
    }
  }
};

inline Options options_of(const std::string& pipeline) {
  Options options;
  options.backend = cases::kDeviceBackend;
  options.pipeline = parse_pipeline(pipeline);
  return options;
}

/// A problem on the device, to be run there any number of times.
class DeviceProblem {
 public:
  DeviceProblem(const Problem& problem, const Options& options)
      : options_(options),
        outputs_(cases::make_forward_outputs(problem.inputs(), cases::has_residual(options))),
        host_(cases::forward_arguments(problem.inputs(), outputs_)) {
    for (const auto member : device::input_members()) mirror_.add(host_.*member);
    for (cases::OwnedTensor* output : {&outputs_.out, &outputs_.lse, &outputs_.max_logits, &outputs_.out_residual}) {
      mirror_.add(output->storage());
    }
    mirror_.upload();
    arguments_ = host_;
    for (const auto member : device::input_members()) arguments_.*member = mirror_.view(host_.*member);
    arguments_.out = mirror_.view(host_.out);
    arguments_.lse = mirror_.view(host_.lse);
    arguments_.max_logits = mirror_.view(host_.max_logits);
    arguments_.out_residual = mirror_.view(host_.out_residual);
    workspace_ = device::DeviceMemory(workspace_bytes(arguments_, options_));
    options_.workspace = workspace_.data();
    options_.workspace_bytes = workspace_.bytes();
    device::synchronize();
  }
  DeviceProblem(const DeviceProblem&) = delete;
  DeviceProblem& operator=(const DeviceProblem&) = delete;

  /// Device views and options with the workspace: for calls of the test's own.
  [[nodiscard]] ForwardArguments& arguments() { return arguments_; }
  [[nodiscard]] Options& options() { return options_; }

  void enqueue(void* stream = nullptr) {
    options_.stream = stream;
    forward(arguments_, options_);
  }
  /// Waits, then copies the outputs back.
  const cases::ForwardOutputs& outputs() {
    device::synchronize();
    for (const Tensor* output : {&host_.out, &host_.lse, &host_.max_logits, &host_.out_residual}) {
      mirror_.download(*output);
    }
    return outputs_;
  }
  /// The inputs of another problem of the same shapes, in place.
  void replace_inputs(const Problem& other) {
    const AttentionInputs inputs = other.inputs();
    for (const auto member : {&AttentionInputs::q_latent, &AttentionInputs::q_rope, &AttentionInputs::kv_latent,
                              &AttentionInputs::k_rope, &AttentionInputs::indices}) {
      const Tensor& from = inputs.*member;
      device::copy_to_device((arguments_.*member).data, from.data, from.num_elements() * size_bytes(from.dtype));
    }
  }

 private:
  Options options_;
  cases::ForwardOutputs outputs_;
  ForwardArguments host_;
  device::Mirror mirror_{0};
  ForwardArguments arguments_;
  device::DeviceMemory workspace_;
};

/// Holds a problem of the test's own against the reference, once for each pipeline.
inline void expect_conforms(const std::string& name, const std::function<Problem()>& make,
                            const std::vector<std::string>& pipelines, std::uint32_t tags = cases::kRandom) {
  const cases::Case entry{.name = name, .tags = cases::kForward | tags, .make = make};
  cases::Conformance conformance(entry);
  for (const std::string& pipeline : pipelines) {
    for (const std::string& failure : conformance.check_run(options_of(pipeline))) {
      ADD_FAILURE() << name << ", " << pipeline << ": " << failure;
    }
  }
}

/// Rows [begin, begin + count) along an axis.
inline Tensor narrowed(Tensor tensor, int axis, std::int64_t begin, std::int64_t count) {
  if (!tensor.defined()) return tensor;
  tensor.data = static_cast<std::byte*>(tensor.data) + begin * tensor.strides[axis] * size_bytes(tensor.dtype);
  tensor.shape[axis] = count;
  return tensor;
}

/// Seeded numbers for shuffles and lists.
class Random {
 public:
  explicit Random(std::uint64_t seed) : state_(seed * 0x9E3779B97F4A7C15U + 1) {}
  std::int64_t below(std::int64_t bound) {
    state_ = state_ * 6364136223846793005U + 1442695040888963407U;
    return static_cast<std::int64_t>((state_ >> 33) % static_cast<std::uint64_t>(bound));
  }

 private:
  std::uint64_t state_;
};

}  // namespace sparsemla::cuda_test
