// The metrics of docs/numerics.md, computed in fp64 over strided tensors of any float dtype.
#pragma once

#include <cstdint>
#include <vector>

#include "sparsemla/tensor.h"

namespace sparsemla {

// Row r is one index of all axes but the last; `o_r` is a row of the reference. Rows with <o_r,o_r> <= 1e-12 * (largest
// <o,o>) are left out of the row metrics, but a row is never left out for being non-finite: it counts as +inf there
// (see also count_nonfinite_mismatch). A percentile is the smallest row value that at least so many of the rows do not
// exceed. All functions need equal shapes on the CPU and throw Error otherwise. `num_threads` 0 = all cores; the result
// does not depend on it.

/// ||value - reference||_F / ||reference||_F. 0 when both are empty or zero, +inf when only the reference is zero, NaN
/// when either holds a NaN or Inf.
[[nodiscard]] double rel_l2(const Tensor& value, const Tensor& reference, int num_threads = 0);

/// Largest |value - reference| over finite pairs; equal infinities count 0; a pair of which just one is finite, or NaN
/// stands against a number, gives +inf.
[[nodiscard]] double max_abs_difference(const Tensor& value, const Tensor& reference, int num_threads = 0);

/// Elements where exactly one side is NaN, or the two are not the same infinity while one is infinite.
[[nodiscard]] std::int64_t count_nonfinite_mismatch(const Tensor& value, const Tensor& reference, int num_threads = 0);

/// Over rows: |row_gain_r| with row_gain_r(a,b) = <a-b, o_r> / <o_r, o_r>, the coherent part of the difference.
struct RowGain {
  double rms = 0;
  double p99 = 0;
  double max = 0;
  double noise_floor = 0;  // rms(||a-b||_r / ||o_r||) * sqrt(3/D): what independent rounding of each element would give
  std::int64_t num_rows = 0;
};
[[nodiscard]] RowGain row_gain(const Tensor& a, const Tensor& b, const Tensor& reference, int num_threads = 0);

/// Percentiles over rows of ||value - reference||_r / ||reference||_r.
struct RowError {
  double median = 0;
  double p99 = 0;
  double p999 = 0;
  double max = 0;
  std::int64_t num_rows = 0;
};
[[nodiscard]] RowError row_error(const Tensor& value, const Tensor& reference, int num_threads = 0);
/// The same over rows made of two tensors side by side (dq_latent and dq_rope). Errors: also unequal numbers of rows.
[[nodiscard]] RowError row_error_joined(const Tensor& value, const Tensor& reference, const Tensor& more_value,
                                        const Tensor& more_reference, int num_threads = 0);

/// ||a - b||_F / ||reference||_F, with the conventions of rel_l2.
[[nodiscard]] double rel_l2_difference(const Tensor& a, const Tensor& b, const Tensor& reference, int num_threads = 0);

/// The gains that row_gain() sums up, with their signs, in row order without the rows left out. NaN or Inf for a row
/// that is not finite.
[[nodiscard]] std::vector<double> row_gains(const Tensor& a, const Tensor& b, const Tensor& reference,
                                            int num_threads = 0);

/// What rounding the reference once to bf16 costs: the floors that any kernel with a bf16 output stands on.
struct Floors {
  double out_rel_l2 = 0;
  double row_gain_rms = 0;  // "ideal row gain"
};
[[nodiscard]] Floors bf16_floors(const Tensor& reference, int num_threads = 0);

}  // namespace sparsemla
