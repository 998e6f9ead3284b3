// C argument structs made from C++ ones, and a problem that uses every argument.
#pragma once

#include <deque>
#include <vector>

#include "numerics/problem.h"
#include "sparsemla/attention.h"
#include "sparsemla/capi.h"
#include "sparsemla/dlpack.h"

namespace sparsemla::capi_test {

/// Keeps the DLTensors, and the shapes they point at, in place.
class Views {
 public:
  const DLTensor* add(const Tensor& tensor) {
    if (!tensor.defined()) return nullptr;
    tensors_.push_back(tensor);
    views_.push_back(to_dlpack(tensors_.back()));
    return &views_.back();
  }

  sparsemla_forward_arguments to_c(const ForwardArguments& arguments) {
    sparsemla_forward_arguments c{};
    c.struct_size = sizeof c;
    copy_inputs(arguments, c);
    c.out = add(arguments.out);
    c.lse = add(arguments.lse);
    c.max_logits = add(arguments.max_logits);
    c.out_residual = add(arguments.out_residual);
    return c;
  }

  sparsemla_backward_arguments to_c(const BackwardArguments& arguments) {
    sparsemla_backward_arguments c{};
    c.struct_size = sizeof c;
    copy_inputs(arguments, c);
    c.out = add(arguments.out);
    c.out_residual = add(arguments.out_residual);
    c.lse = add(arguments.lse);
    c.dout = add(arguments.dout);
    c.dlse = add(arguments.dlse);
    c.dq_latent = add(arguments.dq_latent);
    c.dq_rope = add(arguments.dq_rope);
    c.dkv_latent = add(arguments.dkv_latent);
    c.dk_rope = add(arguments.dk_rope);
    c.dsink = add(arguments.dsink);
    c.accumulate_dkv = arguments.accumulate_dkv ? 1 : 0;
    return c;
  }

 private:
  template <typename Struct>
  void copy_inputs(const AttentionInputs& inputs, Struct& c) {
    c.q_latent = add(inputs.q_latent);
    c.q_rope = add(inputs.q_rope);
    c.kv_latent = add(inputs.kv_latent);
    c.k_rope = add(inputs.k_rope);
    c.indices = add(inputs.indices);
    c.topk_length = add(inputs.topk_length);
    c.sink = add(inputs.sink);
    c.cu_seqlens_q = add(inputs.cu_seqlens_q);
    c.cu_seqlens_k = add(inputs.cu_seqlens_k);
    c.causal = inputs.causal ? 1 : 0;
    if (inputs.softmax_scale) {
      scales_.push_back(*inputs.softmax_scale);
      c.softmax_scale = &scales_.back();
    }
  }

  std::deque<Tensor> tensors_;
  std::deque<DLTensor> views_;
  std::deque<double> scales_;
};

/// Two documents of 4 tokens and 6 keys, with every optional input.
inline Problem full_problem() {
  Problem problem = make_iid({.num_tokens = 8, .num_keys = 12, .topk = 5, .num_heads = 3, .seed = 7}, true, 1);
  for (auto& index : problem.indices) index = index % 6;
  problem.topk_length = {5, 4, 3, 0, 5, 2, 5, 1};
  problem.sink = {0.5F, -1.0F, 2.0F};
  problem.cu_seqlens_q = {0, 4, 8};
  problem.cu_seqlens_k = {0, 6, 12};
  problem.dlse.assign(8 * 3, 0.25F);
  problem.causal = true;
  problem.softmax_scale = 0.05;
  return problem;
}

/// Outputs of a forward and a backward over a problem, and the arguments that point at them.
struct Call {
  explicit Call(const Problem& problem)
      : wide(problem.q_latent.size()),
        rope(problem.q_rope.size()),
        rows(static_cast<std::size_t>(problem.num_tokens * problem.num_heads)),
        out(wide),
        out_residual(wide),
        lse(rows),
        max_logits(rows),
        dq_latent(wide),
        dq_rope(rope),
        dkv_latent(problem.kv_latent.size(), 1.0F),
        dk_rope(problem.k_rope.size(), 1.0F),
        dsink(problem.sink.size()) {
    const std::int64_t T = problem.num_tokens, S = problem.num_keys, H = problem.num_heads;
    static_cast<AttentionInputs&>(forward) = problem.inputs();
    forward.out = Tensor::contiguous(out.data(), DataType::kBFloat16, {T, H, kLatentDim});
    forward.out_residual = Tensor::contiguous(out_residual.data(), DataType::kBFloat16, {T, H, kLatentDim});
    forward.lse = Tensor::contiguous(lse.data(), DataType::kFloat32, {T, H});
    forward.max_logits = Tensor::contiguous(max_logits.data(), DataType::kFloat32, {T, H});
    static_cast<AttentionInputs&>(backward) = problem.inputs();
    backward.out = forward.out;
    backward.out_residual = forward.out_residual;
    backward.lse = forward.lse;
    backward.dout = problem.dout_tensor();
    backward.dlse = problem.dlse_tensor();
    backward.dq_latent = Tensor::contiguous(dq_latent.data(), DataType::kFloat32, {T, H, kLatentDim});
    backward.dq_rope = Tensor::contiguous(dq_rope.data(), DataType::kFloat32, {T, H, kRopeDim});
    backward.dkv_latent = Tensor::contiguous(dkv_latent.data(), DataType::kFloat32, {S, kLatentDim});
    backward.dk_rope = Tensor::contiguous(dk_rope.data(), DataType::kFloat32, {S, kRopeDim});
    backward.dsink = Tensor::contiguous(dsink.data(), DataType::kFloat32, {H});
  }
  Call(const Call&) = delete;
  Call& operator=(const Call&) = delete;

  std::size_t wide, rope, rows;
  std::vector<BFloat16> out, out_residual;
  std::vector<float> lse, max_logits, dq_latent, dq_rope, dkv_latent, dk_rope, dsink;
  ForwardArguments forward;
  BackwardArguments backward;
};

}  // namespace sparsemla::capi_test
