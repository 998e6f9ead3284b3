#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <limits>
#include <mutex>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "numerics/parallel.h"
#include "sparsemla/bfloat16.h"
#include "sparsemla/error.h"
#include "sparsemla/numerics.h"

namespace sparsemla {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

// ---------------------------------------------------------------------------------------------------------------------
// Reading. A row is one index of all axes but the last; it is read in segments of at most kSegment elements, converted
// to fp64, so that no tensor is ever copied whole.

constexpr std::int64_t kSegment = 1024;

/// fp16 to fp32, without branches so that it vectorises. A normal number needs its exponent moved (a multiplication by
/// 2^112 does that and also normalises subnormals); Inf and NaN need an all-ones exponent.
inline float half_to_float(std::uint16_t half) noexcept {
  const std::uint32_t magnitude = (half & 0x7FFFu) << 13;
  const float finite = std::bit_cast<float>(magnitude) * 0x1p112F;
  const bool special = (half & 0x7C00u) == 0x7C00u;
  const std::uint32_t bits = special ? magnitude | 0x7F800000u : std::bit_cast<std::uint32_t>(finite);
  return std::bit_cast<float>(bits | (half & 0x8000u) << 16);
}

inline double to_double(BFloat16 value) noexcept { return to_float(value); }
inline double to_double(std::uint16_t half) noexcept { return half_to_float(half); }
inline double to_double(float value) noexcept { return value; }
inline double to_double(double value) noexcept { return value; }

template <typename Element>
void convert(const Element* source, std::int64_t stride, std::int64_t count, double* out) noexcept {
  if (stride == 1) {
    for (std::int64_t i = 0; i < count; ++i) out[i] = to_double(source[i]);
  } else {
    for (std::int64_t i = 0; i < count; ++i) out[i] = to_double(source[i * stride]);
  }
}

/// Rows of a tensor of rank 0 (one row of one element) or more.
class Rows {
 public:
  Rows(const Tensor& tensor, std::string_view name) : tensor_(tensor) {
    const bool is_float = tensor.dtype == DataType::kBFloat16 || tensor.dtype == DataType::kFloat16 ||
                          tensor.dtype == DataType::kFloat32 || tensor.dtype == DataType::kFloat64;
    if (!is_float) throw Error(name, to_string(tensor), "bfloat16, float16, float32 or float64");
    if (tensor.device.type != DeviceType::kCpu) throw Error(name, to_string(tensor), "a tensor on the cpu");
    if (tensor.data == nullptr && tensor.num_elements() != 0) throw Error(name, "a null pointer", "data");
    if (tensor.rank > 0) width_ = tensor.shape[tensor.rank - 1];
    if (tensor.rank > 0) stride_ = tensor.strides[tensor.rank - 1];
    for (int axis = 0; axis + 1 < tensor.rank; ++axis) num_rows_ *= tensor.shape[axis];
  }

  [[nodiscard]] std::int64_t num_rows() const noexcept { return num_rows_; }
  [[nodiscard]] std::int64_t width() const noexcept { return width_; }

  /// Elements [begin, begin + count) of a row, count <= kSegment.
  void read(std::int64_t row, std::int64_t begin, std::int64_t count, double* out) const noexcept {
    std::int64_t offset = begin * stride_;
    for (int axis = tensor_.rank - 2; axis >= 0; --axis) {
      offset += row % tensor_.shape[axis] * tensor_.strides[axis];
      row /= tensor_.shape[axis];
    }
    switch (tensor_.dtype) {
      case DataType::kBFloat16:
        return convert(static_cast<const BFloat16*>(tensor_.data) + offset, stride_, count, out);
      case DataType::kFloat16:
        return convert(static_cast<const std::uint16_t*>(tensor_.data) + offset, stride_, count, out);
      case DataType::kFloat32:
        return convert(static_cast<const float*>(tensor_.data) + offset, stride_, count, out);
      default:
        return convert(static_cast<const double*>(tensor_.data) + offset, stride_, count, out);
    }
  }

 private:
  Tensor tensor_;
  std::int64_t num_rows_ = 1;
  std::int64_t width_ = 1;
  std::int64_t stride_ = 1;
};

void require_equal_shapes(const Tensor& value, std::string_view name, const Tensor& reference) {
  const bool equal = value.rank == reference.rank &&
                     std::equal(value.shape.begin(), value.shape.begin() + value.rank, reference.shape.begin());
  if (!equal) throw Error(name, shape_string(value), shape_string(reference) + ", the shape of the reference");
}

// ---------------------------------------------------------------------------------------------------------------------
// Summing. Each sum of a row runs in kLanes interleaved lanes, so that it vectorises and yet has one defined order.
// Rows are handled in blocks of a fixed size; what is summed over rows is summed over a block, then over blocks in
// order.

constexpr std::int64_t kLanes = 16;
constexpr std::int64_t kRowBlock = 256;
using Lanes = std::array<double, kLanes>;

/// Calls step(lane, i) for i in [0, count), lane = i % kLanes.
template <typename Step>
inline void for_lanes(std::int64_t count, const Step& step) noexcept {
  std::int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes)
    for (std::int64_t lane = 0; lane < kLanes; ++lane) step(lane, i + lane);
  for (std::int64_t lane = 0; i + lane < count; ++lane) step(lane, i + lane);
}

double total(const Lanes& lanes) noexcept {
  double sum = 0;
  for (const double lane : lanes) sum += lane;
  return sum;
}

/// What the row metrics need of one row; d = a - b, o = reference.
struct RowSums {
  double oo = 0;   // <o, o>
  double dd = 0;   // <d, d>
  double dro = 0;  // <d, o>

  RowSums& operator+=(const RowSums& other) noexcept {
    oo += other.oo;
    dd += other.dd;
    dro += other.dro;
    return *this;
  }
};

RowSums sum_segment(const double* a, const double* b, const double* o, std::int64_t count) noexcept {
  Lanes oo{};
  Lanes dd{};
  Lanes dro{};
  for_lanes(count, [&](std::int64_t lane, std::int64_t i) {
    const double d = a[i] - b[i];
    oo[lane] += o[i] * o[i];
    dd[lane] += d * d;
    dro[lane] += d * o[i];
  });
  return {total(oo), total(dd), total(dro)};
}

/// Calls segment(row, begin, count) for every row's segments, row by row within a block, blocks in parallel.
template <typename Segment>
void for_segments(const Rows& rows, int num_threads, const Segment& segment) {
  parallel_blocks(rows.num_rows(), kRowBlock, num_threads, [&](std::int64_t first, std::int64_t last) {
    for (std::int64_t row = first; row < last; ++row)
      for (std::int64_t begin = 0; begin < rows.width(); begin += kSegment)
        segment(row, begin, std::min(kSegment, rows.width() - begin));
  });
}

std::vector<RowSums> row_sums(const Rows& a, const Rows& b, const Rows& reference, int num_threads) {
  std::vector<RowSums> sums(static_cast<std::size_t>(reference.num_rows()));
  for_segments(reference, num_threads, [&](std::int64_t row, std::int64_t begin, std::int64_t count) {
    std::array<double, kSegment> a_values;
    std::array<double, kSegment> b_values;
    std::array<double, kSegment> o_values;
    a.read(row, begin, count, a_values.data());
    b.read(row, begin, count, b_values.data());
    reference.read(row, begin, count, o_values.data());
    sums[row] += sum_segment(a_values.data(), b_values.data(), o_values.data(), count);
  });
  return sums;
}

/// The same with b = reference.
std::vector<RowSums> row_sums(const Rows& value, const Rows& reference, int num_threads) {
  std::vector<RowSums> sums(static_cast<std::size_t>(reference.num_rows()));
  for_segments(reference, num_threads, [&](std::int64_t row, std::int64_t begin, std::int64_t count) {
    std::array<double, kSegment> values;
    std::array<double, kSegment> o_values;
    value.read(row, begin, count, values.data());
    reference.read(row, begin, count, o_values.data());
    sums[row] += sum_segment(values.data(), o_values.data(), o_values.data(), count);
  });
  return sums;
}

/// sqrt(sum dd) / sqrt(sum oo) with the conventions of rel_l2.
double relative_norm(const std::vector<RowSums>& sums) noexcept {
  RowSums all;
  for (const RowSums& row : sums) all += row;
  if (!std::isfinite(all.dd) || !std::isfinite(all.oo)) return std::numeric_limits<double>::quiet_NaN();
  if (all.oo == 0) return all.dd == 0 ? 0 : kInfinity;
  return std::sqrt(all.dd) / std::sqrt(all.oo);
}

// ---------------------------------------------------------------------------------------------------------------------
// Statistics over rows.

/// Drops the rows whose reference is negligible. Rows that are not finite stay.
void drop_negligible_rows(std::vector<RowSums>& sums) {
  double largest = 0;
  for (const RowSums& row : sums)
    if (std::isfinite(row.oo)) largest = std::max(largest, row.oo);
  std::erase_if(sums, [&](const RowSums& row) { return row.oo <= 1e-12 * largest; });
}

/// A row that is not finite counts as infinitely wrong.
double finite_or_infinity(double value) noexcept { return std::isfinite(value) ? value : kInfinity; }

/// The smallest value that at least `fraction` of the values do not exceed; 0 when there are none. Reorders `values`.
double percentile(std::vector<double>& values, double fraction) {
  if (values.empty()) return 0;
  const double rank = std::ceil(fraction * static_cast<double>(values.size()));
  const auto index = std::clamp<std::ptrdiff_t>(static_cast<std::ptrdiff_t>(rank) - 1, 0,
                                                static_cast<std::ptrdiff_t>(values.size()) - 1);
  std::nth_element(values.begin(), values.begin() + index, values.end());
  return values[static_cast<std::size_t>(index)];
}

double largest(const std::vector<double>& values) noexcept {
  double result = 0;
  for (const double value : values) result = std::max(result, value);
  return result;
}

double root_mean_square(const std::vector<double>& values) noexcept {
  if (values.empty()) return 0;
  double sum = 0;
  for (const double value : values) sum += value * value;
  return std::sqrt(sum / static_cast<double>(values.size()));
}

RowGain row_gain(std::vector<RowSums> sums, std::int64_t width) {
  drop_negligible_rows(sums);
  std::vector<double> gain;
  std::vector<double> error;
  gain.reserve(sums.size());
  error.reserve(sums.size());
  for (const RowSums& row : sums) {
    gain.push_back(finite_or_infinity(std::abs(row.dro / row.oo)));
    error.push_back(finite_or_infinity(std::sqrt(row.dd / row.oo)));
  }
  RowGain result;
  result.num_rows = static_cast<std::int64_t>(gain.size());
  result.rms = root_mean_square(gain);
  result.max = largest(gain);
  result.p99 = percentile(gain, 0.99);
  if (width > 0) result.noise_floor = root_mean_square(error) * std::sqrt(3.0 / static_cast<double>(width));
  return result;
}

RowError row_error(std::vector<RowSums> sums) {
  drop_negligible_rows(sums);
  std::vector<double> error;
  error.reserve(sums.size());
  for (const RowSums& row : sums) error.push_back(finite_or_infinity(std::sqrt(row.dd / row.oo)));
  RowError result;
  result.num_rows = static_cast<std::int64_t>(error.size());
  result.max = largest(error);
  result.median = percentile(error, 0.5);
  result.p99 = percentile(error, 0.99);
  result.p999 = percentile(error, 0.999);
  return result;
}

// ---------------------------------------------------------------------------------------------------------------------
// Element by element.

bool same_element(double value, double reference) noexcept {
  return value == reference || (std::isnan(value) && std::isnan(reference));
}

/// Calls step(lane, value, reference) for every element and merge(lanes) with the Lanes of each segment, merges one at
/// a time and in no defined order: only for maxima and counts, which do not depend on it.
template <typename Step, typename Merge>
void for_elements(const Rows& value, const Rows& reference, int num_threads, const Step& step, const Merge& merge) {
  std::mutex mutex;
  for_segments(reference, num_threads, [&](std::int64_t row, std::int64_t begin, std::int64_t count) {
    std::array<double, kSegment> values;
    std::array<double, kSegment> references;
    value.read(row, begin, count, values.data());
    reference.read(row, begin, count, references.data());
    Lanes lanes{};
    for_lanes(count, [&](std::int64_t lane, std::int64_t i) { step(lanes[lane], values[i], references[i]); });
    const std::scoped_lock lock(mutex);
    merge(lanes);
  });
}

}  // namespace

double rel_l2(const Tensor& value, const Tensor& reference, int num_threads) {
  require_equal_shapes(value, "value", reference);
  return relative_norm(row_sums(Rows(value, "value"), Rows(reference, "reference"), num_threads));
}

double max_abs_difference(const Tensor& value, const Tensor& reference, int num_threads) {
  require_equal_shapes(value, "value", reference);
  double result = 0;
  for_elements(
      Rows(value, "value"), Rows(reference, "reference"), num_threads,
      [](double& lane, double v, double r) {
        const double difference = same_element(v, r) ? 0 : std::abs(v - r);
        lane = std::max(lane, std::isnan(difference) ? kInfinity : difference);
      },
      [&](const Lanes& lanes) {
        for (const double lane : lanes) result = std::max(result, lane);
      });
  return result;
}

std::int64_t count_nonfinite_mismatch(const Tensor& value, const Tensor& reference, int num_threads) {
  require_equal_shapes(value, "value", reference);
  std::int64_t result = 0;
  for_elements(
      Rows(value, "value"), Rows(reference, "reference"), num_threads,
      [](double& lane, double v, double r) {
        const bool finite = std::isfinite(v) && std::isfinite(r);
        lane += finite || same_element(v, r) ? 0 : 1;
      },
      [&](const Lanes& lanes) { result += static_cast<std::int64_t>(total(lanes)); });
  return result;
}

RowGain row_gain(const Tensor& a, const Tensor& b, const Tensor& reference, int num_threads) {
  require_equal_shapes(a, "a", reference);
  require_equal_shapes(b, "b", reference);
  const Rows rows(reference, "reference");
  return row_gain(row_sums(Rows(a, "a"), Rows(b, "b"), rows, num_threads), rows.width());
}

RowError row_error(const Tensor& value, const Tensor& reference, int num_threads) {
  require_equal_shapes(value, "value", reference);
  return row_error(row_sums(Rows(value, "value"), Rows(reference, "reference"), num_threads));
}

RowError row_error_joined(const Tensor& value, const Tensor& reference, const Tensor& more_value,
                          const Tensor& more_reference, int num_threads) {
  require_equal_shapes(value, "value", reference);
  require_equal_shapes(more_value, "more_value", more_reference);
  const Rows rows(reference, "reference");
  const Rows more_rows(more_reference, "more_reference");
  if (rows.num_rows() != more_rows.num_rows())
    throw Error("more_reference", shape_string(more_reference), "as many rows as " + shape_string(reference));
  std::vector<RowSums> sums = row_sums(Rows(value, "value"), rows, num_threads);
  const std::vector<RowSums> more = row_sums(Rows(more_value, "more_value"), more_rows, num_threads);
  for (std::size_t row = 0; row < sums.size(); ++row) sums[row] += more[row];
  return row_error(std::move(sums));
}

double rel_l2_difference(const Tensor& a, const Tensor& b, const Tensor& reference, int num_threads) {
  require_equal_shapes(a, "a", reference);
  require_equal_shapes(b, "b", reference);
  return relative_norm(row_sums(Rows(a, "a"), Rows(b, "b"), Rows(reference, "reference"), num_threads));
}

std::vector<double> row_gains(const Tensor& a, const Tensor& b, const Tensor& reference, int num_threads) {
  require_equal_shapes(a, "a", reference);
  require_equal_shapes(b, "b", reference);
  std::vector<RowSums> sums = row_sums(Rows(a, "a"), Rows(b, "b"), Rows(reference, "reference"), num_threads);
  drop_negligible_rows(sums);
  std::vector<double> gains;
  gains.reserve(sums.size());
  for (const RowSums& row : sums) gains.push_back(row.dro / row.oo);
  return gains;
}

Floors bf16_floors(const Tensor& reference, int num_threads) {
  const Rows rows(reference, "reference");
  std::vector<RowSums> sums(static_cast<std::size_t>(rows.num_rows()));
  for_segments(rows, num_threads, [&](std::int64_t row, std::int64_t begin, std::int64_t count) {
    std::array<double, kSegment> exact;
    std::array<double, kSegment> rounded;
    rows.read(row, begin, count, exact.data());
    for (std::int64_t i = 0; i < count; ++i) rounded[i] = to_float(to_bfloat16(static_cast<float>(exact[i])));
    sums[row] += sum_segment(rounded.data(), exact.data(), exact.data(), count);
  });
  Floors floors;
  floors.out_rel_l2 = relative_norm(sums);
  floors.row_gain_rms = row_gain(std::move(sums), rows.width()).rms;
  return floors;
}

}  // namespace sparsemla
