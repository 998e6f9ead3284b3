// An attention problem in a safetensors file: its tensors found by name, fused layouts split without a copy.
#pragma once

#include <filesystem>
#include <optional>
#include <string>

#include "io/safetensors.h"
#include "sparsemla/attention.h"

namespace sparsemla::audit {

/// Axis lengths read off the inputs.
struct ProblemSizes {
  std::int64_t num_tokens = 0;
  std::int64_t num_keys = 0;
  std::int64_t num_heads = 0;
  std::int64_t topk = 0;
  std::int64_t latent_dim = 0;
  std::int64_t rope_dim = 0;  // 0 without rope
};

/// Errors: q_latent, kv_latent or indices missing or of another rank than the library wants; heads outside 1..256.
/// Enough to size outputs by; everything else is the library's to reject.
[[nodiscard]] ProblemSizes sizes_of(const AttentionInputs& inputs);

/// Views into a mapped file.
///
/// Names: q_latent [T,H,512], q_rope [T,H,64] (optional) or both as q [T,H,576] (or [T,H,512], no rope);
/// kv_latent [S,512], k_rope [S,64] (optional) or both as kv [S,576] (or [S,512]); any of the key tensors may have a
/// head axis of extent 1, [S,1,..]; indices [T,W] or [T,1,W]; topk_length, sink, cu_seqlens_q, cu_seqlens_k, dout, dlse
/// (optional). Metadata "softmax_scale": a number, taken as inputs.softmax_scale.
struct AttentionFile {
  io::SafetensorsFile file;
  AttentionInputs inputs;
  Tensor dout;
  Tensor dlse;

  /// Errors: what the reader rejects, a tensor of another name, a fused tensor beside one of its parts, a required
  /// tensor missing, a fused width or a head axis that is not as above, metadata that is no number.
  static AttentionFile open(const std::filesystem::path& path);
};

/// Columns [0, 512) of `fused`, and [512, 576) if it has them. Errors: another last axis; `name` stands in the message.
struct LatentAndRope {
  Tensor latent;
  Tensor rope;
};
[[nodiscard]] LatentAndRope split_fused(const Tensor& fused, const std::string& name);

}  // namespace sparsemla::audit
