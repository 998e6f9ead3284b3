// Numerics as a value: everything about a kernel's schedule that shapes its results.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "sparsemla/tensor.h"

namespace sparsemla {

/// Order in which the key blocks of a row's list are visited. Slot 0 usually holds the strongest key, so kLastToFirst
/// meets it last.
enum class WalkDirection : std::uint8_t { kLastToFirst, kFirstToLast };

/// What the softmax denominator adds up: the fp32 probabilities, or the ones rounded for the P@V product (experimental:
/// the output is then normalised for what was multiplied, but lse no longer is the log-sum-exp of the scores).
enum class RowSum : std::uint8_t { kUnrounded, kRounded };

/// How P and dS enter their matrix products: rounded once to bf16, or as bf16 hi + bf16 lo (two products each).
enum class Operands : std::uint8_t { kBf16, kSplit };

struct Pipeline {
  /// Slots per key block, >= 1. A block is `key_block` consecutive slots of the list, valid or not.
  int key_block = 64;
  WalkDirection walk = WalkDirection::kLastToFirst;
  /// The stale row max is kept while the new one exceeds it by at most this many log2 units. 0 = exact running max.
  /// Bound: 0 <= threshold < log2(largest finite value of P's dtype), 127.99 for bf16.
  float rescale_threshold_log2 = 0.0F;
  /// Type that P is rounded to for P@V. Only kBFloat16 is built.
  DataType p_dtype = DataType::kBFloat16;
  RowSum row_sum = RowSum::kUnrounded;
  /// Forward: emit out_residual. Backward: form dpsum from out + out_residual instead of out alone.
  bool residual = true;
  Operands operands = Operands::kBf16;
  /// Put each row's valid indices into ascending order before the walk: every output is then bitwise the same for any
  /// order of the same list.
  bool canonical = false;

  friend bool operator==(const Pipeline&, const Pipeline&) = default;

  /// 64-key blocks, last to first, exact max, residual.
  static Pipeline training() { return {}; }
  /// The same walk with the lazy max (threshold 8) and no residual.
  static Pipeline lazy_inference();
};

/// Largest threshold that is refused: log2 of the largest finite value of P's dtype, minus the offset a kernel adds to
/// its exponents. bf16 127.99, fp16 15.999, e4m3 8.807. Errors: another dtype.
[[nodiscard]] double rescale_threshold_bound_log2(DataType p_dtype, double max_offset_log2 = 0.0);

/// Reads "exact", "lazy", "canonical", each followed by any number of "+modifier":
/// threshold=X, key=N, first-to-last, last-to-first, rounded-sum, unrounded-sum, no-residual, residual, split,
/// canonical. "lazy+key=128" is the lazy walk over 128-key blocks. Errors: an unknown word, named.
[[nodiscard]] Pipeline parse_pipeline(std::string_view text);
/// One line that parse_pipeline reads back.
[[nodiscard]] std::string to_string(const Pipeline& pipeline);

}  // namespace sparsemla
