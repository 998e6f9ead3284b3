// What another kernel made of the same inputs, in a safetensors file.
#pragma once

#include <filesystem>

#include "audit/attention_file.h"
#include "io/safetensors.h"

namespace sparsemla::audit {

/// Views into a mapped file. Any of bf16, fp16, fp32, fp64.
///
/// Names: out [T,H,512] (required), lse [T,H]; gradients dq_latent [T,H,512], dq_rope [T,H,64] or both as dq [T,H,576];
/// dkv_latent [S,512], dk_rope [S,64] or both as dkv [S,576] (the key gradients may have a head axis of extent 1);
/// dsink [H]. max_logits and out_residual may be there, so that an output of `sparsemla run` is a candidate; they are
/// not judged.
struct CandidateFile {
  io::SafetensorsFile file;
  Tensor out;
  Tensor lse;
  Tensor dq_latent;
  Tensor dq_rope;
  Tensor dkv_latent;
  Tensor dk_rope;
  Tensor dsink;
  std::vector<std::string> not_judged;  // names of tensors that are there but have no figure

  [[nodiscard]] bool has_gradients() const noexcept;

  /// Errors: what the reader rejects, no out, a tensor of another name, a shape other than `sizes` ask for, a dtype
  /// that is not one of the four, a fused tensor beside one of its parts, dsink for a problem without a sink.
  static CandidateFile open(const std::filesystem::path& path, const ProblemSizes& sizes, bool has_sink);
};

}  // namespace sparsemla::audit
