#include <fmt/format.h>

#include <algorithm>

#include "audit/report.h"

namespace sparsemla::audit {
namespace {

/// Columns as wide as their widest cell: the first `left` of them aligned left, the others right.
class Table {
 public:
  Table(std::vector<std::string> header, std::size_t left) : left_(left) { rows_.push_back(std::move(header)); }
  void add(std::vector<std::string> row) { rows_.push_back(std::move(row)); }
  [[nodiscard]] bool empty() const { return rows_.size() == 1; }

  [[nodiscard]] std::string text() const {
    std::vector<std::size_t> widths(rows_.front().size(), 0);
    for (const auto& row : rows_) {
      for (std::size_t i = 0; i < row.size(); ++i) widths[i] = std::max(widths[i], row[i].size());
    }
    std::string result;
    for (const auto& row : rows_) {
      std::string line;
      for (std::size_t i = 0; i < row.size(); ++i) {
        if (i > 0) line += "  ";
        line += i < left_ ? fmt::format("{:<{}}", row[i], widths[i]) : fmt::format("{:>{}}", row[i], widths[i]);
      }
      line.erase(line.find_last_not_of(' ') + 1);
      result += line + "\n";
    }
    return result;
  }

 private:
  std::size_t left_;
  std::vector<std::vector<std::string>> rows_;
};

std::string scientific(double value) { return fmt::format("{:.2e}", value); }
std::string scientific(const std::optional<double>& value) { return value ? scientific(*value) : "-"; }

/// Gradient errors are read as percent, to three significant digits down to a thousandth.
std::string percent(const std::optional<double>& value) {
  if (!value) return "-";
  const double scaled = *value * 100;
  return scaled >= 10 ? fmt::format("{:.1f}", scaled) : fmt::format("{:.4f}", scaled);
}

std::string setup_text(const AuditReport& report) {
  const SetupReport& setup = report.setup;
  std::string text =
      fmt::format("setup   {}: T {}, S {}, W {}, H {}, latent {}, rope {}", setup.source, setup.num_tokens,
                  setup.num_keys, setup.topk, setup.num_heads, setup.latent_dim, setup.rope_dim);
  if (setup.beta) text += fmt::format(", beta {}", *setup.beta);
  if (setup.seed) text += fmt::format(", seed {}", *setup.seed);
  text += fmt::format("\n        softmax scale {:.6g}{}, backend {} ({})\n", setup.softmax_scale,
                      setup.causal ? ", causal" : "", setup.backend, setup.variant);
  text += fmt::format("        weight of the {} key: median {:.3f}, p90 {:.3f}\n", setup.beta ? "own" : "dominant",
                      setup.self_weight_median, setup.self_weight_p90);
  text += fmt::format("floors  (the fp64 result rounded once to bf16) out rel_l2 {}, row gain rms {}\n",
                      scientific(report.floors.out_rel_l2), scientific(report.floors.row_gain_rms));
  return text;
}

std::string forward_text(const AuditReport& report) {
  Table table({"forward", "order", "out rel_l2", "row gain rms", "p99", "max", "lse max abs"}, 2);
  for (const ForwardEntry& entry : report.forward) {
    table.add({entry.pipeline, entry.order, scientific(entry.out_rel_l2), scientific(entry.row_gain.rms),
               scientific(entry.row_gain.p99), scientific(entry.row_gain.max), scientific(entry.lse_max_abs)});
  }
  return table.text();
}

std::string difference_text(const AuditReport& report) {
  Table table({"order difference", "orders", "out rel_l2", "row gain rms", "noise floor", "ratio", "bitwise equal"}, 2);
  for (const OrderDifference& difference : report.order_differences) {
    table.add({difference.pipeline, difference.first_order + " - " + difference.second_order,
               scientific(difference.out_rel_l2), scientific(difference.row_gain_rms),
               scientific(difference.noise_floor), fmt::format("{:.2f}", difference.ratio),
               difference.bitwise_equal ? "yes" : "no"});
  }
  return table.empty() ? "" : fmt::format("\n{}", table.text());
}

std::string gradient_text(const AuditReport& report) {
  Table table({"gradients, rel_l2 in %", "order", "residual", "operands", "dq_rope", "dq_latent", "dk_rope",
               "dkv_latent", "dsink", "dq row p99", "p99.9"},
              4);
  for (const GradientEntry& entry : report.gradients) {
    const std::string residual = entry.residual ? (*entry.residual ? "on" : "off") : "-";
    const std::string operands = entry.operands ? (*entry.operands == Operands::kSplit ? "split" : "bf16") : "-";
    const GradientErrors& errors = entry.errors;
    table.add({entry.pipeline, entry.order, residual, operands, percent(errors.dq_rope), percent(errors.dq_latent),
               percent(errors.dk_rope), percent(errors.dkv_latent), percent(errors.dsink), percent(errors.dq_row_p99),
               percent(errors.dq_row_p999)});
  }
  return table.empty() ? "" : fmt::format("\n{}", table.text());
}

std::string verdict_text(const AuditReport& report) {
  std::string text = "\n";
  for (const std::string& note : report.notes) text += "note     " + note + "\n";
  if (report.verdict.passed) return text + "verdict  passed\n";
  text += fmt::format("verdict  failed: {} over budget\n", report.verdict.failures.size());
  for (const std::string& failure : report.verdict.failures) text += "  " + failure + "\n";
  return text;
}

}  // namespace

std::string to_table(const AuditReport& report) {
  return setup_text(report) + "\n" + forward_text(report) + difference_text(report) + gradient_text(report) +
         verdict_text(report);
}

}  // namespace sparsemla::audit
