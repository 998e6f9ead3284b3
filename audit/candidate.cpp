#include "audit/candidate.h"

#include <algorithm>
#include <array>
#include <initializer_list>
#include <string>
#include <string_view>
#include <vector>

#include "sparsemla/error.h"

namespace sparsemla::audit {
namespace {

constexpr std::array<std::string_view, 11> kNames = {
    "out", "lse", "max_logits", "out_residual", "dq", "dq_latent", "dq_rope", "dkv", "dk_rope", "dkv_latent", "dsink"};

void reject_unknown_names(const io::SafetensorsFile& file) {
  for (const auto& [name, tensor] : file.tensors()) {
    if (std::find(kNames.begin(), kNames.end(), name) == kNames.end()) {
      throw Error(name, "a tensor of this name in the candidate",
                  "only out lse max_logits out_residual dq_latent dq_rope dkv_latent dk_rope dsink, or dq dkv");
    }
  }
}

bool is_float(DataType dtype) {
  return dtype == DataType::kBFloat16 || dtype == DataType::kFloat16 || dtype == DataType::kFloat32 ||
         dtype == DataType::kFloat64;
}

void require(const Tensor& tensor, const std::string& name, std::initializer_list<std::int64_t> shape) {
  const bool same_shape =
      tensor.rank == static_cast<int>(shape.size()) && std::equal(shape.begin(), shape.end(), tensor.shape.begin());
  if (!same_shape || !is_float(tensor.dtype)) {
    const Tensor wanted = Tensor::contiguous(&tensor, DataType::kFloat32, shape);
    throw Error("candidate " + name, to_string(tensor),
                "bfloat16, float16, float32 or float64 " + shape_string(wanted));
  }
}

/// The two parts from their own tensors or the fused one. Without a rope part the fused tensor is the latent one.
LatentAndRope find_pair(const io::SafetensorsFile& file, const std::string& fused_name, const std::string& latent_name,
                        const std::string& rope_name, std::int64_t rope_dim) {
  const Tensor fused = file.find(fused_name);
  LatentAndRope parts{file.find(latent_name), file.find(rope_name)};
  if (fused.defined()) {
    if (parts.latent.defined() || parts.rope.defined()) {
      throw Error("candidate " + fused_name, "it beside " + (parts.latent.defined() ? latent_name : rope_name),
                  "either the fused tensor or its parts");
    }
    parts = split_fused(fused, "candidate " + fused_name);
    if (parts.rope.defined() != (rope_dim > 0)) {
      throw Error("candidate " + fused_name, to_string(fused),
                  "a last axis of " + std::to_string(kLatentDim + rope_dim) + ", as the inputs have");
    }
  }
  if (parts.rope.defined() && rope_dim == 0) {
    throw Error("candidate " + rope_name, to_string(parts.rope), "nothing: the inputs have no rope part");
  }
  return parts;
}

Tensor without_head_axis(const Tensor& tensor) {
  return tensor.rank == 3 && tensor.shape[1] == 1 ? tensor.squeeze(1) : tensor;
}

void require_if_given(const Tensor& tensor, const std::string& name, std::initializer_list<std::int64_t> shape) {
  if (tensor.defined()) {
    require(tensor, name, shape);
  }
}

}  // namespace

bool CandidateFile::has_gradients() const noexcept {
  return dq_latent.defined() || dq_rope.defined() || dkv_latent.defined() || dk_rope.defined() || dsink.defined();
}

CandidateFile CandidateFile::open(const std::filesystem::path& path, const ProblemSizes& sizes, bool has_sink) {
  CandidateFile result;
  result.file = io::SafetensorsFile::open(path);
  const io::SafetensorsFile& file = result.file;
  reject_unknown_names(file);
  const std::int64_t tokens = sizes.num_tokens;
  const std::int64_t heads = sizes.num_heads;

  result.out = file.find("out");
  require(result.out, "out", {tokens, heads, sizes.latent_dim});
  result.lse = file.find("lse");
  require_if_given(result.lse, "lse", {tokens, heads});

  const LatentAndRope dq = find_pair(file, "dq", "dq_latent", "dq_rope", sizes.rope_dim);
  result.dq_latent = dq.latent;
  result.dq_rope = dq.rope;
  require_if_given(result.dq_latent, "dq_latent", {tokens, heads, sizes.latent_dim});
  require_if_given(result.dq_rope, "dq_rope", {tokens, heads, sizes.rope_dim});

  const LatentAndRope dkv = find_pair(file, "dkv", "dkv_latent", "dk_rope", sizes.rope_dim);
  result.dkv_latent = without_head_axis(dkv.latent);
  result.dk_rope = without_head_axis(dkv.rope);
  require_if_given(result.dkv_latent, "dkv_latent", {sizes.num_keys, sizes.latent_dim});
  require_if_given(result.dk_rope, "dk_rope", {sizes.num_keys, sizes.rope_dim});

  result.dsink = file.find("dsink");
  require_if_given(result.dsink, "dsink", {heads});
  if (result.dsink.defined() && !has_sink) {
    throw Error("candidate dsink", to_string(result.dsink), "nothing: the inputs have no sink");
  }
  for (const char* name : {"max_logits", "out_residual"}) {
    if (file.find(name).defined()) {
      result.not_judged.emplace_back(name);
    }
  }
  return result;
}

}  // namespace sparsemla::audit
