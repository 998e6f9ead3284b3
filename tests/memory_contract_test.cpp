// What a call may read and write: views between canaries, gradients left out or accumulated, offsets beyond 32 bits.
#include <gtest/gtest.h>
#include <sys/mman.h>

#include <cstring>

#include "cases/conformance.h"
#include "device/device.h"
#include "sparsemla/error.h"

namespace sparsemla {
namespace {

using cases::differences;
using cases::find;
using cases::Gradients;
using cases::OwnedTensor;
using cases::packed_bytes;
using cases::packed_values;
using cases::Results;
using cases::run;

class MemoryContract : public testing::TestWithParam<CpuEngine> {
 protected:
  [[nodiscard]] static Options options() {
    Options result;
    result.cpu_engine = GetParam();
    return result;
  }
};

TEST_P(MemoryContract, DqMayBeTwoViewsOfOneFusedTensor) {
  const Problem problem = find("heads_24").make();
  const Results apart = run(problem, options());
  const OwnedTensor fused(DataType::kBFloat16, {problem.num_tokens + 2, problem.num_heads, kLatentDim + kRopeDim});
  Tensor middle = fused.tensor();  // a canary token before and after
  middle.data = static_cast<BFloat16*>(middle.data) + middle.strides[0];
  middle.shape[0] = problem.num_tokens;
  auto arguments = cases::backward_arguments(problem.inputs(), apart.forward, problem.dout_tensor(), {}, {});
  arguments.dq_latent = middle.columns(0, kLatentDim);
  arguments.dq_rope = middle.columns(kLatentDim, kLatentDim + kRopeDim);
  backward(arguments, options());
  EXPECT_EQ(packed_bytes(arguments.dq_latent), apart.gradients.dq_latent.bytes());
  EXPECT_EQ(packed_bytes(arguments.dq_rope), apart.gradients.dq_rope.bytes());
  Tensor canary = middle;
  canary.shape[0] = 1;
  for (const std::int64_t token : {std::int64_t{-1}, problem.num_tokens}) {
    canary.data = static_cast<BFloat16*>(middle.data) + token * middle.strides[0];
    for (const std::byte b : packed_bytes(canary)) ASSERT_EQ(b, std::byte{0xA5});
  }
}

TEST_P(MemoryContract, EachGradientMayBeLeftOut) {
  const Problem problem = find("dlse_and_sink").make();
  const Results all = run(problem, options());
  using Member = OwnedTensor Gradients::*;
  const std::vector<Member> members = {&Gradients::dq_latent, &Gradients::dq_rope, &Gradients::dkv_latent,
                                       &Gradients::dk_rope, &Gradients::dsink};
  for (unsigned given = 1; given < 32; ++given) {
    Gradients some = cases::make_gradients(problem.inputs());
    for (std::size_t i = 0; i < members.size(); ++i) {
      if ((given >> i & 1U) == 0) some.*members[i] = OwnedTensor();
    }
    backward(
        cases::backward_arguments(problem.inputs(), all.forward, problem.dout_tensor(), problem.dlse_tensor(), some),
        options());
    for (std::size_t i = 0; i < members.size(); ++i) {
      if ((given >> i & 1U) == 0) continue;
      EXPECT_EQ((some.*members[i]).bytes(), (all.gradients.*members[i]).bytes()) << "subset " << given << " part " << i;
    }
    EXPECT_TRUE(some.gaps_untouched());
  }
}

TEST_P(MemoryContract, LseAndMaxLogitsMayBeLeftOut) {
  const Problem problem = find("dlse_and_sink").make();
  const auto all = cases::run_forward(problem.inputs(), options());
  for (const bool lse : {false, true}) {
    cases::ForwardOutputs some = cases::make_forward_outputs(problem.inputs(), true);
    (lse ? some.lse : some.max_logits) = OwnedTensor();
    forward(cases::forward_arguments(problem.inputs(), some), options());
    EXPECT_EQ(differences(all, some), lse ? "lse" : "max_logits");  // given on one side only
  }
}

TEST_P(MemoryContract, OverwriteClearsRowsThatNobodySelected) {
  const Problem problem = find("unreferenced_numbers").make();
  const Results results = run(problem, options());
  std::vector<bool> selected(static_cast<std::size_t>(problem.num_keys), false);
  for (const std::int32_t key : problem.indices) selected[static_cast<std::size_t>(key)] = true;
  const std::vector<double> dkv = packed_values(results.gradients.dkv_latent.tensor());
  const std::vector<double> dk = packed_values(results.gradients.dk_rope.tensor());
  for (std::int64_t key = 0; key < problem.num_keys; ++key) {
    double sum = 0;
    for (std::int64_t d = 0; d < kLatentDim; ++d) sum += std::abs(dkv[key * kLatentDim + d]);
    for (std::int64_t d = 0; d < kRopeDim; ++d) sum += std::abs(dk[key * kRopeDim + d]);
    EXPECT_EQ(sum == 0, !selected[static_cast<std::size_t>(key)]) << key;
  }
}

TEST_P(MemoryContract, AccumulateAddsToWhatIsThere) {
  const Problem problem = find("dlse_and_sink").make();
  const Results fresh = run(problem, options());
  for (const float start : {0.0F, 8.0F}) {
    const Gradients gradients = cases::make_gradients(problem.inputs());
    const Tensor dkv = gradients.dkv_latent.tensor();
    const Tensor dk = gradients.dk_rope.tensor();
    std::fill_n(static_cast<float*>(dkv.data), dkv.num_elements(), start);
    std::fill_n(static_cast<float*>(dk.data), dk.num_elements(), start);
    auto arguments = cases::backward_arguments(problem.inputs(), fresh.forward, problem.dout_tensor(),
                                               problem.dlse_tensor(), gradients);
    arguments.accumulate_dkv = true;
    backward(arguments, options());
    const auto added = packed_values(dkv);
    const auto added_rope = packed_values(dk);
    const auto alone = packed_values(fresh.gradients.dkv_latent.tensor());
    const auto alone_rope = packed_values(fresh.gradients.dk_rope.tensor());
    const double rounding = start == 0.0F ? 0.0 : 40 * 0x1p-21;  // 36 tokens x heads add into numbers near 8
    for (std::size_t i = 0; i < added.size(); ++i) ASSERT_NEAR(added[i], alone[i] + start, rounding);
    for (std::size_t i = 0; i < added_rope.size(); ++i) ASSERT_NEAR(added_rope[i], alone_rope[i] + start, rounding);
    EXPECT_EQ(gradients.dq_latent.bytes(), fresh.gradients.dq_latent.bytes());  // these are never added into
    EXPECT_EQ(gradients.dsink.bytes(), fresh.gradients.dsink.bytes());
  }
}

TEST_P(MemoryContract, AccumulateNeverTouchesRowsThatNobodySelected) {
  const Problem problem = find("bad_indices").make();  // keys 1 and 3 of 4 are not selected
  const Results fresh = run(problem, options());
  const Gradients gradients =
      cases::make_gradients(problem.inputs(), DataType::kBFloat16, cases::Layout::kContiguous, 0xFF);
  auto arguments = cases::backward_arguments(problem.inputs(), fresh.forward, problem.dout_tensor(), {}, gradients);
  arguments.accumulate_dkv = true;
  backward(arguments, options());
  const std::vector<std::byte> dkv = gradients.dkv_latent.bytes();
  for (const std::size_t key : {std::size_t{1}, std::size_t{3}}) {
    for (std::size_t b = key * 2048; b < (key + 1) * 2048; ++b) ASSERT_EQ(dkv[b], std::byte{0xFF}) << key;
  }
}

TEST_P(MemoryContract, NoTokensStillClearTheKeyGradients) {
  const Problem problem = find("no_tokens").make();
  const Results results = run(problem, options());
  ASSERT_EQ(results.gradients.dkv_latent.bytes().size(), 5U * 2048);
  for (const double x : packed_values(results.gradients.dkv_latent.tensor())) EXPECT_EQ(x, 0.0);
  for (const double x : packed_values(results.gradients.dk_rope.tensor())) EXPECT_EQ(x, 0.0);
}

TEST_P(MemoryContract, InputsStayAsTheyAre) {
  const Problem problem = find("index_soup_1").make();
  Problem copy = problem;
  (void)run(copy, options());
  EXPECT_EQ(copy.q_latent, problem.q_latent);
  EXPECT_EQ(copy.q_rope, problem.q_rope);
  EXPECT_EQ(copy.kv_latent, problem.kv_latent);
  EXPECT_EQ(copy.k_rope, problem.k_rope);
  EXPECT_EQ(copy.indices, problem.indices);
  EXPECT_EQ(copy.dout, problem.dout);
}

/// Address space without memory behind it: pages appear, zeroed, where they are touched.
class SparseMemory {
 public:
  explicit SparseMemory(std::int64_t bytes)
      : bytes_(static_cast<std::size_t>(bytes)),
        data_(mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0)) {}
  SparseMemory(const SparseMemory&) = delete;
  SparseMemory& operator=(const SparseMemory&) = delete;
  ~SparseMemory() {
    if (ok()) munmap(data_, bytes_);
  }
  [[nodiscard]] bool ok() const { return data_ != MAP_FAILED; }
  [[nodiscard]] void* data() const { return data_; }

 private:
  std::size_t bytes_;
  void* data_;
};

/// `like`, but its rows (along axis 0) `pitch` elements apart in sparse memory.
Tensor spread(const Tensor& like, const SparseMemory& memory, std::int64_t pitch) {
  Tensor view = like;
  view.data = memory.data();
  view.strides[0] = pitch;
  return view;
}

void copy_rows(const Tensor& to, const Tensor& from) {
  const std::vector<std::byte> bytes = packed_bytes(from);
  if (from.shape[0] == 0) return;
  const std::size_t row = bytes.size() / static_cast<std::size_t>(from.shape[0]);
  for (std::int64_t i = 0; i < from.shape[0]; ++i) {
    std::memcpy(static_cast<std::byte*>(to.data) + i * to.strides[0] * size_bytes(to.dtype), bytes.data() + i * row,
                row);
  }
}

TEST_P(MemoryContract, OffsetsBeyond32Bits) {
  const Problem problem = find("no_rope").make();  // 150 keys, 6 tokens
  const Results compact = run(problem, options());
  // The last key stands 2.3e9 elements (4.7e9 bytes) in, the last token 2.6e9.
  constexpr std::int64_t kKeyPitch = (std::int64_t{1} << 24) - 8;
  constexpr std::int64_t kTokenPitch = std::int64_t{1} << 29;
  const SparseMemory keys(150 * kKeyPitch * 2), queries(6 * kTokenPitch * 2), out(6 * kTokenPitch * 2),
      residual(6 * kTokenPitch * 2), douts(6 * kTokenPitch * 2), dq(6 * kTokenPitch * 2), dkv(150 * kKeyPitch * 4),
      lists(6 * kTokenPitch * 4);
  for (const SparseMemory* memory : {&keys, &queries, &out, &residual, &douts, &dq, &dkv, &lists}) {
    if (!memory->ok()) GTEST_SKIP() << "no address space";
  }
  auto forward_call = cases::forward_arguments(problem.inputs(), compact.forward);
  forward_call.kv_latent = spread(forward_call.kv_latent, keys, kKeyPitch);
  forward_call.q_latent = spread(forward_call.q_latent, queries, kTokenPitch);
  forward_call.indices = spread(forward_call.indices, lists, kTokenPitch);
  copy_rows(forward_call.kv_latent, problem.inputs().kv_latent);
  copy_rows(forward_call.q_latent, problem.inputs().q_latent);
  copy_rows(forward_call.indices, problem.inputs().indices);
  const std::vector<std::byte> expected_out = compact.forward.out.bytes();
  const std::vector<std::byte> expected_residual = compact.forward.out_residual.bytes();
  forward_call.out = spread(forward_call.out, out, kTokenPitch);
  forward_call.out_residual = spread(forward_call.out_residual, residual, kTokenPitch);
  forward(forward_call, options());
  EXPECT_EQ(packed_bytes(forward_call.out), expected_out);
  EXPECT_EQ(packed_bytes(forward_call.out_residual), expected_residual);

  BackwardArguments backward_call =
      cases::backward_arguments(forward_call, compact.forward, problem.dout_tensor(), {}, compact.gradients);
  const std::vector<std::byte> expected_dq = compact.gradients.dq_latent.bytes();
  const std::vector<std::byte> expected_dkv = compact.gradients.dkv_latent.bytes();
  backward_call.out = forward_call.out;
  backward_call.out_residual = forward_call.out_residual;
  backward_call.dout = spread(backward_call.dout, douts, kTokenPitch);
  copy_rows(backward_call.dout, problem.dout_tensor());
  backward_call.dq_latent = spread(backward_call.dq_latent, dq, kTokenPitch);
  backward_call.dkv_latent = spread(backward_call.dkv_latent, dkv, kKeyPitch);
  backward(backward_call, options());
  EXPECT_EQ(packed_bytes(backward_call.dq_latent), expected_dq);
  EXPECT_EQ(packed_bytes(backward_call.dkv_latent), expected_dkv);
}

TEST(DeviceRun, WithoutADeviceIsRefusedAndNeverDoneOnTheCpu) {
  if (device::count() > 0) GTEST_SKIP() << "this machine has a device";
  const Problem problem = find("heads_3").make();
  Options options;
  options.backend = cases::kDeviceBackend;
  cases::ForwardOutputs outputs = cases::make_forward_outputs(problem.inputs(), true);
  EXPECT_THROW(cases::run_forward_into(outputs, problem.inputs(), options), Error);
  EXPECT_TRUE(outputs.untouched());
}

INSTANTIATE_TEST_SUITE_P(Engines, MemoryContract, testing::ValuesIn(cases::engines()),
                         [](const auto& test) { return std::string(cases::to_string(test.param)); });

}  // namespace
}  // namespace sparsemla
