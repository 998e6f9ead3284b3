// The C interface: every field arrives where it belongs, results are those of C++, errors name their argument.
#include "sparsemla/capi.h"

#include <gtest/gtest.h>

#include <array>
#include <cstring>
#include <functional>
#include <string>
#include <thread>

#include "sparsemla/backend.h"
#include "sparsemla/error.h"
#include "tests/capi_test_support.h"

namespace sparsemla {
namespace {

using capi_test::Call;
using capi_test::full_problem;
using capi_test::Views;

std::string last_error() { return sparsemla_last_error(); }

bool starts_with(const std::string& text, const std::string& beginning) { return text.rfind(beginning, 0) == 0; }

/// Bytes, so that NaN would equal itself and -0 would not equal 0.
template <typename T>
bool same_bytes(const std::vector<T>& a, const std::vector<T>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(T)) == 0;
}

void run_cpp(Call& call) {
  forward(call.forward);
  backward(call.backward);
}

void run_c(Call& call) {
  Views views;
  const sparsemla_forward_arguments f = views.to_c(call.forward);
  ASSERT_EQ(sparsemla_forward(&f, nullptr), SPARSEMLA_OK) << last_error();
  const sparsemla_backward_arguments b = views.to_c(call.backward);
  ASSERT_EQ(sparsemla_backward(&b, nullptr), SPARSEMLA_OK) << last_error();
}

void expect_same(const Call& a, const Call& b) {
  EXPECT_TRUE(same_bytes(a.out, b.out));
  EXPECT_TRUE(same_bytes(a.out_residual, b.out_residual));
  EXPECT_TRUE(same_bytes(a.lse, b.lse));
  EXPECT_TRUE(same_bytes(a.max_logits, b.max_logits));
  EXPECT_TRUE(same_bytes(a.dq_latent, b.dq_latent));
  EXPECT_TRUE(same_bytes(a.dq_rope, b.dq_rope));
  EXPECT_TRUE(same_bytes(a.dkv_latent, b.dkv_latent));
  EXPECT_TRUE(same_bytes(a.dk_rope, b.dk_rope));
  EXPECT_TRUE(same_bytes(a.dsink, b.dsink));
}

TEST(CApi, GivesWhatCppGives) {
  const Problem problem = full_problem();
  Call c(problem), cpp(problem);
  run_c(c);
  run_cpp(cpp);
  expect_same(c, cpp);
  EXPECT_NE(c.dq_latent, std::vector<float>(c.wide));
}

TEST(CApi, ScalarsArrive) {
  const Problem problem = full_problem();
  Call reference(problem);
  run_c(reference);

  Problem not_causal = problem;
  not_causal.causal = false;
  Call a(not_causal);
  run_c(a);
  EXPECT_FALSE(same_bytes(a.lse, reference.lse));

  Problem default_scale = problem;
  default_scale.softmax_scale.reset();
  Call b(default_scale);
  run_c(b);
  EXPECT_FALSE(same_bytes(b.lse, reference.lse));

  Call accumulating(problem);  // into ones
  accumulating.backward.accumulate_dkv = true;
  run_c(accumulating);
  EXPECT_FALSE(same_bytes(accumulating.dkv_latent, reference.dkv_latent));
  EXPECT_FALSE(same_bytes(accumulating.dk_rope, reference.dk_rope));
}

TEST(CApi, OptionalOutputsMayBeMissing) {
  const Problem problem = full_problem();
  Call call(problem);
  Views views;
  sparsemla_forward_arguments f = views.to_c(call.forward);
  f.max_logits = nullptr;
  ASSERT_EQ(sparsemla_forward(&f, nullptr), SPARSEMLA_OK) << last_error();
  EXPECT_EQ(call.max_logits, std::vector<float>(call.rows));
  sparsemla_backward_arguments b = views.to_c(call.backward);
  b.dq_latent = b.dq_rope = b.dk_rope = b.dsink = nullptr;
  ASSERT_EQ(sparsemla_backward(&b, nullptr), SPARSEMLA_OK) << last_error();
  EXPECT_EQ(call.dsink, std::vector<float>(call.dsink.size()));
}

// Each tensor field is made unreadable (refused while reading C) and then wrong (refused by the library): both must
// name it, so a field that is read into another one, or dropped, shows.
template <typename Struct>
struct Field {
  const char* name;
  const DLTensor* Struct::*member;
};

template <typename Struct>
constexpr Field<Struct> kInputFields[] = {{"q_latent", &Struct::q_latent},
                                          {"q_rope", &Struct::q_rope},
                                          {"kv_latent", &Struct::kv_latent},
                                          {"k_rope", &Struct::k_rope},
                                          {"indices", &Struct::indices},
                                          {"topk_length", &Struct::topk_length},
                                          {"sink", &Struct::sink},
                                          {"cu_seqlens_q", &Struct::cu_seqlens_q},
                                          {"cu_seqlens_k", &Struct::cu_seqlens_k},
                                          {"out", &Struct::out},
                                          {"out_residual", &Struct::out_residual},
                                          {"lse", &Struct::lse}};
constexpr Field<sparsemla_forward_arguments> kForwardFields[] = {
    {"max_logits", &sparsemla_forward_arguments::max_logits}};
constexpr Field<sparsemla_backward_arguments> kBackwardFields[] = {
    {"dout", &sparsemla_backward_arguments::dout},
    {"dlse", &sparsemla_backward_arguments::dlse},
    {"dq_latent", &sparsemla_backward_arguments::dq_latent},
    {"dq_rope", &sparsemla_backward_arguments::dq_rope},
    {"dkv_latent", &sparsemla_backward_arguments::dkv_latent},
    {"dk_rope", &sparsemla_backward_arguments::dk_rope},
    {"dsink", &sparsemla_backward_arguments::dsink}};

sparsemla_status run(const sparsemla_forward_arguments& arguments) { return sparsemla_forward(&arguments, nullptr); }
sparsemla_status run(const sparsemla_backward_arguments& arguments) { return sparsemla_backward(&arguments, nullptr); }

template <typename Struct>
void expect_refused(const Struct& whole, const Field<Struct>& field) {
  Struct arguments = whole;
  DLTensor broken = *(whole.*field.member);
  arguments.*field.member = &broken;
  broken.dtype.lanes = 2;
  EXPECT_EQ(run(arguments), SPARSEMLA_INVALID_ARGUMENT) << field.name;
  EXPECT_TRUE(starts_with(last_error(), std::string(field.name) + ": found elements of 2 lanes")) << last_error();
  broken.dtype = {6, 8, 1};
  EXPECT_EQ(run(arguments), SPARSEMLA_INVALID_ARGUMENT) << field.name;
  EXPECT_TRUE(starts_with(last_error(), std::string(field.name) + ": found bool")) << last_error();
}

TEST(CApi, EachTensorFieldIsNamedInItsErrors) {
  const Problem problem = full_problem();
  Call call(problem);
  run_cpp(call);
  Views views;
  const sparsemla_forward_arguments f = views.to_c(call.forward);
  for (const auto& field : kInputFields<sparsemla_forward_arguments>) expect_refused(f, field);
  for (const auto& field : kForwardFields) expect_refused(f, field);
  const sparsemla_backward_arguments b = views.to_c(call.backward);
  for (const auto& field : kInputFields<sparsemla_backward_arguments>) expect_refused(b, field);
  for (const auto& field : kBackwardFields) expect_refused(b, field);
}

TEST(CApi, StridesAndByteOffsetArrive) {
  Problem problem = full_problem();
  Call plain(problem);
  run_c(plain);
  // The same queries inside a wider buffer: another row stride, and a start that only byte_offset tells.
  const std::int64_t H = problem.num_heads, T = problem.num_tokens, width = 600, start = 24;
  std::vector<BFloat16> fused(static_cast<std::size_t>(T * H * width));
  for (std::int64_t row = 0; row < T * H; ++row) {
    std::memcpy(&fused[static_cast<std::size_t>(row * width + start)],
                &problem.q_latent[static_cast<std::size_t>(row * kLatentDim)], kLatentDim * sizeof(BFloat16));
  }
  std::array<std::int64_t, 3> shape{T, H, kLatentDim}, strides{H * width, width, 1};
  DLTensor q{fused.data(), {kDLCPU, 0}, 3, {kDLBfloat, 16, 1}, shape.data(), strides.data(), start * sizeof(BFloat16)};
  Call call(problem);
  Views views;
  sparsemla_forward_arguments f = views.to_c(call.forward);
  f.q_latent = &q;
  ASSERT_EQ(sparsemla_forward(&f, nullptr), SPARSEMLA_OK) << last_error();
  EXPECT_TRUE(same_bytes(call.out, plain.out));
  q.byte_offset += 1;
  EXPECT_EQ(sparsemla_forward(&f, nullptr), SPARSEMLA_INVALID_ARGUMENT);
  EXPECT_TRUE(starts_with(last_error(), "q_latent: found a misaligned address")) << last_error();
}

TEST(CApi, ErrorsBelongToTheirThread) {
  sparsemla_pipeline pipeline{};
  pipeline.struct_size = sizeof pipeline;
  ASSERT_EQ(sparsemla_pipeline_parse("nonsense", &pipeline), SPARSEMLA_INVALID_ARGUMENT);
  const std::string here = last_error();
  EXPECT_NE(here, "");
  std::thread([&] {
    EXPECT_EQ(last_error(), "");
    sparsemla_pipeline other{};
    EXPECT_EQ(sparsemla_pipeline_parse("exact", &other), SPARSEMLA_INVALID_ARGUMENT);
    EXPECT_TRUE(starts_with(last_error(), "pipeline.struct_size:"));
  }).join();
  EXPECT_EQ(last_error(), here);
  ASSERT_EQ(sparsemla_pipeline_parse("exact", &pipeline), SPARSEMLA_OK);
  EXPECT_EQ(last_error(), here) << "a call that succeeds leaves the message";
}

TEST(CApi, LongMessagesAreCut) {
  const Problem problem = full_problem();
  Call call(problem);
  Views views;
  const sparsemla_forward_arguments f = views.to_c(call.forward);
  const std::string name(5000, 'x');
  sparsemla_options options{};
  options.struct_size = sizeof options;
  options.backend = name.c_str();
  EXPECT_EQ(sparsemla_forward(&f, &options), SPARSEMLA_INVALID_ARGUMENT);
  EXPECT_EQ(last_error().size(), 1023U);
}

TEST(CApi, VersionIsTheLibrarys) { EXPECT_STREQ(sparsemla_version(), version()); }

}  // namespace
}  // namespace sparsemla
