// The metrics on matrices whose figures are known.
#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <limits>
#include <random>
#include <vector>

#include "sparsemla/bfloat16.h"
#include "sparsemla/error.h"
#include "sparsemla/numerics.h"

namespace sparsemla {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr double kNan = std::numeric_limits<double>::quiet_NaN();

Tensor matrix(const std::vector<double>& values, std::int64_t columns) {
  return Tensor::contiguous(values.data(), DataType::kFloat64,
                            {static_cast<std::int64_t>(values.size()) / columns, columns});
}

Tensor vector(const std::vector<double>& values) { return matrix(values, static_cast<std::int64_t>(values.size())); }

std::vector<double> normals(std::size_t count, unsigned seed) {
  std::mt19937 engine(seed);
  std::normal_distribution<double> normal;
  std::vector<double> values(count);
  for (double& value : values) value = normal(engine);
  return values;
}

/// value[r, :] = reference[r, :] * (1 + gain(r)).
template <typename Gain>
std::vector<double> scaled_rows(std::vector<double> values, std::int64_t columns, const Gain& gain) {
  for (std::size_t i = 0; i < values.size(); ++i) values[i] *= 1 + gain(static_cast<std::int64_t>(i) / columns);
  return values;
}

TEST(RelL2, HandComputed) {
  EXPECT_DOUBLE_EQ(rel_l2(vector({3, 4.5}), vector({3, 4})), 0.1);
  EXPECT_EQ(rel_l2(vector({3, 4}), vector({3, 4})), 0);
  EXPECT_EQ(rel_l2(vector({-3, -4}), vector({3, 4})), 2);
}

TEST(RelL2, ZerosAndNonFinites) {
  EXPECT_EQ(rel_l2(vector({0, 0}), vector({0, 0})), 0);
  EXPECT_EQ(rel_l2(vector({0, 1}), vector({0, 0})), kInfinity);
  EXPECT_EQ(rel_l2(Tensor::contiguous(nullptr, DataType::kFloat64, {0, 4}),
                   Tensor::contiguous(nullptr, DataType::kFloat64, {0, 4})),
            0);
  for (const double bad : {kNan, kInfinity, -kInfinity}) {
    EXPECT_TRUE(std::isnan(rel_l2(vector({1, bad}), vector({1, 2}))));
    EXPECT_TRUE(std::isnan(rel_l2(vector({1, 2}), vector({1, bad}))));
    EXPECT_TRUE(std::isnan(rel_l2(vector({1, bad}), vector({1, bad}))));
    EXPECT_TRUE(std::isnan(rel_l2(vector({0, bad}), vector({0, 0}))));
  }
}

TEST(MaxAbsDifference, HandComputedAndNonFinites) {
  EXPECT_EQ(max_abs_difference(vector({1, 5, -2}), vector({1, 4.5, -1})), 1);
  EXPECT_EQ(max_abs_difference(vector({kInfinity, -kInfinity, 1}), vector({kInfinity, -kInfinity, 1.25})), 0.25);
  EXPECT_EQ(max_abs_difference(vector({kNan, 1}), vector({kNan, 1})), 0);
  for (const auto& [value, reference] : {std::pair(kInfinity, 1.0),
                                         {1.0, -kInfinity},
                                         {kInfinity, -kInfinity},
                                         {kNan, 1.0},
                                         {1.0, kNan},
                                         {kNan, kInfinity}})
    EXPECT_EQ(max_abs_difference(vector({0, value}), vector({0, reference})), kInfinity) << value << " " << reference;
}

TEST(CountNonfiniteMismatch, CountsEachKind) {
  EXPECT_EQ(
      count_nonfinite_mismatch(vector({1, kNan, kInfinity, -kInfinity}), vector({2, kNan, kInfinity, -kInfinity})), 0);
  EXPECT_EQ(count_nonfinite_mismatch(vector({kNan, 1, kInfinity, 1, kInfinity, kNan, 3}),
                                     vector({1, kNan, 1, -kInfinity, -kInfinity, kInfinity, 3})),
            6);
}

// ---------------------------------------------------------------------------------------------------------------------

TEST(RowGain, FindsAPlantedGain) {
  constexpr std::int64_t kColumns = 512;
  constexpr double kPlanted = 1e-3;
  const std::vector<double> reference = normals(200 * kColumns, 1);
  const std::vector<double> off = scaled_rows(reference, kColumns, [](std::int64_t) { return kPlanted; });
  const RowGain gain = row_gain(matrix(off, kColumns), matrix(reference, kColumns), matrix(reference, kColumns));
  EXPECT_NEAR(gain.rms, kPlanted, 1e-12);
  EXPECT_NEAR(gain.p99, kPlanted, 1e-12);
  EXPECT_NEAR(gain.max, kPlanted, 1e-12);
  EXPECT_NEAR(gain.noise_floor, kPlanted * std::sqrt(3.0 / kColumns), 1e-12);
  EXPECT_EQ(gain.num_rows, 200);
}

TEST(RowGain, FindsItUnderNoiseThatHasNone) {
  // Noise of 1e-2 in pairs (x, y) -> (-y, x) is orthogonal to the row: it counts in the error and not in the gain.
  constexpr std::int64_t kColumns = 64;
  const std::vector<double> reference = normals(50 * kColumns, 2);
  std::vector<double> off = scaled_rows(reference, kColumns, [](std::int64_t) { return 1e-3; });
  for (std::size_t i = 0; i < off.size(); i += 2) {
    off[i] -= 1e-2 * reference[i + 1];
    off[i + 1] += 1e-2 * reference[i];
  }
  const RowGain gain = row_gain(matrix(off, kColumns), matrix(reference, kColumns), matrix(reference, kColumns));
  EXPECT_NEAR(gain.rms, 1e-3, 1e-12);
  EXPECT_NEAR(gain.noise_floor, std::hypot(1e-3, 1e-2) * std::sqrt(3.0 / kColumns), 1e-12);
  const RowError error = row_error(matrix(off, kColumns), matrix(reference, kColumns));
  EXPECT_NEAR(error.median, std::hypot(1e-3, 1e-2), 1e-12);
}

TEST(RowGain, StatisticsOverRows) {
  // Row r is off by (r + 1) * 1e-5, in turns up and down.
  constexpr std::int64_t kRows = 1000;
  const std::vector<double> reference = normals(kRows * 16, 3);
  const auto off = scaled_rows(
      reference, 16, [](std::int64_t row) { return (row % 2 == 0 ? 1e-5 : -1e-5) * static_cast<double>(row + 1); });
  const RowGain gain = row_gain(matrix(off, 16), matrix(reference, 16), matrix(reference, 16));
  EXPECT_NEAR(gain.rms, 1e-5 * std::sqrt(1001.0 * 2001.0 / 6), 1e-12);
  EXPECT_NEAR(gain.p99, 990e-5, 1e-12);
  EXPECT_NEAR(gain.max, 1000e-5, 1e-12);
  const RowError error = row_error(matrix(off, 16), matrix(reference, 16));
  EXPECT_NEAR(error.median, 500e-5, 1e-12);
  EXPECT_NEAR(error.p99, 990e-5, 1e-12);
  EXPECT_NEAR(error.p999, 999e-5, 1e-12);
  EXPECT_NEAR(error.max, 1000e-5, 1e-12);
}

TEST(RowError, PercentileIsTheSmallestThatCoversTheFraction) {
  // 0.99 of 150 rows are 148.5: the 149th smallest covers them, the 148th does not.
  const std::vector<double> reference = normals(150 * 4, 9);
  const auto off = scaled_rows(reference, 4, [](std::int64_t row) { return 1e-3 * static_cast<double>(row + 1); });
  EXPECT_NEAR(row_error(matrix(off, 4), matrix(reference, 4)).p99, 149e-3, 1e-12);
  EXPECT_NEAR(row_error(matrix(off, 4), matrix(reference, 4)).median, 75e-3, 1e-12);
}

TEST(RowGain, MeasuresADifferenceAgainstAThirdTensor) {
  // d = a - b = (1, 2); o = (2, 0): <d,o>/<o,o> = 1/2, |d|/|o| = sqrt(5)/2.
  const RowGain gain = row_gain(vector({4, 3}), vector({3, 1}), vector({2, 0}));
  EXPECT_DOUBLE_EQ(gain.max, 0.5);
  EXPECT_DOUBLE_EQ(gain.noise_floor, std::sqrt(5.0) / 2 * std::sqrt(1.5));
}

TEST(RowMetrics, LeaveOutNegligibleRowsAndNoOthers) {
  // <o,o>: 1, 1.5e-12, 0.5e-12, 0. The limit is 1e-12.
  const std::vector<double> reference = {1, std::sqrt(1.5e-12), std::sqrt(0.5e-12), 0};
  const std::vector<double> value = {1.5, 2 * std::sqrt(1.5e-12), 7, 7};
  const RowError error = row_error(matrix(value, 1), matrix(reference, 1));
  EXPECT_EQ(error.num_rows, 2);
  EXPECT_NEAR(error.max, 1, 1e-12);
  EXPECT_NEAR(error.median, 0.5, 1e-12);
}

TEST(RowMetrics, ARowThatIsNotFiniteCountsAsInfinitelyWrong) {
  for (const double bad : {kNan, kInfinity}) {
    const std::vector<double> good = {1, 2, 3, 4};
    const std::vector<double> one_bad = {1, 2, bad, 4};
    for (const auto& [value, reference] :
         {std::pair(one_bad, good), std::pair(good, one_bad), std::pair(one_bad, one_bad)}) {
      const RowError error = row_error(matrix(value, 2), matrix(reference, 2));
      EXPECT_EQ(error.num_rows, 2);
      EXPECT_EQ(error.max, kInfinity);
      EXPECT_EQ(error.median, 0);
      const RowGain gain = row_gain(matrix(value, 2), matrix(reference, 2), matrix(reference, 2));
      EXPECT_EQ(gain.rms, kInfinity);
      EXPECT_EQ(gain.max, kInfinity);
    }
  }
}

TEST(RowMetrics, NoRows) {
  const Tensor empty = Tensor::contiguous(nullptr, DataType::kBFloat16, {0, 3, 8});
  EXPECT_EQ(row_error(empty, empty).num_rows, 0);
  EXPECT_EQ(row_gain(empty, empty, empty).rms, 0);
  EXPECT_EQ(bf16_floors(empty).out_rel_l2, 0);
}

TEST(Bf16Floors, AreThoseOfTheRoundedReference) {
  const std::vector<double> reference = normals(2000 * 512, 4);
  std::vector<BFloat16> rounded;
  for (const double value : reference) rounded.push_back(to_bfloat16(static_cast<float>(value)));
  const Tensor value = Tensor::contiguous(rounded.data(), DataType::kBFloat16, {2000, 512});
  const Floors floors = bf16_floors(matrix(reference, 512));
  EXPECT_EQ(floors.out_rel_l2, rel_l2(value, matrix(reference, 512)));
  EXPECT_EQ(floors.row_gain_rms, row_gain(value, matrix(reference, 512), matrix(reference, 512)).rms);
  EXPECT_NEAR(floors.out_rel_l2, 1.66e-3, 0.01e-3);  // the figure of docs/numerics.md
  EXPECT_EQ(bf16_floors(value).out_rel_l2, 0);
}

// ---------------------------------------------------------------------------------------------------------------------

TEST(Reading, EveryDtypeIsExact) {
  // All bf16 and fp16 patterns against their definition, written with ldexp.
  std::vector<std::uint16_t> bits(0x10000);
  std::vector<double> half(0x10000);
  std::vector<double> brain(0x10000);
  for (int i = 0; i < 0x10000; ++i) {
    bits[i] = static_cast<std::uint16_t>(i);
    const double sign = (i & 0x8000) != 0 ? -1 : 1;
    const auto decode = [&](int fraction_bits, int exponent_bits) {
      const int fraction = i & ((1 << fraction_bits) - 1);
      const int exponent = (i >> fraction_bits) & ((1 << exponent_bits) - 1);
      const int bias = (1 << (exponent_bits - 1)) - 1;
      if (exponent == (1 << exponent_bits) - 1) return fraction != 0 ? kNan : sign * kInfinity;
      if (exponent == 0) return sign * std::ldexp(fraction, 1 - bias - fraction_bits);
      return sign * std::ldexp((1 << fraction_bits) + fraction, exponent - bias - fraction_bits);
    };
    half[i] = decode(10, 5);
    brain[i] = decode(7, 8);
  }
  for (const auto& [dtype, values] : {std::pair(DataType::kFloat16, half), std::pair(DataType::kBFloat16, brain)}) {
    const Tensor tensor = Tensor::contiguous(bits.data(), dtype, {64, 1024});
    EXPECT_EQ(max_abs_difference(tensor, matrix(values, 1024)), 0);
    EXPECT_EQ(count_nonfinite_mismatch(tensor, matrix(values, 1024)), 0);
  }
  const std::vector<float> floats = {1.1F, -2.7e-30F, 3.3e38F};
  const std::vector<double> same(floats.begin(), floats.end());
  EXPECT_EQ(max_abs_difference(Tensor::contiguous(floats.data(), DataType::kFloat32, {1, 3}), vector(same)), 0);
}

TEST(Reading, AnyStrides) {
  constexpr std::int64_t kRows = 30;
  constexpr std::int64_t kColumns = 50;
  const std::vector<double> stored = normals(kRows * 2 * kColumns, 5);
  // columns 7 .. 7 + 49 step 1 of a wider matrix; a transposed one; one read backwards; one row for all
  const Tensor wide = matrix(stored, 2 * kColumns);
  Tensor transposed = Tensor::contiguous(stored.data(), DataType::kFloat64, {kRows, kColumns});
  transposed.strides = {1, kRows};
  Tensor backwards = transposed;
  backwards.data = const_cast<double*>(stored.data()) + 2 * kRows * kColumns - 1;
  backwards.strides = {-2 * kColumns, -2};
  Tensor repeated = wide.columns(0, kColumns);
  repeated.strides[0] = 0;
  const Tensor views[] = {wide.columns(7, 7 + kColumns), transposed, backwards, repeated};
  for (const Tensor& view : views) {
    std::vector<double> copy;
    for (std::int64_t row = 0; row < kRows; ++row)
      for (std::int64_t column = 0; column < kColumns; ++column)
        copy.push_back(static_cast<const double*>(view.data)[row * view.strides[0] + column * view.strides[1]]);
    EXPECT_EQ(max_abs_difference(view, matrix(copy, kColumns)), 0);
    for (double& value : copy) value *= 1.125;
    EXPECT_NEAR(rel_l2(view, matrix(copy, kColumns)), 1 / 9.0, 1e-15);
    EXPECT_NEAR(row_gain(view, matrix(copy, kColumns), matrix(copy, kColumns)).max, 1 / 9.0, 1e-15);
  }
}

TEST(Reading, RanksAndLongRows) {
  const std::vector<double> values = normals(10007, 6);  // several segments and a tail
  const std::vector<double> off = scaled_rows(values, 10007, [](std::int64_t) { return 0.25; });
  const auto of_rank_1 = [](const std::vector<double>& v) {
    return Tensor::contiguous(v.data(), DataType::kFloat64, {static_cast<std::int64_t>(v.size())});
  };
  EXPECT_NEAR(rel_l2(of_rank_1(off), of_rank_1(values)), 0.25, 1e-14);
  const RowGain gain = row_gain(of_rank_1(off), of_rank_1(values), of_rank_1(values));
  EXPECT_EQ(gain.num_rows, 1);
  EXPECT_NEAR(gain.max, 0.25, 1e-14);
  const Tensor scalar = Tensor::contiguous(values.data(), DataType::kFloat64, {});
  const Tensor other = Tensor::contiguous(off.data(), DataType::kFloat64, {});
  EXPECT_NEAR(rel_l2(other, scalar), 0.25, 1e-14);
}

TEST(Threads, DoNotChangeTheBits) {
  const std::vector<double> reference = normals(3000 * 33, 7);
  std::vector<double> value = normals(3000 * 33, 8);
  const Tensor a = matrix(value, 33);
  const Tensor o = matrix(reference, 33);
  const RowGain gain = row_gain(a, o, o, 1);
  for (const int threads : {2, 3, 16, 0}) {
    EXPECT_EQ(rel_l2(a, o, threads), rel_l2(a, o, 1));
    EXPECT_EQ(max_abs_difference(a, o, threads), max_abs_difference(a, o, 1));
    EXPECT_EQ(row_gain(a, o, o, threads).rms, gain.rms);
    EXPECT_EQ(row_gain(a, o, o, threads).noise_floor, gain.noise_floor);
    EXPECT_EQ(row_error(a, o, threads).p999, row_error(a, o, 1).p999);
    EXPECT_EQ(bf16_floors(o, threads).out_rel_l2, bf16_floors(o, 1).out_rel_l2);
  }
  for (double& element : value) element = kNan;
  EXPECT_EQ(count_nonfinite_mismatch(a, o, 3), 3000 * 33);
}

TEST(Errors, NameTheArgument) {
  const std::vector<double> values(12, 1);
  const Tensor good = matrix(values, 4);
  const auto blamed = [&](const Tensor& value) -> std::string {
    try {
      static_cast<void>(row_gain(good, value, good));
    } catch (const Error& error) {
      return error.argument();
    }
    return "";
  };
  EXPECT_EQ(blamed(good), "");
  EXPECT_EQ(blamed(matrix(values, 3)), "b");
  Tensor bad = good;
  bad.dtype = DataType::kInt32;
  EXPECT_EQ(blamed(bad), "b");
  bad = good;
  bad.device.type = DeviceType::kCuda;
  EXPECT_EQ(blamed(bad), "b");
  bad = good;
  bad.data = nullptr;
  EXPECT_EQ(blamed(bad), "b");
  EXPECT_THROW(static_cast<void>(rel_l2(Tensor{}, Tensor{})), Error);
}

}  // namespace
}  // namespace sparsemla
