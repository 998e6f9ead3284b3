// The steps of an audit, shared by its two phases.
#pragma once

#include <string>
#include <vector>

#include "audit/audit.h"
#include "audit/candidate.h"
#include "audit/subject.h"
#include "audit/tensor_buffer.h"
#include "reference/reference.h"

namespace sparsemla::audit {

/// Counts steps towards a total and tells the caller.
class Steps {
 public:
  Steps(const ProgressCallback& callback, int total) : callback_(callback), total_(total) {}
  void begin(const std::string& what) {
    ++step_;
    if (callback_) callback_({what, step_, total_});
  }

 private:
  const ProgressCallback& callback_;
  int step_ = 0;
  int total_ = 0;
};

/// What both phases read, and the report they fill.
struct Experiment {
  const AuditRequest& request;
  const Subject& subject;
  const CandidateFile* candidate = nullptr;  // null: none
  Dominant dominant;
  AuditReport report;
};

/// Outputs of one library forward.
struct ForwardRun {
  TensorBuffer out;       // [T, H, 512] bf16
  TensorBuffer residual;  // the same; not given when the pipeline has none
  TensorBuffer lse;       // [T, H] fp32
};
[[nodiscard]] ForwardArguments forward_arguments(const AttentionInputs& inputs, const ForwardRun& outputs);
[[nodiscard]] ForwardRun allocate_forward(const ProblemSizes& sizes, bool residual);

/// The request's options for a pipeline.
[[nodiscard]] Options options_for(const AuditRequest& request, const Pipeline& pipeline);

/// The lists in the order asked for, as `walk` will visit them.
[[nodiscard]] std::vector<std::int32_t> ordered_lists(const Experiment& experiment, SlotOrder order,
                                                      WalkDirection walk);

/// Gradients of one backward pass, or a candidate's; tensors may be undefined.
struct Gradients {
  Tensor dq_latent;
  Tensor dq_rope;
  Tensor dkv_latent;
  Tensor dk_rope;
  Tensor dsink;
};
struct GradientBuffers {
  TensorBuffer dq_latent;
  TensorBuffer dq_rope;
  TensorBuffer dkv_latent;
  TensorBuffer dk_rope;
  TensorBuffer dsink;
};
[[nodiscard]] GradientBuffers allocate_gradients(const ProblemSizes& sizes, bool has_sink, DataType grad_dtype);
[[nodiscard]] BackwardArguments backward_arguments(const AttentionInputs& inputs, const Subject& subject,
                                                   const ForwardRun& forward, const GradientBuffers& gradients,
                                                   bool residual);

/// Number of steps that the phase will count.
[[nodiscard]] int count_forward_steps(const Experiment& experiment);
[[nodiscard]] int count_gradient_steps(const Experiment& experiment);

/// Fills setup's weights, floors, forward and order_differences. Holds the fp64 out for as long as it runs.
void run_forward_phase(Experiment& experiment, Steps& steps);
/// Fills gradients. Holds the fp64 gradients for as long as it runs.
void run_gradient_phase(Experiment& experiment, Steps& steps);

}  // namespace sparsemla::audit
