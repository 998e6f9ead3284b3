// A user's program: one forward through the installed library, checked by hand. With q = 0 every selected key weighs
// the same, so out is the mean of the selected rows and lse the log of their number.
#include <sparsemla/attention.h>
#include <sparsemla/bfloat16.h>
#include <sparsemla/capi.h>
#include <sparsemla/dlpack.h>
#include <sparsemla/error.h>
#include <sparsemla/numerics.h>

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <string>
#include <vector>

using namespace sparsemla;

namespace {

struct Result {
  std::vector<BFloat16> out;
  std::vector<float> lse;
};

Result attend(const std::vector<BFloat16>& q, const std::vector<BFloat16>& kv, const std::vector<std::int32_t>& indices,
              std::int64_t T, std::int64_t S, std::int64_t H, std::int64_t W) {
  std::vector<BFloat16> out(q.size());
  std::vector<float> lse(static_cast<std::size_t>(T * H));
  // [readme]
  ForwardArguments call;
  call.q_latent = Tensor::contiguous(q.data(), DataType::kBFloat16, {T, H, 512});
  call.kv_latent = Tensor::contiguous(kv.data(), DataType::kBFloat16, {S, 512});
  call.indices = Tensor::contiguous(indices.data(), DataType::kInt32, {T, W});
  call.out = Tensor::contiguous(out.data(), DataType::kBFloat16, {T, H, 512});
  call.lse = Tensor::contiguous(lse.data(), DataType::kFloat32, {T, H});
  call.softmax_scale = 0.125;
  Options options;
  options.purpose = Purpose::kInference;  // training also wants call.out_residual
  forward(call, options);
  // [readme]
  return {out, lse};
}

int failures = 0;

void expect(bool holds, const char* what) {
  if (!holds) {
    std::printf("FAILED: %s\n", what);
    ++failures;
  }
}

}  // namespace

int main() {
  constexpr std::int64_t T = 2, S = 4, H = 3, W = 5;
  std::vector<BFloat16> q(T * H * 512);  // zeros
  std::vector<BFloat16> kv(S * 512);     // row i holds the number 2^i
  for (std::int64_t i = 0; i < S * 512; ++i)
    kv[static_cast<std::size_t>(i)] = to_bfloat16(static_cast<float>(1 << (i / 512)));
  // Token 0 selects rows 0 and 2, each twice, and an empty slot; token 1 selects row 3 alone.
  const std::vector<std::int32_t> indices = {0, 2, -1, 2, 0, 3, -1, -1, -1, 99};
  const Result result = attend(q, kv, indices, T, S, H, W);

  for (std::size_t i = 0; i < result.out.size(); ++i) {
    const float wanted = i < H * 512 ? 2.5F : 8.0F;
    if (to_float(result.out[i]) != wanted) {
      expect(false, "out is the mean of the selected rows");
      break;
    }
  }
  for (std::size_t i = 0; i < result.lse.size(); ++i) {
    expect(std::fabs(result.lse[i] - (i < H ? std::log(4.0F) : 0.0F)) < 1e-6F, "lse is the log of the number of keys");
  }

  Tensor view = Tensor::contiguous(result.lse.data(), DataType::kFloat32, {T, H});
  expect(rel_l2(view, view) == 0.0, "the metrics are in the installed library");
  expect(from_dlpack(to_dlpack(view)).data == view.data, "DLPack views are in the installed library");
  expect(std::string(sparsemla_version()).find('.') != std::string::npos,
         "the C interface is in the installed library");
  try {
    forward(ForwardArguments{});
    expect(false, "a call without arguments throws");
  } catch (const Error& error) {
    expect(error.argument() == "q_latent", "the error names the argument");
  }
  if (failures == 0) std::puts("consumer: out, lse and errors as expected");
  return failures == 0 ? 0 : 1;
}
