#include "audit/attention_file.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>
#include <string_view>

#include "sparsemla/error.h"

namespace sparsemla::audit {
namespace {

constexpr std::array<std::string_view, 13> kNames = {
    "q_latent",     "q_rope",       "q",    "kv_latent", "k_rope", "kv", "indices", "topk_length", "sink",
    "cu_seqlens_q", "cu_seqlens_k", "dout", "dlse"};

void reject_unknown_names(const io::SafetensorsFile& file) {
  for (const auto& [name, tensor] : file.tensors()) {
    if (std::find(kNames.begin(), kNames.end(), name) == kNames.end()) {
      throw Error(
          name, "a tensor of this name in the input file",
          "only q_latent q_rope kv_latent k_rope, or q kv; indices topk_length sink cu_seqlens_q cu_seqlens_k dout "
          "dlse");
    }
  }
}

/// `tensor` without the head axis that key and index tensors of other libraries carry.
Tensor without_head_axis(const Tensor& tensor, const std::string& name) {
  if (tensor.rank != 3) {
    return tensor;
  }
  if (tensor.shape[1] != 1) {
    throw Error(name, to_string(tensor), "two axes, or three with extent 1 in the middle");
  }
  return tensor.squeeze(1);
}

/// The latent and rope parts from either their own two tensors or the fused one.
LatentAndRope find_pair(const io::SafetensorsFile& file, const std::string& fused_name, const std::string& latent_name,
                        const std::string& rope_name, bool keys) {
  const auto find = [&](const std::string& name) {
    const Tensor tensor = file.find(name);
    return keys && tensor.defined() ? without_head_axis(tensor, name) : tensor;
  };
  const Tensor fused = find(fused_name);
  LatentAndRope parts{find(latent_name), find(rope_name)};
  if (!fused.defined()) {
    if (!parts.latent.defined()) {
      throw Error(latent_name, "neither it nor " + fused_name + " in the input file", "one of the two");
    }
    return parts;
  }
  if (parts.latent.defined() || parts.rope.defined()) {
    throw Error(fused_name, "it beside " + (parts.latent.defined() ? latent_name : rope_name),
                "either the fused tensor or its parts");
  }
  return split_fused(fused, fused_name);
}

std::optional<double> softmax_scale_of(const io::SafetensorsFile& file) {
  const auto entry = file.metadata().find("softmax_scale");
  if (entry == file.metadata().end()) {
    return std::nullopt;
  }
  const std::string& text = entry->second;
  double value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size() || !std::isfinite(value)) {
    throw Error("metadata softmax_scale", "'" + text + "'", "a finite number");
  }
  return value;
}

void require_rank(const Tensor& tensor, const char* name, int rank) {
  if (!tensor.defined() || tensor.rank != rank) {
    throw Error(name, to_string(tensor), "a tensor of rank " + std::to_string(rank));
  }
}

}  // namespace

ProblemSizes sizes_of(const AttentionInputs& inputs) {
  require_rank(inputs.q_latent, "q_latent", 3);
  require_rank(inputs.kv_latent, "kv_latent", 2);
  require_rank(inputs.indices, "indices", 2);
  ProblemSizes sizes;
  sizes.num_tokens = inputs.q_latent.shape[0];
  sizes.num_heads = inputs.q_latent.shape[1];
  sizes.latent_dim = inputs.q_latent.shape[2];
  sizes.num_keys = inputs.kv_latent.shape[0];
  sizes.topk = inputs.indices.shape[1];
  if (inputs.q_rope.defined()) {
    require_rank(inputs.q_rope, "q_rope", 3);
    sizes.rope_dim = inputs.q_rope.shape[2];
  }
  if (sizes.num_heads < 1 || sizes.num_heads > kMaxHeads) {
    throw Error("q_latent", std::to_string(sizes.num_heads) + " heads", "1 to " + std::to_string(kMaxHeads));
  }
  if (sizes.latent_dim < 1) {
    throw Error("q_latent", to_string(inputs.q_latent), "a last axis that is not empty");
  }
  return sizes;
}

LatentAndRope split_fused(const Tensor& fused, const std::string& name) {
  const std::int64_t width = fused.rank > 0 ? fused.shape[static_cast<std::size_t>(fused.rank - 1)] : 0;
  if (width == kLatentDim) {
    return {fused, {}};
  }
  if (width != kLatentDim + kRopeDim) {
    throw Error(name, to_string(fused), "a last axis of 576 (latent, then rope), or of 512 without rope");
  }
  return {fused.columns(0, kLatentDim), fused.columns(kLatentDim, kLatentDim + kRopeDim)};
}

AttentionFile AttentionFile::open(const std::filesystem::path& path) {
  AttentionFile result;
  result.file = io::SafetensorsFile::open(path);
  const io::SafetensorsFile& file = result.file;
  reject_unknown_names(file);

  AttentionInputs& inputs = result.inputs;
  const LatentAndRope query = find_pair(file, "q", "q_latent", "q_rope", /*keys=*/false);
  inputs.q_latent = query.latent;
  inputs.q_rope = query.rope;
  const LatentAndRope key = find_pair(file, "kv", "kv_latent", "k_rope", /*keys=*/true);
  inputs.kv_latent = key.latent;
  inputs.k_rope = key.rope;
  if (!file.find("indices").defined()) {
    throw Error("indices", "nothing in the input file", "int32 [T, W]");
  }
  inputs.indices = without_head_axis(file.find("indices"), "indices");
  inputs.topk_length = file.find("topk_length");
  inputs.sink = file.find("sink");
  inputs.cu_seqlens_q = file.find("cu_seqlens_q");
  inputs.cu_seqlens_k = file.find("cu_seqlens_k");
  inputs.softmax_scale = softmax_scale_of(file);
  result.dout = file.find("dout");
  result.dlse = file.find("dlse");
  return result;
}

}  // namespace sparsemla::audit
