#include "audit/subject.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <utility>

#include "io/safetensors.h"
#include "sparsemla/error.h"

namespace sparsemla::audit {
namespace {

std::int32_t int32_at(const Tensor& tensor, std::int64_t offset) {
  return static_cast<const std::int32_t*>(tensor.data)[offset];
}

std::vector<std::int32_t> lists_of(const AttentionInputs& inputs, const ProblemSizes& sizes) {
  const Tensor& list = inputs.indices;
  if (list.dtype != DataType::kInt32) {
    throw Error("indices", to_string(list), "int32 [T, W]");
  }
  if (list.shape[0] != sizes.num_tokens) {
    throw Error("indices", to_string(list), fmt::format("{} rows, one for each token", sizes.num_tokens));
  }
  const Tensor& length = inputs.topk_length;
  if (length.defined() &&
      (length.dtype != DataType::kInt32 || length.rank != 1 || length.shape[0] != sizes.num_tokens)) {
    throw Error("topk_length", to_string(length), fmt::format("int32 [{}]", sizes.num_tokens));
  }
  std::vector<std::int32_t> result(static_cast<std::size_t>(sizes.num_tokens * sizes.topk), -1);
  for (std::int64_t token = 0; token < sizes.num_tokens; ++token) {
    const std::int64_t slots =
        length.defined() ? std::clamp<std::int64_t>(int32_at(length, token * length.strides[0]), 0, sizes.topk)
                         : sizes.topk;
    for (std::int64_t slot = 0; slot < slots; ++slot) {
      result[static_cast<std::size_t>(token * sizes.topk + slot)] =
          int32_at(list, token * list.strides[0] + slot * list.strides[1]);
    }
  }
  return result;
}

void generate(Subject& subject, const GeneratedSource& source, bool with_gradients, int num_threads) {
  subject.problem = make_peaked(source.shape, source.beta, with_gradients, num_threads);
  subject.inputs = subject.problem.inputs();
  subject.dout = subject.problem.dout_tensor();
  subject.dlse = subject.problem.dlse_tensor();
  for (std::int64_t token = 0; token < source.shape.num_tokens; ++token) {
    subject.own_keys.push_back(static_cast<std::int32_t>(token + source.shape.num_keys - source.shape.num_tokens));
  }
}

void read(Subject& subject, const std::filesystem::path& path, bool with_gradients) {
  subject.file = AttentionFile::open(path);
  subject.inputs = subject.file.inputs;
  subject.dout = subject.file.dout;
  subject.dlse = subject.file.dlse;
  if (with_gradients && !subject.dout.defined()) {
    throw Error("dout", "nothing in the input file", "bfloat16 [T, H, 512]: gradients are judged for a given dout");
  }
}

}  // namespace

Subject Subject::open(const AuditRequest& request, bool with_gradients) {
  if (request.generated.has_value() == !request.input_file.empty()) {
    throw Error("input", request.generated ? "a file and a generated problem" : "nothing",
                "either an input file or a generated problem");
  }
  Subject subject;
  if (request.generated) {
    generate(subject, *request.generated, with_gradients, request.options.num_threads);
  } else {
    read(subject, request.input_file, with_gradients);
  }
  subject.sizes = sizes_of(subject.inputs);
  AttentionInputs& inputs = subject.inputs;
  inputs.causal = request.causal;
  if (request.softmax_scale) {
    inputs.softmax_scale = request.softmax_scale;
  }
  if (!inputs.softmax_scale) {
    inputs.softmax_scale = 1.0 / std::sqrt(static_cast<double>(subject.sizes.latent_dim + subject.sizes.rope_dim));
  }
  subject.indices = lists_of(inputs, subject.sizes);
  return subject;
}

AttentionInputs Subject::with_indices(const std::vector<std::int32_t>& list) const {
  AttentionInputs result = inputs;
  result.indices = Tensor::contiguous(list.data(), DataType::kInt32, {sizes.num_tokens, sizes.topk});
  result.topk_length = {};
  return result;
}

void write_inputs(const Subject& subject, const std::filesystem::path& path) {
  const AttentionInputs& inputs = subject.inputs;
  const std::vector<std::pair<std::string, Tensor>> all = {{"q_latent", inputs.q_latent},
                                                           {"q_rope", inputs.q_rope},
                                                           {"kv_latent", inputs.kv_latent},
                                                           {"k_rope", inputs.k_rope},
                                                           {"indices", inputs.indices},
                                                           {"topk_length", inputs.topk_length},
                                                           {"sink", inputs.sink},
                                                           {"dout", subject.dout},
                                                           {"dlse", subject.dlse},
                                                           {"cu_seqlens_q", inputs.cu_seqlens_q},
                                                           {"cu_seqlens_k", inputs.cu_seqlens_k}};
  std::vector<std::pair<std::string, Tensor>> given;
  std::copy_if(all.begin(), all.end(), std::back_inserter(given),
               [](const auto& item) { return item.second.defined(); });
  io::write_safetensors(path, given, {{"softmax_scale", fmt::format("{}", *inputs.softmax_scale)}});
}

}  // namespace sparsemla::audit
