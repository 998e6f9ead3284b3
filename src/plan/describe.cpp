#include <fmt/format.h>

#include "sparsemla/attention.h"

namespace sparsemla {

std::string to_string(const Plan& plan) {
  std::string text;
  const auto line = [&text](std::string_view key, const std::string& value) {
    text += fmt::format("{:<20}{}\n", key, value);
  };
  line("operation", plan.backward ? "backward" : "forward");
  line("backend", plan.backend);
  line("variant", plan.variant);
  line("pipeline", to_string(plan.pipeline));
  line("rescale threshold", fmt::format("{} log2 units{}", plan.pipeline.rescale_threshold_log2,
                                        plan.pipeline.rescale_threshold_log2 == 0.0F ? " (exact max)" : ""));
  line("residual", plan.pipeline.residual ? "yes" : "no");
  line("operands", plan.pipeline.operands == Operands::kSplit ? "bf16 hi + lo" : "bf16");
  line("deterministic", plan.deterministic ? "yes" : "no");
  line("train = inference", plan.training_matches_inference ? "bitwise" : "no");
  line("threads", fmt::format("{}", plan.num_threads));
  line("tile", fmt::format("{} keys x {} heads", plan.key_tile, plan.head_tile));
  line("token chunk", fmt::format("{}", plan.token_chunk));
  line("workspace bytes", fmt::format("{}", plan.workspace_bytes));
  line("internal bytes", fmt::format("{}", plan.internal_bytes));
  line("flops", fmt::format("{:.4g}", plan.flops));
  for (const std::string& reason : plan.reasons) line("because", reason);
  return text;
}

}  // namespace sparsemla
