#include "validate/validate.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <numbers>
#include <string>
#include <vector>

#include "core/index_rules.h"
#include "core/sizes.h"
#include "sparsemla/error.h"

namespace sparsemla {
namespace {

constexpr std::int64_t kAny = -1;

struct Extent {
  std::string_view name;  // "T", or empty for a number
  std::int64_t value;     // kAny: whatever is there
};

std::string wanted_shape(const std::vector<Extent>& extents) {
  std::vector<std::string> words;
  for (const Extent& extent : extents) {
    if (extent.value == kAny) {
      words.emplace_back(extent.name);
    } else if (extent.name.empty()) {
      words.push_back(fmt::format("{}", extent.value));
    } else {
      words.push_back(fmt::format("{}={}", extent.name, extent.value));
    }
  }
  return fmt::format("[{}]", fmt::join(words, ", "));
}

enum class Access { kRead, kWritten };

/// Sufficient for "no two elements share an address": sorted by stride, each axis steps past all that the smaller ones
/// span. Every layout that slicing, transposing and fusing can make of a packed tensor passes.
bool elements_are_distinct(const Tensor& tensor) {
  std::vector<std::array<std::int64_t, 2>> axes;  // |stride|, extent
  for (int axis = 0; axis < tensor.rank; ++axis) {
    if (tensor.shape[axis] > 1) axes.push_back({std::abs(tensor.strides[axis]), tensor.shape[axis]});
  }
  std::sort(axes.begin(), axes.end());
  std::int64_t span = 0;
  for (const auto& [stride, extent] : axes) {
    if (stride <= span) return false;
    span += stride * (extent - 1);
  }
  return true;
}

/// Checks tensors one after the other against the device of the first.
class TensorChecker {
 public:
  explicit TensorChecker(const Tensor& first) : device_(first.device) {}

  void require(std::string_view name, const Tensor& tensor, std::initializer_list<DataType> dtypes,
               const std::vector<Extent>& shape, Access access) const {
    if (!tensor.defined()) throw Error(name, "nothing", wanted(dtypes, shape));
    check(name, tensor, dtypes, shape, access);
  }

  void optional(std::string_view name, const Tensor& tensor, std::initializer_list<DataType> dtypes,
                const std::vector<Extent>& shape, Access access) const {
    if (tensor.defined()) check(name, tensor, dtypes, shape, access);
  }

 private:
  static std::string wanted(std::initializer_list<DataType> dtypes, const std::vector<Extent>& shape) {
    std::vector<std::string_view> names;
    for (const DataType dtype : dtypes) names.push_back(to_string(dtype));
    return fmt::format("{} {}", fmt::join(names, " or "), wanted_shape(shape));
  }

  void check(std::string_view name, const Tensor& tensor, std::initializer_list<DataType> dtypes,
             const std::vector<Extent>& shape, Access access) const {
    if (std::find(dtypes.begin(), dtypes.end(), tensor.dtype) == dtypes.end() ||
        tensor.rank != static_cast<int>(shape.size())) {
      throw Error(name, to_string(tensor), wanted(dtypes, shape));
    }
    for (int axis = 0; axis < tensor.rank; ++axis) {
      const std::int64_t value = shape[static_cast<std::size_t>(axis)].value;
      if (tensor.shape[axis] < 0 || (value != kAny && tensor.shape[axis] != value)) {
        throw Error(name, to_string(tensor), wanted(dtypes, shape));
      }
    }
    if (tensor.device != device_) {
      throw Error(name, to_string(tensor), fmt::format("a tensor on {}, where q_latent is", to_string(device_)));
    }
    if (tensor.num_elements() == 0) return;
    if (tensor.data == nullptr) throw Error(name, "a null pointer", wanted(dtypes, shape));
    if (reinterpret_cast<std::uintptr_t>(tensor.data) % static_cast<std::uintptr_t>(size_bytes(tensor.dtype)) != 0) {
      throw Error(name, "a misaligned pointer", fmt::format("alignment to {} bytes", size_bytes(tensor.dtype)));
    }
    if (access == Access::kWritten && !elements_are_distinct(tensor)) {
      throw Error(name,
                  fmt::format("strides [{}] of {}",
                              fmt::join(tensor.strides.begin(), tensor.strides.begin() + tensor.rank, ", "),
                              shape_string(tensor)),
                  "an output whose elements do not share addresses");
    }
  }

  Device device_;
};

void check_offsets(std::string_view name, const Tensor& offsets, std::int64_t end, std::string_view axis) {
  if (load<std::int32_t>(offsets, 0) != 0) {
    throw Error(name, fmt::format("{} at position 0", load<std::int32_t>(offsets, 0)), "0 there");
  }
  for (std::int64_t i = 1; i < offsets.shape[0]; ++i) {
    const std::int32_t previous = load<std::int32_t>(offsets, i - 1);
    const std::int32_t current = load<std::int32_t>(offsets, i);
    if (current < previous) {
      throw Error(name, fmt::format("{} after {} at position {}", current, previous, i),
                  "offsets that do not decrease");
    }
  }
  const std::int32_t last = load<std::int32_t>(offsets, offsets.shape[0] - 1);
  if (last > end)
    throw Error(name, fmt::format("{} as the last offset", last), fmt::format("at most {}={}", axis, end));
}

void check_documents(const AttentionInputs& inputs, const TensorChecker& checker) {
  const Tensor& queries = inputs.cu_seqlens_q;
  const Tensor& keys = inputs.cu_seqlens_k;
  if (!queries.defined() && !keys.defined()) return;
  checker.require("cu_seqlens_q", queries, {DataType::kInt32}, {{"B+1", kAny}}, Access::kRead);
  if (queries.shape[0] < 1) throw Error("cu_seqlens_q", to_string(queries), "at least one offset");
  checker.require("cu_seqlens_k", keys, {DataType::kInt32}, {{"B+1", queries.shape[0]}}, Access::kRead);
  if (queries.device.type != DeviceType::kCpu) return;  // device data is never read from the host
  check_offsets("cu_seqlens_q", queries, inputs.q_latent.shape[0], "T");
  check_offsets("cu_seqlens_k", keys, inputs.kv_latent.shape[0], "S");
}

TensorChecker check_inputs(const AttentionInputs& inputs) {
  using enum DataType;
  const TensorChecker checker(inputs.q_latent);
  checker.require("q_latent", inputs.q_latent, {kBFloat16}, {{"T", kAny}, {"H", kAny}, {"", kLatentDim}},
                  Access::kRead);
  const std::int64_t num_tokens = inputs.q_latent.shape[0];
  const std::int64_t num_heads = inputs.q_latent.shape[1];
  if (num_heads < 1 || num_heads > kMaxHeads) {
    throw Error("q_latent", fmt::format("{} heads", num_heads), fmt::format("1 to {} heads", kMaxHeads));
  }
  checker.require("kv_latent", inputs.kv_latent, {kBFloat16}, {{"S", kAny}, {"", kLatentDim}}, Access::kRead);
  const std::int64_t num_keys = inputs.kv_latent.shape[0];
  if (inputs.q_rope.defined() || inputs.k_rope.defined()) {
    checker.require("q_rope", inputs.q_rope, {kBFloat16}, {{"T", num_tokens}, {"H", num_heads}, {"", kRopeDim}},
                    Access::kRead);
    checker.require("k_rope", inputs.k_rope, {kBFloat16}, {{"S", num_keys}, {"", kRopeDim}}, Access::kRead);
  }
  checker.require("indices", inputs.indices, {kInt32}, {{"T", num_tokens}, {"W", kAny}}, Access::kRead);
  checker.optional("topk_length", inputs.topk_length, {kInt32}, {{"T", num_tokens}}, Access::kRead);
  checker.optional("sink", inputs.sink, {kFloat32}, {{"H", num_heads}}, Access::kRead);
  check_documents(inputs, checker);
  if (inputs.softmax_scale && !std::isfinite(static_cast<float>(*inputs.softmax_scale * std::numbers::log2e))) {
    throw Error("softmax_scale", fmt::format("{}", *inputs.softmax_scale),
                "a number of which fp32 holds log2(e) times");
  }
  return checker;
}

}  // namespace

void validate(const ForwardArguments& arguments) {
  using enum DataType;
  const TensorChecker checker = check_inputs(arguments);
  const Extent tokens{"T", arguments.q_latent.shape[0]};
  const Extent heads{"H", arguments.q_latent.shape[1]};
  const std::vector<Extent> wide{tokens, heads, {"", kLatentDim}};
  checker.require("out", arguments.out, {kBFloat16}, wide, Access::kWritten);
  checker.optional("lse", arguments.lse, {kFloat32}, {tokens, heads}, Access::kWritten);
  checker.optional("max_logits", arguments.max_logits, {kFloat32}, {tokens, heads}, Access::kWritten);
  checker.optional("out_residual", arguments.out_residual, {kBFloat16}, wide, Access::kWritten);
}

void validate(const BackwardArguments& arguments) {
  using enum DataType;
  const TensorChecker checker = check_inputs(arguments);
  const Extent tokens{"T", arguments.q_latent.shape[0]};
  const Extent heads{"H", arguments.q_latent.shape[1]};
  const Extent keys{"S", arguments.kv_latent.shape[0]};
  const std::vector<Extent> wide{tokens, heads, {"", kLatentDim}};
  const std::vector<Extent> narrow{tokens, heads, {"", kRopeDim}};
  checker.require("out", arguments.out, {kBFloat16}, wide, Access::kRead);
  checker.optional("out_residual", arguments.out_residual, {kBFloat16}, wide, Access::kRead);
  checker.require("lse", arguments.lse, {kFloat32}, {tokens, heads}, Access::kRead);
  checker.require("dout", arguments.dout, {kBFloat16}, wide, Access::kRead);
  checker.optional("dlse", arguments.dlse, {kFloat32}, {tokens, heads}, Access::kRead);

  const bool has_rope = arguments.q_rope.defined();
  for (const auto& [name, tensor] :
       {std::pair{"dq_rope", &arguments.dq_rope}, std::pair{"dk_rope", &arguments.dk_rope}}) {
    if (tensor->defined() && !has_rope) throw Error(name, to_string(*tensor), "nothing, since q_rope is not given");
  }
  if (arguments.dsink.defined() && !arguments.sink.defined()) {
    throw Error("dsink", to_string(arguments.dsink), "nothing, since sink is not given");
  }
  checker.optional("dq_latent", arguments.dq_latent, {kBFloat16, kFloat32}, wide, Access::kWritten);
  checker.optional("dq_rope", arguments.dq_rope, {kBFloat16, kFloat32}, narrow, Access::kWritten);
  checker.optional("dkv_latent", arguments.dkv_latent, {kFloat32}, {keys, {"", kLatentDim}}, Access::kWritten);
  checker.optional("dk_rope", arguments.dk_rope, {kFloat32}, {keys, {"", kRopeDim}}, Access::kWritten);
  checker.optional("dsink", arguments.dsink, {kFloat32}, {heads}, Access::kWritten);
  const auto& a = arguments;
  if (!a.dq_latent.defined() && !a.dq_rope.defined() && !a.dkv_latent.defined() && !a.dk_rope.defined() &&
      !a.dsink.defined()) {
    throw Error("gradients", "none", "at least one of dq_latent, dq_rope, dkv_latent, dk_rope, dsink");
  }
}

void validate(const Pipeline& pipeline) {
  if (pipeline.p_dtype != DataType::kBFloat16) {
    throw Error("p_dtype", to_string(pipeline.p_dtype), "bfloat16, the only one built");
  }
  if (pipeline.key_block < 1) throw Error("key_block", fmt::format("{}", pipeline.key_block), "1 or more");
  const double bound = rescale_threshold_bound_log2(pipeline.p_dtype);
  const double threshold = pipeline.rescale_threshold_log2;
  if (!(threshold >= 0.0 && threshold < bound)) {
    throw Error(
        "rescale_threshold", fmt::format("{}", threshold),
        fmt::format("0 or more and below {:.2f} log2 units, where P overflows {}", bound, to_string(pipeline.p_dtype)));
  }
}

void validate(const Options& options) {
  if (options.num_threads < 0) {
    throw Error("num_threads", fmt::format("{}", options.num_threads), "0 (all cores) or more");
  }
  if (options.workspace_bytes < 0 || (options.workspace == nullptr && options.workspace_bytes > 0)) {
    throw Error("workspace",
                fmt::format("{} and {} bytes", options.workspace == nullptr ? "a null pointer" : "a pointer",
                            options.workspace_bytes),
                "an address and the bytes there, or neither");
  }
  if (options.pipeline) validate(*options.pipeline);
}

void validate_workspace(const Options& options, const Plan& plan) {
  if (plan.workspace_bytes == 0) return;
  const std::string wanted = fmt::format("{} bytes of device memory (workspace_bytes() of this call), aligned to {}",
                                         plan.workspace_bytes, kWorkspaceAlignment);
  if (options.workspace == nullptr) throw Error("workspace", "nothing", wanted);
  if (options.workspace_bytes < plan.workspace_bytes) {
    throw Error("workspace", fmt::format("{} bytes", options.workspace_bytes), wanted);
  }
  if (reinterpret_cast<std::uintptr_t>(options.workspace) % kWorkspaceAlignment != 0) {
    throw Error("workspace", "a misaligned pointer", wanted);
  }
}

}  // namespace sparsemla
