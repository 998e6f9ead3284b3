// AMX bf16 tile products, and the packing they need. Plain functions over raw memory: amx.cpp is compiled with
// processor flags of its own, so nothing inline may be shared with it. All extents are multiples of 32.
//
// Arithmetic: products of bf16 pairs are added to fp32 with round to nearest; subnormal inputs count as zero and
// subnormal results are flushed.
#pragma once

#include <cstdint>

namespace sparsemla::cpu::amx {

/// Whether this processor and kernel have AMX bf16 and AVX-512 bf16; asks the kernel for the tile state on first use.
[[nodiscard]] bool available() noexcept;

/// Must stand before the first product of a thread; release after its last.
void configure_thread() noexcept;
void release_thread() noexcept;

/// Which part of an fp32 value becomes the bf16: the value rounded, or what that rounding left, rounded.
enum class Part : std::uint8_t { kHigh, kLow };

/// c[m, n] (+)= a[m, k] * b[k, n]. a: bf16, row stride lda. b: as pack_right* makes it. c: fp32, row stride ldc.
void multiply(const std::uint16_t* a, std::int64_t lda, const std::uint16_t* b, std::int64_t m, std::int64_t n,
              std::int64_t k, float* c, std::int64_t ldc, bool accumulate) noexcept;

/// Right operand from rows[k, n], row stride ld: 16-column panels of [k/2][16][2].
void pack_right(const std::uint16_t* rows, std::int64_t ld, std::int64_t k, std::int64_t n, std::uint16_t* b) noexcept;
/// Right operand from its transpose, rows[n, k].
void pack_right_transposed(const std::uint16_t* rows, std::int64_t ld, std::int64_t k, std::int64_t n,
                           std::uint16_t* b) noexcept;
/// Left operand a[m, k] (row stride k) from weights[m, k] in fp32.
void pack_left(const float* weights, std::int64_t ld, std::int64_t m, std::int64_t k, Part part,
               std::uint16_t* a) noexcept;
/// Left operand a[m, k] (row stride k) from its transpose, weights[k, m] in fp32.
void pack_left_transposed(const float* weights, std::int64_t ld, std::int64_t m, std::int64_t k, Part part,
                          std::uint16_t* a) noexcept;

}  // namespace sparsemla::cpu::amx
