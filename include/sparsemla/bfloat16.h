// bfloat16 storage and its two conversions.
#pragma once

#include <bit>
#include <cstdint>

namespace sparsemla {

/// A bfloat16 value as memory holds it: the upper half of an IEEE-754 binary32.
struct BFloat16 {
  std::uint16_t bits = 0;

  friend constexpr bool operator==(BFloat16, BFloat16) = default;  // compares bit patterns, so NaN == NaN and +0 != -0
};

/// Exact.
[[nodiscard]] constexpr float to_float(BFloat16 value) noexcept {
  return std::bit_cast<float>(static_cast<std::uint32_t>(value.bits) << 16);
}

/// Round to nearest, ties to even; overflow goes to infinity; NaN stays NaN (made quiet, payload truncated).
/// Written without branches so that loops over it vectorise.
[[nodiscard]] constexpr BFloat16 to_bfloat16(float value) noexcept {
  const auto bits = std::bit_cast<std::uint32_t>(value);
  const std::uint32_t rounded = (bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16;
  const std::uint32_t quiet_nan = (bits >> 16) | 0x40u;
  return {static_cast<std::uint16_t>((bits & 0x7FFFFFFFu) > 0x7F800000u ? quiet_nan : rounded)};
}

}  // namespace sparsemla
