// What the validation tests share: a call in which every argument is given, and the ways of breaking it.
#pragma once

#include <gtest/gtest.h>

#include <functional>
#include <limits>
#include <string>
#include <vector>

#include "cases/cases.h"
#include "cases/run.h"
#include "sparsemla/error.h"

namespace sparsemla::validation {

inline constexpr double kInfinity = std::numeric_limits<double>::infinity();
inline constexpr DataType kAllDtypes[] = {
    DataType::kNone, DataType::kBFloat16,   DataType::kFloat16,    DataType::kFloat32, DataType::kFloat64,
    DataType::kInt8, DataType::kUInt8,      DataType::kInt16,      DataType::kInt32,   DataType::kInt64,
    DataType::kBool, DataType::kFloat8E4M3, DataType::kFloat8E5M2, DataType::kOther};

/// Packed documents, rope, lengths, sink: every optional argument is there to be broken.
inline Problem good_problem() {
  Problem problem = cases::find("layout_padded").make();
  problem.causal = true;
  return problem;
}

class Validation : public testing::Test {
 protected:
  Problem problem_ = good_problem();
  Options options_;

  void SetUp() override { good_outputs_ = cases::run_forward(problem_.inputs(), options_); }

  using BreakForward = std::function<void(ForwardArguments&, Options&)>;
  using BreakBackward = std::function<void(BackwardArguments&, Options&)>;

  /// The call is refused, naming `argument`, by forward, plan and workspace_bytes alike, before anything is written.
  void refuses_forward(const std::string& argument, const BreakForward& break_it, const std::string& found = "") {
    const cases::ForwardOutputs outputs = cases::make_forward_outputs(problem_.inputs(), true);
    ForwardArguments arguments = cases::forward_arguments(problem_.inputs(), outputs);
    Options options = options_;
    break_it(arguments, options);
    expect_error(argument, found, [&] { forward(arguments, options); });
    expect_error(argument, found, [&] { (void)plan(arguments, options); });
    expect_error(argument, found, [&] { (void)workspace_bytes(arguments, options); });
    EXPECT_TRUE(outputs.untouched()) << argument;
  }

  void refuses_backward(const std::string& argument, const BreakBackward& break_it, const std::string& found = "") {
    const cases::Gradients gradients = cases::make_gradients(problem_.inputs());
    BackwardArguments arguments = cases::backward_arguments(problem_.inputs(), good_outputs_, problem_.dout_tensor(),
                                                            problem_.dlse_tensor(), gradients);
    Options options = options_;
    break_it(arguments, options);
    expect_error(argument, found, [&] { backward(arguments, options); });
    expect_error(argument, found, [&] { (void)plan(arguments, options); });
    expect_error(argument, found, [&] { (void)workspace_bytes(arguments, options); });
    EXPECT_TRUE(gradients.untouched()) << argument;
  }

  /// Breaks one tensor of both calls.
  void refuses_input(const std::string& argument, Tensor AttentionInputs::*member,
                     const std::function<void(Tensor&)>& break_it, const std::string& found = "") {
    refuses_forward(
        argument, [&](ForwardArguments& a, Options&) { break_it(a.*member); }, found);
    refuses_backward(
        argument, [&](BackwardArguments& a, Options&) { break_it(a.*member); }, found);
  }

 private:
  static void expect_error(const std::string& argument, const std::string& found, const std::function<void()>& call) {
    try {
      call();
      ADD_FAILURE() << argument << ": not refused";
    } catch (const Error& error) {
      EXPECT_EQ(error.argument(), argument) << error.what();
      EXPECT_FALSE(error.found().empty());
      EXPECT_FALSE(error.wanted().empty());
      EXPECT_NE(error.found().find(found), std::string::npos) << error.what();
    }
  }

  cases::ForwardOutputs good_outputs_;
};

struct NamedInput {
  const char* name;
  Tensor AttentionInputs::*member;
  bool required;
  DataType dtype;
};
inline const NamedInput kInputs[] = {
    {"q_latent", &AttentionInputs::q_latent, true, DataType::kBFloat16},
    {"q_rope", &AttentionInputs::q_rope, true, DataType::kBFloat16},  // k_rope is there
    {"kv_latent", &AttentionInputs::kv_latent, true, DataType::kBFloat16},
    {"k_rope", &AttentionInputs::k_rope, true, DataType::kBFloat16},
    {"indices", &AttentionInputs::indices, true, DataType::kInt32},
    {"topk_length", &AttentionInputs::topk_length, false, DataType::kInt32},
    {"sink", &AttentionInputs::sink, false, DataType::kFloat32},
    {"cu_seqlens_q", &AttentionInputs::cu_seqlens_q, true, DataType::kInt32},
    {"cu_seqlens_k", &AttentionInputs::cu_seqlens_k, true, DataType::kInt32}};

struct NamedOutput {
  const char* name;
  Tensor ForwardArguments::*member;
  bool required;
  DataType dtype;
};
inline const NamedOutput kOutputs[] = {{"out", &ForwardArguments::out, true, DataType::kBFloat16},
                                       {"lse", &ForwardArguments::lse, false, DataType::kFloat32},
                                       {"max_logits", &ForwardArguments::max_logits, false, DataType::kFloat32},
                                       {"out_residual", &ForwardArguments::out_residual, true, DataType::kBFloat16}};

struct NamedBackward {
  const char* name;
  Tensor BackwardArguments::*member;
  bool required;
  DataType dtype;
  bool written;
  bool either;  // bf16 or fp32
};
inline const NamedBackward kBackward[] = {
    {"out", &BackwardArguments::out, true, DataType::kBFloat16, false, false},
    {"out_residual", &BackwardArguments::out_residual, true, DataType::kBFloat16, false, false},
    {"lse", &BackwardArguments::lse, true, DataType::kFloat32, false, false},
    {"dout", &BackwardArguments::dout, true, DataType::kBFloat16, false, false},
    {"dlse", &BackwardArguments::dlse, false, DataType::kFloat32, false, false},
    {"dq_latent", &BackwardArguments::dq_latent, false, DataType::kBFloat16, true, true},
    {"dq_rope", &BackwardArguments::dq_rope, false, DataType::kBFloat16, true, true},
    {"dkv_latent", &BackwardArguments::dkv_latent, false, DataType::kFloat32, true, false},
    {"dk_rope", &BackwardArguments::dk_rope, false, DataType::kFloat32, true, false},
    {"dsink", &BackwardArguments::dsink, false, DataType::kFloat32, true, false}};

/// The ways in which any tensor can be wrong. `axis` extents that other tensors fix are told apart from free ones.
inline void drop_axis(Tensor& t) { --t.rank; }
inline void add_axis(Tensor& t) {
  t.shape[t.rank] = 1;
  t.strides[t.rank] = 1;
  ++t.rank;
}
inline void nullify(Tensor& t) { t.data = nullptr; }
inline void misalign(Tensor& t) { t.data = static_cast<std::byte*>(t.data) + 1; }
inline void move_to_cuda(Tensor& t) { t.device = {DeviceType::kCuda, 0}; }
inline void make_negative(Tensor& t) { t.shape[0] = -1; }

}  // namespace sparsemla::validation
