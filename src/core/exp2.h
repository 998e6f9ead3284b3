// 2^x in fp32, the same bits on every path of the CPU backend, written so that loops over it vectorise.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>

namespace sparsemla {

/// a*b + c with one rounding where the processor has it; two roundings elsewhere (libm's emulation would be far
/// slower).
inline float fused_multiply_add(float a, float b, float c) noexcept {
#if defined(__FMA__) || defined(__ARM_FEATURE_FMA)
  return std::fma(a, b, c);
#else
  return a * b + c;
#endif
}

/// 2^x with a relative error below 1.2e-7 (6e-6 above x = 127, where the polynomial is stretched). exp2_fp32(0) is
/// exactly 1. Results below 2^-125.5 are 0 (as the GPU's ex2 with flush-to-zero gives, a little earlier); x >= 128
/// gives inf, -inf gives 0, NaN gives NaN.
inline float exp2_fp32(float x) noexcept {
  const float clamped =
      x > 127.0F ? 127.0F : (x >= -126.0F ? x : -126.0F);  // NaN too: the conversion to int must be defined
  const float whole = std::nearbyint(clamped);
  const float fraction = (x > 127.0F ? (x > 128.0F ? 1.0F : x - 127.0F) : clamped - whole);
  // Minimax on [-1/2, 1/2] with the constant term held at 1: relative error 2e-9 before rounding.
  float value = 1.5353362e-4F;
  value = fused_multiply_add(value, fraction, 1.3398874e-3F);
  value = fused_multiply_add(value, fraction, 9.618437e-3F);
  value = fused_multiply_add(value, fraction, 5.5503324e-2F);
  value = fused_multiply_add(value, fraction, 2.4022651e-1F);
  value = fused_multiply_add(value, fraction, 6.9314718e-1F);
  value = fused_multiply_add(value, fraction, 1.0F);
  const float power = std::bit_cast<float>((static_cast<std::int32_t>(whole) + 127) << 23);
  float result = value * power;
  result = x < -125.5F ? 0.0F : result;
  result = x >= 128.0F ? std::numeric_limits<float>::infinity() : result;
  return x != x ? x : result;
}

}  // namespace sparsemla
