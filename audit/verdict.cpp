// The rules of docs/numerics.md over an audit's figures. A figure that is NaN has no limit of its own: it is NaN
// because the reference is not finite either, or else the non-finite elements are counted and reported.
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <utility>

#include "audit/report.h"
#include "numerics/budgets.h"

namespace sparsemla::audit {
namespace {

/// Scores up to this size are what the budget of lse is made for; beyond it fp32 errors grow with the value.
constexpr double kScoreOfLseBudget = 16;
/// From this beta on the residual shows in every gradient that is made of dS alone. Below it out's rounding is too
/// small a part of the error.
constexpr double kResidualTestBeta = 0.4;
/// On other inputs the residual setting that a pipeline has must not be worse than the other one by more than two
/// orders of one list may differ.
constexpr double kMaxOverOtherResidual = 1 + kMaxOrderGradientSpread;

std::string figure(double value) { return fmt::format("{:.4g}", value); }

bool is_setup_p(const SetupReport& setup) {
  return setup.beta && setup.num_tokens == 4096 && setup.num_keys == 4096 && setup.topk == 2048;
}

class Judge {
 public:
  explicit Judge(const AuditReport& report) : report_(report) {}

  Verdict verdict() {
    for (const ForwardEntry& entry : report_.forward) {
      if (entry.judged) judge(entry);
    }
    for (const OrderDifference& difference : report_.order_differences) {
      if (difference.judged) judge(difference);
    }
    for (const GradientEntry& entry : report_.gradients) {
      if (entry.judged) judge(entry);
    }
    return {failures_.empty(), std::move(failures_)};
  }

 private:
  void hold(const std::string& who, const std::string& what, double value, double limit) {
    if (value > limit) failures_.push_back(fmt::format("{}: {} {} > {}", who, what, figure(value), figure(limit)));
  }

  void hold_finite(const std::string& who, std::int64_t mismatches) {
    if (mismatches > 0) {
      failures_.push_back(fmt::format("{}: {} elements are not finite where the reference is, or the other way round",
                                      who, mismatches));
    }
  }

  void judge(const ForwardEntry& entry) {
    const std::string who = fmt::format("forward {} {}", entry.pipeline, entry.order);
    const Floors& floors = report_.floors;
    hold_finite(who, entry.nonfinite_mismatches);
    hold(who, "out rel_l2", entry.out_rel_l2, floors.out_rel_l2 * max_out_rel_l2_over_floor(entry.settings.operands));
    hold(who, "row gain rms", entry.row_gain.rms, floors.row_gain_rms * kMaxRowGainOverIdeal);
    if (entry.lse_max_abs) {
      constexpr std::int64_t kAnyNumber = 1;  // a largest error is not a mean: its limit does not depend on how many
      const double budget_at_16 = budget(Output::kLse, DataType::kFloat32, "cpu", entry.settings, kAnyNumber).max_abs;
      const double growth = std::max(1.0, report_.setup.largest_lse / kScoreOfLseBudget);
      hold(who, "lse max abs error", *entry.lse_max_abs, budget_at_16 * growth);
    }
  }

  /// sqrt(3/D) in the noise floor assumes elements of like size. Real activations have a few large ones, whose rounding
  /// alone is coherent: then the floor is what rounding the reference shows.
  double noise_floor_growth() const {
    if (report_.setup.beta) return 1;
    const double assumed = report_.floors.out_rel_l2 * std::sqrt(3.0 / static_cast<double>(report_.setup.latent_dim));
    return assumed > 0 ? std::max(1.0, report_.floors.row_gain_rms / assumed) : 1;
  }

  void judge(const OrderDifference& difference) {
    const std::string who = fmt::format("order difference {} {} - {}", difference.pipeline, difference.first_order,
                                        difference.second_order);
    hold(who, "row gain over noise floor", difference.ratio, kMaxOrderGainOverNoiseFloor * noise_floor_growth());
    if (difference.canonical && !difference.bitwise_equal) {
      failures_.push_back(who + ": not bitwise equal, which canonical promises");
    }
    for (const GradientEntry& a : report_.gradients) {
      if (!a.judged || a.pipeline != difference.pipeline || a.order != difference.first_order) continue;
      const GradientEntry* b = find(a.pipeline, difference.second_order, a.residual, a.operands);
      if (b != nullptr) judge_spread(a, *b);
    }
  }

  const GradientEntry* find(const std::string& pipeline, const std::string& order, std::optional<bool> residual,
                            std::optional<Operands> operands) const {
    const auto found =
        std::find_if(report_.gradients.begin(), report_.gradients.end(), [&](const GradientEntry& entry) {
          return entry.pipeline == pipeline && entry.order == order && entry.residual == residual &&
                 entry.operands == operands;
        });
    return found == report_.gradients.end() ? nullptr : &*found;
  }

  struct NamedError {
    const char* name;
    std::optional<double> GradientErrors::*error;
    double GradientBudget::*budget;
    Output output;
  };
  static constexpr std::array<NamedError, 4> kErrors = {
      {{"dq_rope", &GradientErrors::dq_rope, &GradientBudget::dq_rope, Output::kDqRope},
       {"dq_latent", &GradientErrors::dq_latent, &GradientBudget::dq_latent, Output::kDqLatent},
       {"dk_rope", &GradientErrors::dk_rope, &GradientBudget::dk_rope, Output::kDkRope},
       {"dkv_latent", &GradientErrors::dkv_latent, &GradientBudget::dkv_latent, Output::kDkvLatent}}};

  static std::string name_of(const GradientEntry& entry) {
    std::string who = fmt::format("gradients {} {}", entry.pipeline, entry.order);
    if (entry.residual) who += *entry.residual ? " residual on" : " residual off";
    if (entry.operands) who += *entry.operands == Operands::kSplit ? " split" : " bf16";
    return who;
  }

  void judge_spread(const GradientEntry& a, const GradientEntry& b) {
    for (const NamedError& which : kErrors) {
      const std::optional<double> x = a.errors.*which.error;
      const std::optional<double> y = b.errors.*which.error;
      if (!x || !y || *x == *y) continue;
      hold(fmt::format("{} and {}", name_of(a), b.order), fmt::format("{} errors apart by", which.name),
           std::max(*x, *y) / std::min(*x, *y) - 1, kMaxOrderGradientSpread);
    }
  }

  /// Limits of the table in docs/numerics.md: at setup P by beta, elsewhere by the weight of the dominant key. None
  /// where that key has all the weight: the gradients themselves vanish there.
  static std::optional<GradientBudget> table_budget(const SetupReport& setup, const GradientEntry& entry) {
    const Operands operands = entry.operands.value_or(Operands::kBf16);
    const DataType dtype = entry.dq_in_fp32 ? DataType::kFloat32 : DataType::kBFloat16;
    return is_setup_p(setup) ? gradient_budget_at_setup_p(*setup.beta, operands, dtype)
                             : gradient_budget(setup.self_weight_median, operands, dtype);
  }

  /// The table's figures are means over the many rows and keys of setup P. Elsewhere a limit is not below what the
  /// formats themselves may cost.
  double limit_of(const GradientEntry& entry, const NamedError& which, const GradientBudget& table) const {
    const double limit = table.*which.budget;
    return is_setup_p(report_.setup) ? limit : std::max(limit, generic_limit(entry, which.output));
  }

  double generic_limit(const GradientEntry& entry, Output output) const {
    Pipeline pipeline = Pipeline::training();
    pipeline.operands = entry.operands.value_or(Operands::kBf16);
    const bool is_dq = output == Output::kDqRope || output == Output::kDqLatent;
    const DataType dtype = is_dq && !entry.dq_in_fp32 ? DataType::kBFloat16 : DataType::kFloat32;
    const SetupReport& setup = report_.setup;
    const std::int64_t width = output == Output::kDqRope ? setup.rope_dim : setup.latent_dim;
    const std::int64_t num_values = std::max<std::int64_t>(1, setup.num_tokens * setup.num_heads * width);
    return budget(output, dtype, "cpu", pipeline, num_values).rel_l2;
  }

  void judge(const GradientEntry& entry) {
    const std::string who = name_of(entry);
    hold_finite(who, entry.nonfinite_mismatches);
    const std::optional<GradientBudget> table = table_budget(report_.setup, entry);
    for (const NamedError& which : kErrors) {
      const std::optional<double> error = entry.errors.*which.error;
      if (!error) continue;
      if (table) hold(who, which.name, *error, limit_of(entry, which, *table));
      judge_residual(entry, which, *error);
    }
    if (entry.errors.dsink) hold(who, "dsink", *entry.errors.dsink, generic_limit(entry, Output::kDsink));
    if (!is_setup_p(report_.setup) || !table) return;
    if (entry.errors.dq_row_p99) hold(who, "dq row p99", *entry.errors.dq_row_p99, table->dq_row_p99);
    if (entry.errors.dq_row_p999) hold(who, "dq row p99.9", *entry.errors.dq_row_p999, table->dq_row_p999);
  }

  /// dkv_latent has P^T dout in it, which the residual leaves alone: how much that hides depends on the sizes, so its
  /// limit is for those of the residual test.
  bool is_residual_test(const NamedError& which) const {
    const SetupReport& setup = report_.setup;
    if (!setup.beta || *setup.beta < kResidualTestBeta) return false;
    const bool test_sizes =
        *setup.beta == kResidualTestBeta && setup.num_tokens == 512 && setup.num_keys == 512 && setup.topk == 256;
    return test_sizes || which.output != Output::kDkvLatent;
  }

  void judge_residual(const GradientEntry& entry, const NamedError& which, double error) {
    if (!entry.residual) return;
    const GradientEntry* other = find(entry.pipeline, entry.order, !*entry.residual, entry.operands);
    if (other == nullptr || !(other->errors.*which.error)) return;
    const double other_error = *(other->errors.*which.error);
    const double without = *entry.residual ? other_error : error;
    const std::string who = name_of(entry);
    if (is_residual_test(which)) {
      hold(who, fmt::format("{} over that without the residual", which.name), error / without, kMaxResidualOverNone);
    } else {
      hold(who, fmt::format("{} over that with the residual {}", which.name, *entry.residual ? "off" : "on"),
           error / other_error, kMaxOverOtherResidual);
    }
  }

  const AuditReport& report_;
  std::vector<std::string> failures_;
};

}  // namespace

bool has_gradient_limits(const SetupReport& setup) {
  return is_setup_p(setup)
             ? gradient_budget_at_setup_p(*setup.beta, Operands::kBf16, DataType::kBFloat16).has_value()
             : gradient_budget(setup.self_weight_median, Operands::kBf16, DataType::kBFloat16).has_value();
}

Verdict judge(const AuditReport& report) { return Judge(report).verdict(); }

}  // namespace sparsemla::audit
