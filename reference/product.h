// The one dense loop of the reference: c += a * b in fp64.
#pragma once

#include <cstdint>

namespace sparsemla::reference {

/// Rows and columns of c are handled in groups of this many; the caller pads its buffers to a multiple.
inline constexpr std::int64_t kGroup = 8;

[[nodiscard]] constexpr std::int64_t padded(std::int64_t count) noexcept {
  return (count + kGroup - 1) / kGroup * kGroup;
}

struct Matrix {
  const double* data;
  std::int64_t row_stride;
  std::int64_t column_stride = 1;
};

struct ProductShape {
  std::int64_t rows;     // of a and c, a multiple of kGroup
  std::int64_t columns;  // of b and c, a multiple of kGroup
  std::int64_t depth;    // columns of a, rows of b
};

/// kGroup doubles that are added and multiplied element by element (a GCC and Clang extension; on a processor with
/// narrower vectors the compiler splits it). `aligned(8)` lets it be read from any double's address.
using Group [[gnu::vector_size(kGroup * sizeof(double)), gnu::aligned(sizeof(double)), gnu::may_alias]] = double;

/// c[m,n] += sum_k a[m,k] * b[k,n] for kGroup rows and kGroups * kGroup columns. The sums of one call stay in
/// registers, and k runs upwards, so the order of addition is that of the formula.
template <std::int64_t kGroups>
inline void add_product_group(double* c, std::int64_t c_stride, Matrix a, const double* b, std::int64_t b_stride,
                              std::int64_t depth) noexcept {
  Group sum[kGroup][kGroups];
  for (std::int64_t m = 0; m < kGroup; ++m)
    for (std::int64_t g = 0; g < kGroups; ++g)
      sum[m][g] = *reinterpret_cast<const Group*>(c + m * c_stride + g * kGroup);
  for (std::int64_t k = 0; k < depth; ++k) {
    Group b_k[kGroups];
    for (std::int64_t g = 0; g < kGroups; ++g) b_k[g] = *reinterpret_cast<const Group*>(b + k * b_stride + g * kGroup);
    for (std::int64_t m = 0; m < kGroup; ++m)
      for (std::int64_t g = 0; g < kGroups; ++g) sum[m][g] += a.data[m * a.row_stride + k * a.column_stride] * b_k[g];
  }
  for (std::int64_t m = 0; m < kGroup; ++m)
    for (std::int64_t g = 0; g < kGroups; ++g) *reinterpret_cast<Group*>(c + m * c_stride + g * kGroup) = sum[m][g];
}

/// c[m,n] += sum_k a[m,k] * b[k,n]; rows of b and c are contiguous.
inline void add_product(double* c, std::int64_t c_stride, Matrix a, const double* b, std::int64_t b_stride,
                        ProductShape shape) noexcept {
  std::int64_t n = 0;
  for (; n + 2 * kGroup <= shape.columns; n += 2 * kGroup)
    for (std::int64_t m = 0; m < shape.rows; m += kGroup)
      add_product_group<2>(c + m * c_stride + n, c_stride, {a.data + m * a.row_stride, a.row_stride, a.column_stride},
                           b + n, b_stride, shape.depth);
  if (n < shape.columns)
    for (std::int64_t m = 0; m < shape.rows; m += kGroup)
      add_product_group<1>(c + m * c_stride + n, c_stride, {a.data + m * a.row_stride, a.row_stride, a.column_stride},
                           b + n, b_stride, shape.depth);
}

}  // namespace sparsemla::reference
