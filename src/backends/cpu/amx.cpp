#include "backends/cpu/amx.h"

#if defined(__x86_64__) && defined(__linux__)
#define SPARSEMLA_AMX 1
#include <cpuid.h>
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace sparsemla::cpu::amx {

#if SPARSEMLA_AMX
namespace {

bool processor_has_it() noexcept {
  unsigned a = 0;
  unsigned b = 0;
  unsigned c = 0;
  unsigned d = 0;
  if (__get_cpuid(1, &a, &b, &c, &d) == 0 || (c & (1U << 27)) == 0) return false;  // OSXSAVE
  unsigned low = 0;
  unsigned high = 0;
  __asm__("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  constexpr unsigned kAvx512State = 0xE6;
  constexpr unsigned kTileState = 3U << 17;
  if ((low & (kAvx512State | kTileState)) != (kAvx512State | kTileState)) return false;
  if (__get_cpuid_count(7, 0, &a, &b, &c, &d) == 0) return false;
  const bool avx512 = (b & (1U << 16)) != 0 && (b & (1U << 30)) != 0 && (b & (1U << 31)) != 0;  // F, BW, VL
  const bool amx = (d & (1U << 22)) != 0 && (d & (1U << 24)) != 0;                              // BF16, TILE
  if (__get_cpuid_count(7, 1, &a, &b, &c, &d) == 0) return false;
  return avx512 && amx && (a & (1U << 5)) != 0;  // AVX512_BF16
}

bool kernel_grants_it() noexcept {
  constexpr long kRequestPermission = 0x1023;  // ARCH_REQ_XCOMP_PERM
  constexpr long kTileData = 18;
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}

struct alignas(64) TileConfig {
  std::uint8_t palette = 1;
  std::uint8_t start_row = 0;
  std::uint8_t reserved[14] = {};
  std::uint16_t column_bytes[16] = {};
  std::uint8_t rows[16] = {};
};

inline __m512i round_to_bf16(__m512 value) noexcept {  // 16 values, each in the low half of a dword
  return _mm512_cvtepu16_epi32(reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(value)));
}

inline __m512 part_of(__m512 value, Part part) noexcept {
  if (part == Part::kHigh) return value;
  const __m512 high = _mm512_castsi512_ps(_mm512_slli_epi32(round_to_bf16(value), 16));
  return _mm512_sub_ps(value, high);
}

/// rows[i] dword j  <->  rows[j] dword i.
inline void transpose_dwords(__m512i* rows) noexcept {
  __m512i t[16];
  for (int i = 0; i < 8; ++i) {
    t[2 * i] = _mm512_unpacklo_epi32(rows[2 * i], rows[2 * i + 1]);
    t[2 * i + 1] = _mm512_unpackhi_epi32(rows[2 * i], rows[2 * i + 1]);
  }
  __m512i q[16];  // q[4i+j] holds, in its 128-bit lane l, column 4l+j of rows 4i..4i+3
  for (int i = 0; i < 16; i += 4) {
    q[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]);
    q[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
    q[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]);
    q[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
  }
  for (int j = 0; j < 4; ++j) {
    const __m512i even_low = _mm512_shuffle_i32x4(q[j], q[4 + j], 0x88);
    const __m512i even_high = _mm512_shuffle_i32x4(q[8 + j], q[12 + j], 0x88);
    const __m512i odd_low = _mm512_shuffle_i32x4(q[j], q[4 + j], 0xDD);
    const __m512i odd_high = _mm512_shuffle_i32x4(q[8 + j], q[12 + j], 0xDD);
    rows[j] = _mm512_shuffle_i32x4(even_low, even_high, 0x88);
    rows[8 + j] = _mm512_shuffle_i32x4(even_low, even_high, 0xDD);
    rows[4 + j] = _mm512_shuffle_i32x4(odd_low, odd_high, 0x88);
    rows[12 + j] = _mm512_shuffle_i32x4(odd_low, odd_high, 0xDD);
  }
}

}  // namespace

bool available() noexcept {
  static const bool kAvailable = processor_has_it() && kernel_grants_it();
  return kAvailable;
}

void configure_thread() noexcept {
  TileConfig config;
  for (int tile = 0; tile < 8; ++tile) {
    config.column_bytes[tile] = 64;
    config.rows[tile] = 16;
  }
  // GCC 12 declares its tile loads without saying what memory they read: without this the stores above are dropped.
  __asm__ volatile("" : : "r"(&config) : "memory");
  _tile_loadconfig(&config);
}

void release_thread() noexcept { _tile_release(); }

// 2 x 2 tiles of c in registers: four products per four tile loads. Tiles 0-3 c, 4-5 a, 6-7 b.
void multiply(const std::uint16_t* a, std::int64_t lda, const std::uint16_t* b, std::int64_t m, std::int64_t n,
              std::int64_t k, float* c, std::int64_t ldc, bool accumulate) noexcept {
  __asm__ volatile("" : : : "memory");  // as in configure_thread(), for callers that were inlined with this
  const auto a_stride = static_cast<std::size_t>(lda) * sizeof(std::uint16_t);
  const auto c_stride = static_cast<std::size_t>(ldc) * sizeof(float);
  for (std::int64_t row = 0; row < m; row += 32) {
    const std::uint16_t* a0 = a + row * lda;
    const std::uint16_t* a1 = a0 + 16 * lda;
    for (std::int64_t column = 0; column < n; column += 32) {
      const std::uint16_t* b0 = b + column * k;
      const std::uint16_t* b1 = b0 + 16 * k;
      float* c0 = c + row * ldc + column;
      float* c1 = c0 + 16 * ldc;
      if (accumulate) {
        _tile_loadd(0, c0, c_stride);
        _tile_loadd(1, c0 + 16, c_stride);
        _tile_loadd(2, c1, c_stride);
        _tile_loadd(3, c1 + 16, c_stride);
      } else {
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
      }
      for (std::int64_t depth = 0; depth < k; depth += 32) {
        _tile_loadd(4, a0 + depth, a_stride);
        _tile_loadd(6, b0 + depth * 16, 64);
        _tile_loadd(5, a1 + depth, a_stride);
        _tile_loadd(7, b1 + depth * 16, 64);
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(1, 4, 7);
        _tile_dpbf16ps(3, 5, 7);
      }
      _tile_stored(0, c0, c_stride);
      _tile_stored(1, c0 + 16, c_stride);
      _tile_stored(2, c1, c_stride);
      _tile_stored(3, c1 + 16, c_stride);
    }
  }
}

void pack_right(const std::uint16_t* rows, std::int64_t ld, std::int64_t k, std::int64_t n, std::uint16_t* b) noexcept {
  alignas(64) std::uint16_t low_index[32];
  alignas(64) std::uint16_t high_index[32];
  for (int i = 0; i < 16; ++i) {
    low_index[2 * i] = static_cast<std::uint16_t>(i);
    low_index[2 * i + 1] = static_cast<std::uint16_t>(32 + i);
    high_index[2 * i] = static_cast<std::uint16_t>(16 + i);
    high_index[2 * i + 1] = static_cast<std::uint16_t>(48 + i);
  }
  const __m512i low = _mm512_load_si512(low_index);
  const __m512i high = _mm512_load_si512(high_index);
  for (std::int64_t depth = 0; depth < k; depth += 2) {
    const std::uint16_t* even = rows + depth * ld;
    const std::uint16_t* odd = even + ld;
    for (std::int64_t column = 0; column < n; column += 32) {
      const __m512i x = _mm512_loadu_si512(even + column);
      const __m512i y = _mm512_loadu_si512(odd + column);
      std::uint16_t* panel = b + column * k + depth * 16;
      _mm512_storeu_si512(panel, _mm512_permutex2var_epi16(x, low, y));
      _mm512_storeu_si512(panel + 16 * k, _mm512_permutex2var_epi16(x, high, y));
    }
  }
}

void pack_right_transposed(const std::uint16_t* rows, std::int64_t ld, std::int64_t k, std::int64_t n,
                           std::uint16_t* b) noexcept {
  __m512i block[16];
  for (std::int64_t column = 0; column < n; column += 16) {
    for (std::int64_t depth = 0; depth < k; depth += 32) {
      for (int i = 0; i < 16; ++i) block[i] = _mm512_loadu_si512(rows + (column + i) * ld + depth);
      transpose_dwords(block);
      std::uint16_t* panel = b + column * k + depth * 16;
      for (int i = 0; i < 16; ++i) _mm512_storeu_si512(panel + i * 32, block[i]);
    }
  }
}

void pack_left(const float* weights, std::int64_t ld, std::int64_t m, std::int64_t k, Part part,
               std::uint16_t* a) noexcept {
  for (std::int64_t row = 0; row < m; ++row) {
    const float* source = weights + row * ld;
    for (std::int64_t depth = 0; depth < k; depth += 32) {
      const __m512 first = part_of(_mm512_loadu_ps(source + depth), part);
      const __m512 second = part_of(_mm512_loadu_ps(source + depth + 16), part);
      _mm512_storeu_si512(a + row * k + depth, reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(second, first)));
    }
  }
}

void pack_left_transposed(const float* weights, std::int64_t ld, std::int64_t m, std::int64_t k, Part part,
                          std::uint16_t* a) noexcept {
  __m512i block[16];
  for (std::int64_t row = 0; row < m; row += 16) {
    for (std::int64_t depth = 0; depth < k; depth += 32) {
      for (int pair = 0; pair < 16; ++pair) {
        const float* source = weights + (depth + 2 * pair) * ld + row;
        const __m512i even = round_to_bf16(part_of(_mm512_loadu_ps(source), part));
        const __m512i odd = round_to_bf16(part_of(_mm512_loadu_ps(source + ld), part));
        block[pair] = _mm512_or_si512(even, _mm512_slli_epi32(odd, 16));
      }
      transpose_dwords(block);
      for (int i = 0; i < 16; ++i) _mm512_storeu_si512(a + (row + i) * k + depth, block[i]);
    }
  }
}

#else  // no AMX on this platform: available() says so, and nothing else is called

bool available() noexcept { return false; }
void configure_thread() noexcept {}
void release_thread() noexcept {}
void multiply(const std::uint16_t*, std::int64_t, const std::uint16_t*, std::int64_t, std::int64_t, std::int64_t,
              float*, std::int64_t, bool) noexcept {}
void pack_right(const std::uint16_t*, std::int64_t, std::int64_t, std::int64_t, std::uint16_t*) noexcept {}
void pack_right_transposed(const std::uint16_t*, std::int64_t, std::int64_t, std::int64_t, std::uint16_t*) noexcept {}
void pack_left(const float*, std::int64_t, std::int64_t, std::int64_t, Part, std::uint16_t*) noexcept {}
void pack_left_transposed(const float*, std::int64_t, std::int64_t, std::int64_t, Part, std::uint16_t*) noexcept {}

#endif

}  // namespace sparsemla::cpu::amx
