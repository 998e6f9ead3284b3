// What an audit found, as plain values; its table, its JSON and its verdict.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "sparsemla/numerics.h"
#include "sparsemla/pipeline.h"

namespace sparsemla::audit {

/// Name of the candidate's rows, and of the order it came in.
inline constexpr const char* kCandidateName = "candidate";
inline constexpr const char* kGivenOrder = "given";

struct SetupReport {
  std::string source;  // "peaked", or the path of the input file
  std::int64_t num_tokens = 0;
  std::int64_t num_keys = 0;
  std::int64_t topk = 0;
  std::int64_t num_heads = 0;
  std::int64_t latent_dim = 0;
  std::int64_t rope_dim = 0;
  std::optional<double> beta;         // generated problems only
  std::optional<std::uint64_t> seed;  // generated problems only
  double softmax_scale = 0;
  bool causal = false;
  std::string backend;  // "cpu"
  std::string variant;  // "amx-bf16"; empty when nothing was run
  /// Over (token, head) rows: the weight of the token's dominant key. NaN without a valid slot.
  double self_weight_median = 0;
  double self_weight_p90 = 0;
  double largest_lse = 0;  // max |lse| of the reference over finite values: what an error of an fp32 lse scales with
};

/// Rows by |row gain|: counts[i] in [edges[i], edges[i+1]), log-spaced from 1e-7 to 1e-1; rows outside are counted in
/// the outermost bins.
struct Histogram {
  std::vector<double> edges;
  std::vector<std::int64_t> counts;
};

struct ForwardEntry {
  std::string pipeline;
  std::string order;
  bool judged = true;
  Pipeline settings;  // the training default for a candidate
  double out_rel_l2 = 0;
  RowGain row_gain;                   // of out against the reference
  std::optional<double> lse_max_abs;  // absent for a candidate without lse
  std::int64_t nonfinite_mismatches = 0;
  Histogram row_gain_histogram;
};

/// The same list in two orders.
struct OrderDifference {
  std::string pipeline;
  std::string first_order;
  std::string second_order;
  bool judged = true;
  bool canonical = false;  // the pipeline promises bitwise equality
  double out_rel_l2 = 0;   // ||a-b|| / ||reference||
  double row_gain_rms = 0;
  double noise_floor = 0;
  double ratio = 0;  // row_gain_rms / noise_floor; 0 when a and b are equal
  bool bitwise_equal = false;
};

/// Relative L2 errors of gradients; absent where there is no such tensor.
struct GradientErrors {
  std::optional<double> dq_rope;
  std::optional<double> dq_latent;
  std::optional<double> dk_rope;
  std::optional<double> dkv_latent;
  std::optional<double> dsink;
  std::optional<double> dq_row_p99;  // over rows of dq_latent and dq_rope side by side
  std::optional<double> dq_row_p999;
};

struct GradientEntry {
  std::string pipeline;
  std::string order;
  std::optional<bool> residual;      // absent for a candidate
  std::optional<Operands> operands;  // absent for a candidate
  bool dq_in_fp32 = false;
  /// Of a pipeline's rows those with its own residual setting are judged; the others are there to compare with.
  bool judged = true;
  GradientErrors errors;
  std::int64_t nonfinite_mismatches = 0;
};

struct Verdict {
  bool passed = true;
  std::vector<std::string> failures;  // one sentence per figure over its budget
};

struct AuditReport {
  SetupReport setup;
  Floors floors;
  std::vector<ForwardEntry> forward;
  std::vector<OrderDifference> order_differences;
  std::vector<GradientEntry> gradients;
  std::vector<std::string> notes;  // what was left out of the judgement and why
  Verdict verdict;
};

/// Holds the judged entries against the budgets. A function of the report's figures alone.
[[nodiscard]] Verdict judge(const AuditReport& report);
/// Whether judge() has limits for the size of gradient errors: not where the dominant key has all the weight, since the
/// gradients vanish there. The errors' ratios (residual, orders) are judged all the same.
[[nodiscard]] bool has_gradient_limits(const SetupReport& setup);

/// Aligned columns for a terminal.
[[nodiscard]] std::string to_table(const AuditReport& report);
/// The JSON of docs/numerics.md: plain fractions; null for a figure that does not exist or is not finite.
[[nodiscard]] std::string to_json(const AuditReport& report);

}  // namespace sparsemla::audit
