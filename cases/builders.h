// Pieces that the sections of the table are made of. Internal to cases/.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <limits>
#include <string>
#include <vector>

#include "cases/cases.h"

namespace sparsemla::cases {

inline constexpr std::int32_t kIntMin = std::numeric_limits<std::int32_t>::min();
inline constexpr std::int32_t kIntMax = std::numeric_limits<std::int32_t>::max();
inline constexpr float kInf = std::numeric_limits<float>::infinity();
inline constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

/// One list of keys a token, written out by hand.
using Lists = std::vector<std::vector<std::int32_t>>;

/// Small seeded generator for what the generators of numerics/ do not draw: lists, lengths, signs.
class Random {
 public:
  explicit Random(std::uint64_t seed) : state_(seed) {}
  std::uint64_t next();                    // splitmix64
  std::int64_t below(std::int64_t bound);  // uniform enough in [0, bound), bound >= 1
  float symmetric();                       // uniform in [-1, 1)

 private:
  std::uint64_t state_;
};

struct Shape {
  std::int64_t tokens = 1;
  std::int64_t keys = 1;
  std::int64_t heads = 1;
  std::int64_t topk = 1;
  std::int64_t rope = kRopeDim;
  std::uint64_t seed = 1;
};

/// iid normal inputs and dout, lists of distinct keys.
Problem iid(const Shape& shape);
/// The same with the list of each token replaced; padded with -1.
Problem iid_with_lists(const Shape& shape, const Lists& lists);
/// The same with q = 0, so that the n valid slots of a token weigh 1/n each.
Problem q0(const Shape& shape, const Lists& lists);

void set_list(Problem& problem, std::int64_t token, const std::vector<std::int32_t>& list);
/// dlse of unit size.
void add_dlse(Problem& problem, std::uint64_t seed);
void fill(std::vector<BFloat16>& values, float value);
/// Row `row` of a matrix with `width` columns.
void fill_row(std::vector<BFloat16>& values, std::int64_t row, std::int64_t width, float value);
/// Multiplies every element; the product is rounded.
void scale_by(std::vector<BFloat16>& values, float factor);
/// Every row of kv_latent and k_rope that no entry of `lists` names becomes NaN.
void poison_unlisted_keys(Problem& problem, const Lists& lists);

/// For q = 0: out, lse, max_logits, dkv_latent, dk_rope and (with a sink) dsink, from the valid keys of each token as
/// the case states them. `sink`: one value per head, or empty.
Expectation means(const Problem& problem, const Lists& valid);

/// softmax_scale of the problem, default included.
double scale_of(const Problem& problem);
/// score[t,h,key] in fp64, without the scale.
double score(const Problem& problem, std::int64_t token, std::int64_t head, std::int64_t key);

/// For a token with just one valid key: P is exactly 1. `key[t]`: that key.
Expectation single_keys(const Problem& problem, const std::vector<std::int32_t>& key);

// The sections, in the order of the table.
void add_report_index_cases(std::vector<Case>& table);
void add_report_value_cases(std::vector<Case>& table);
void add_report_shape_cases(std::vector<Case>& table);
void add_shape_cases(std::vector<Case>& table);
void add_hostile_cases(std::vector<Case>& table);

}  // namespace sparsemla::cases
