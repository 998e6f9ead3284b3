// Running a problem through the public calls with outputs that own their memory and watch their surroundings.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "cases/owned_tensor.h"
#include "numerics/problem.h"
#include "sparsemla/attention.h"

namespace sparsemla::cases {

/// Inputs of a problem copied into a layout. Gaps hold NaN bytes (0xFF), which must never be read.
class LaidOutProblem {
 public:
  /// kFused shares one 576-wide tensor between latent and rope part, as FlashMLA's callers do. kBroadcast gives
  /// q_latent, q_rope, indices, dout and dlse stride 0 on the token axis. Errors: kBroadcast of a problem whose tokens
  /// differ.
  LaidOutProblem(const Problem& problem, Layout layout);

  [[nodiscard]] const AttentionInputs& inputs() const noexcept { return inputs_; }
  [[nodiscard]] const Tensor& dout() const noexcept { return dout_; }
  [[nodiscard]] const Tensor& dlse() const noexcept { return dlse_; }

 private:
  Tensor copy(const Tensor& source, Layout layout);

  std::vector<OwnedTensor> storage_;  // views point into heap blocks, so growing the vector moves nothing they see
  AttentionInputs inputs_;
  Tensor dout_;
  Tensor dlse_;
};

struct ForwardOutputs {
  OwnedTensor out;           // [T, H, 512] bf16
  OwnedTensor lse;           // [T, H] fp32
  OwnedTensor max_logits;    // [T, H] fp32
  OwnedTensor out_residual;  // [T, H, 512] bf16; not defined without a residual

  [[nodiscard]] bool gaps_untouched() const;
  [[nodiscard]] bool untouched() const;
};

struct Gradients {
  OwnedTensor dq_latent;   // [T, H, 512] bf16 or fp32
  OwnedTensor dq_rope;     // [T, H, 64]; not defined without rope
  OwnedTensor dkv_latent;  // [S, 512] fp32
  OwnedTensor dk_rope;     // [S, 64] fp32; not defined without rope
  OwnedTensor dsink;       // [H] fp32; not defined without sink

  [[nodiscard]] bool gaps_untouched() const;
  [[nodiscard]] bool untouched() const;
};

/// The engines of the CPU backend that this processor has: kFp32, and kAmx where it runs. Found by asking plan().
[[nodiscard]] const std::vector<CpuEngine>& engines();
[[nodiscard]] std::string_view to_string(CpuEngine engine) noexcept;

/// Whether a call with these options carries out_residual.
[[nodiscard]] bool has_residual(const Options& options);

/// Poisoned outputs of the right shapes.
[[nodiscard]] ForwardOutputs make_forward_outputs(const AttentionInputs& inputs, bool residual,
                                                  Layout layout = Layout::kContiguous, unsigned char fill = 0xA5);
[[nodiscard]] Gradients make_gradients(const AttentionInputs& inputs, DataType dq_dtype = DataType::kBFloat16,
                                       Layout layout = Layout::kContiguous, unsigned char fill = 0xA5);

/// The argument structs over what the caller holds.
[[nodiscard]] ForwardArguments forward_arguments(const AttentionInputs& inputs, const ForwardOutputs& outputs);
[[nodiscard]] BackwardArguments backward_arguments(const AttentionInputs& inputs, const ForwardOutputs& outputs,
                                                   const Tensor& dout, const Tensor& dlse, const Gradients& gradients);

/// The backend whose tensors lie on a device. What follows copies them there (device 0) and back, memory around them
/// included; a build without CUDA throws Error.
inline constexpr const char* kDeviceBackend = "sm90";

/// One forward into outputs that the caller holds.
void run_forward_into(ForwardOutputs& outputs, const AttentionInputs& inputs, const Options& options);

/// One call with all outputs, respectively all gradients.
[[nodiscard]] ForwardOutputs run_forward(const AttentionInputs& inputs, const Options& options = {},
                                         Layout layout = Layout::kContiguous);
[[nodiscard]] Gradients run_backward(const AttentionInputs& inputs, const ForwardOutputs& outputs, const Tensor& dout,
                                     const Tensor& dlse, const Options& options = {},
                                     DataType dq_dtype = DataType::kBFloat16, Layout layout = Layout::kContiguous);

/// Forward and, if there is a dout, backward.
struct Results {
  ForwardOutputs forward;
  Gradients gradients;
};
[[nodiscard]] Results run(const Problem& problem, const Options& options = {}, DataType dq_dtype = DataType::kBFloat16);

/// Names of the tensors that are not bitwise equal, or given on one side only: "out dq_rope"; empty = all equal.
[[nodiscard]] std::string differences(const ForwardOutputs& a, const ForwardOutputs& b);
[[nodiscard]] std::string differences(const Gradients& a, const Gradients& b);
[[nodiscard]] std::string differences(const Results& a, const Results& b);

}  // namespace sparsemla::cases
