// Every rejection of a tensor: the argument it names, and that nothing was written. Each call differs from a good one
// in one thing.
#include <cmath>

#include "validation_fixture.h"

namespace sparsemla::validation {
namespace {

TEST_F(Validation, TheGoodCallIsAccepted) {
  const cases::ForwardOutputs outputs = cases::run_forward(problem_.inputs(), options_);
  const auto gradients =
      cases::run_backward(problem_.inputs(), outputs, problem_.dout_tensor(), problem_.dlse_tensor(), options_);
  EXPECT_FALSE(outputs.untouched());
  EXPECT_FALSE(gradients.untouched());
}

TEST_F(Validation, InputsOfTheWrongRankShapeOrPlace) {
  for (const NamedInput& input : kInputs) {
    for (const auto& break_it : {drop_axis, add_axis, nullify, misalign, make_negative}) {
      refuses_input(input.name, input.member, break_it);
    }
    if (input.required)
      refuses_input(
          input.name, input.member, [](Tensor& t) { t = Tensor{}; }, "nothing");
    if (input.member == &AttentionInputs::q_latent) continue;  // it sets the device and T and H for the others
    refuses_input(input.name, input.member, move_to_cuda, "cuda:0");
  }
  for (const auto& [name, member, axis] :
       {std::tuple{"q_latent", &AttentionInputs::q_latent, 2}, std::tuple{"q_rope", &AttentionInputs::q_rope, 0},
        std::tuple{"q_rope", &AttentionInputs::q_rope, 1}, std::tuple{"q_rope", &AttentionInputs::q_rope, 2},
        std::tuple{"kv_latent", &AttentionInputs::kv_latent, 1}, std::tuple{"k_rope", &AttentionInputs::k_rope, 0},
        std::tuple{"k_rope", &AttentionInputs::k_rope, 1}, std::tuple{"indices", &AttentionInputs::indices, 0},
        std::tuple{"topk_length", &AttentionInputs::topk_length, 0}, std::tuple{"sink", &AttentionInputs::sink, 0},
        std::tuple{"cu_seqlens_k", &AttentionInputs::cu_seqlens_k, 0}}) {
    for (const int change : {-1, 1}) {
      refuses_input(name, member, [axis, change](Tensor& t) { t.shape[axis] += change; });
    }
  }
}

TEST_F(Validation, InputsOfTheWrongDtypeAreNamed) {
  for (const NamedInput& input : kInputs) {
    for (const DataType dtype : kAllDtypes) {
      if (dtype == input.dtype || (dtype == DataType::kNone && !input.required)) continue;
      const std::string name(dtype == DataType::kNone ? "nothing" : to_string(dtype));
      refuses_input(
          input.name, input.member, [dtype](Tensor& t) { t.dtype = dtype; }, name);
    }
  }
}

TEST_F(Validation, ForwardOutputs) {
  for (const NamedOutput& output : kOutputs) {
    const auto refuses = [&](const std::function<void(Tensor&)>& break_it, const std::string& found = "") {
      refuses_forward(
          output.name, [&](ForwardArguments& a, Options&) { break_it(a.*output.member); }, found);
    };
    for (const auto& break_it : {drop_axis, add_axis, nullify, misalign, make_negative}) refuses(break_it);
    refuses(move_to_cuda, "cuda:0");
    if (output.required) refuses([](Tensor& t) { t = Tensor{}; }, "nothing");
    for (const DataType dtype : kAllDtypes) {
      if (dtype == output.dtype || dtype == DataType::kNone) continue;
      refuses([dtype](Tensor& t) { t.dtype = dtype; }, std::string(to_string(dtype)));
    }
    const int rank = output.dtype == DataType::kBFloat16 ? 3 : 2;
    for (int axis = 0; axis < rank; ++axis) {
      refuses([axis](Tensor& t) { ++t.shape[axis]; });
      refuses([axis](Tensor& t) { --t.shape[axis]; });
      refuses([axis](Tensor& t) { t.strides[axis] = 0; }, "strides");
    }
    refuses([](Tensor& t) { t.strides[0] = t.strides[1]; }, "strides");  // tokens on top of heads
    refuses([](Tensor& t) { t.strides[0] = -t.strides[1]; }, "strides");
  }
}

TEST_F(Validation, BackwardTensors) {
  for (const NamedBackward& tensor : kBackward) {
    const auto refuses = [&](const std::function<void(Tensor&)>& break_it, const std::string& found = "") {
      refuses_backward(
          tensor.name, [&](BackwardArguments& a, Options&) { break_it(a.*tensor.member); }, found);
    };
    for (const auto& break_it : {drop_axis, add_axis, nullify, misalign, make_negative}) refuses(break_it);
    refuses(move_to_cuda, "cuda:0");
    if (tensor.required) refuses([](Tensor& t) { t = Tensor{}; }, "nothing");
    for (const DataType dtype : kAllDtypes) {
      if (dtype == tensor.dtype || dtype == DataType::kNone || (tensor.either && dtype == DataType::kFloat32)) continue;
      refuses([dtype](Tensor& t) { t.dtype = dtype; }, std::string(to_string(dtype)));
    }
    refuses([](Tensor& t) { ++t.shape[0]; });
    refuses([](Tensor& t) { --t.shape[0]; });
    refuses([](Tensor& t) { ++t.shape[t.rank - 1]; });
    if (tensor.written) refuses([](Tensor& t) { t.strides[0] = 0; }, "strides");
  }
}

TEST_F(Validation, ReadTensorsMayRepeatByStrideZero) {
  const cases::ForwardOutputs outputs = cases::make_forward_outputs(problem_.inputs(), true);
  ForwardArguments arguments = cases::forward_arguments(problem_.inputs(), outputs);
  arguments.q_latent.strides[0] = 0;
  arguments.kv_latent.strides[0] = 0;
  EXPECT_NO_THROW(forward(arguments, options_));
}

TEST_F(Validation, TensorsWithoutElementsMayBeNull) {
  const Problem empty = cases::find("nothing").make();
  ForwardArguments arguments =
      cases::forward_arguments(empty.inputs(), cases::make_forward_outputs(empty.inputs(), true));
  for (Tensor* t : {&arguments.q_latent, &arguments.kv_latent, &arguments.q_rope, &arguments.k_rope, &arguments.indices,
                    &arguments.out, &arguments.lse, &arguments.max_logits, &arguments.out_residual}) {
    t->data = nullptr;
  }
  EXPECT_NO_THROW(forward(arguments, options_));
}

TEST_F(Validation, Heads) {
  for (const std::int64_t heads : {0, 257, 1000}) {
    refuses_input(
        "q_latent", &AttentionInputs::q_latent, [heads](Tensor& t) { t.shape[1] = heads; }, std::to_string(heads));
  }
}

TEST_F(Validation, RopeComesInPairs) {
  refuses_input(
      "k_rope", &AttentionInputs::k_rope, [](Tensor& t) { t = Tensor{}; }, "nothing");
  refuses_input(
      "q_rope", &AttentionInputs::q_rope, [](Tensor& t) { t = Tensor{}; }, "nothing");
  const auto without_rope = [](BackwardArguments& a) { a.q_rope = a.k_rope = Tensor{}; };
  refuses_backward("dq_rope", [&](BackwardArguments& a, Options&) {
    without_rope(a);
    a.dk_rope = Tensor{};
  });
  refuses_backward("dk_rope", [&](BackwardArguments& a, Options&) {
    without_rope(a);
    a.dq_rope = Tensor{};
  });
}

TEST_F(Validation, DocumentOffsets) {
  using Values = std::vector<std::int32_t>;
  const auto refuses = [&](const char* name, Tensor AttentionInputs::*member, const Values& values) {
    refuses_input(name, member, [&](Tensor& t) {
      t = Tensor::contiguous(values.data(), DataType::kInt32, {static_cast<std::int64_t>(values.size())});
    });
  };
  // T = 5, S = 90, two documents.
  for (const Values& values : {Values{0, 3, 2}, Values{0, -1, 5}, Values{1, 2, 5}, Values{-1, 2, 5}, Values{0, 2, 6},
                               Values{0, 2, std::numeric_limits<std::int32_t>::max()},
                               Values{0, std::numeric_limits<std::int32_t>::min(), 5}}) {
    refuses("cu_seqlens_q", &AttentionInputs::cu_seqlens_q, values);
  }
  for (const Values& values : {Values{0, 45, 44}, Values{0, -1, 90}, Values{1, 45, 90}, Values{0, 45, 91}}) {
    refuses("cu_seqlens_k", &AttentionInputs::cu_seqlens_k, values);
  }
  const Values none;
  refuses_input("cu_seqlens_q", &AttentionInputs::cu_seqlens_q,
                [&](Tensor& t) { t = Tensor::contiguous(none.data(), DataType::kInt32, {0}); });
}

TEST_F(Validation, SoftmaxScale) {
  for (const double scale : {kInfinity, -kInfinity, std::nan(""), 1e300, 3.4e38, -2.4e38}) {
    refuses_forward("softmax_scale", [scale](ForwardArguments& a, Options&) { a.softmax_scale = scale; });
    refuses_backward("softmax_scale", [scale](BackwardArguments& a, Options&) { a.softmax_scale = scale; });
  }
}

TEST_F(Validation, ResidualAndPipelineMustAgree) {
  refuses_forward(
      "out_residual", [](ForwardArguments& a, Options&) { a.out_residual = Tensor{}; }, "nothing");
  refuses_backward(
      "out_residual", [](BackwardArguments& a, Options&) { a.out_residual = Tensor{}; }, "nothing");
  refuses_forward("out_residual", [](ForwardArguments&, Options& o) { o.pipeline = Pipeline::lazy_inference(); });
  refuses_backward("out_residual", [](BackwardArguments&, Options& o) { o.pipeline = Pipeline::lazy_inference(); });
}

TEST_F(Validation, GradientsWithoutTheirInput) {
  refuses_backward("dsink", [](BackwardArguments& a, Options&) { a.sink = Tensor{}; });
  refuses_backward("gradients", [](BackwardArguments& a, Options&) {
    a.dq_latent = a.dq_rope = a.dkv_latent = a.dk_rope = a.dsink = Tensor{};
  });
}

}  // namespace
}  // namespace sparsemla::validation
