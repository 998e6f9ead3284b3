#include <cmath>
#include <nlohmann/json.hpp>

#include "audit/report.h"

namespace sparsemla::audit {
namespace {

using Json = nlohmann::ordered_json;

/// JSON has no NaN and no infinity: null.
Json number(double value) { return std::isfinite(value) ? Json(value) : Json(nullptr); }

template <typename Value>
Json optional_value(const std::optional<Value>& value) {
  return value ? Json(*value) : Json(nullptr);
}
Json optional_value(const std::optional<double>& value) { return value ? number(*value) : Json(nullptr); }

Json setup_json(const SetupReport& setup) {
  return {{"source", setup.source},
          {"tokens", setup.num_tokens},
          {"keys", setup.num_keys},
          {"topk", setup.topk},
          {"heads", setup.num_heads},
          {"latent_dim", setup.latent_dim},
          {"rope_dim", setup.rope_dim},
          {"beta", optional_value(setup.beta)},
          {"seed", optional_value(setup.seed)},
          {"softmax_scale", setup.softmax_scale},
          {"causal", setup.causal},
          {"backend", setup.backend},
          {"variant", setup.variant},
          {"self_weight_median", number(setup.self_weight_median)},
          {"self_weight_p90", number(setup.self_weight_p90)},
          {"largest_lse", setup.largest_lse}};
}

Json forward_json(const ForwardEntry& entry) {
  return {
      {"pipeline", entry.pipeline},
      {"order", entry.order},
      {"judged", entry.judged},
      {"out_rel_l2", number(entry.out_rel_l2)},
      {"row_gain_rms", number(entry.row_gain.rms)},
      {"row_gain_p99", number(entry.row_gain.p99)},
      {"row_gain_max", number(entry.row_gain.max)},
      {"lse_max_abs", optional_value(entry.lse_max_abs)},
      {"nonfinite_mismatches", entry.nonfinite_mismatches},
      {"row_gain_histogram", {{"edges", entry.row_gain_histogram.edges}, {"counts", entry.row_gain_histogram.counts}}}};
}

Json difference_json(const OrderDifference& difference) {
  return {{"pipeline", difference.pipeline},
          {"orders", {difference.first_order, difference.second_order}},
          {"judged", difference.judged},
          {"out_rel_l2", number(difference.out_rel_l2)},
          {"row_gain_rms", number(difference.row_gain_rms)},
          {"noise_floor", number(difference.noise_floor)},
          {"ratio", number(difference.ratio)},
          {"bitwise_equal", difference.bitwise_equal}};
}

Json gradient_json(const GradientEntry& entry) {
  Json operands = nullptr;
  if (entry.operands) operands = *entry.operands == Operands::kSplit ? "split" : "bf16";
  const GradientErrors& errors = entry.errors;
  return {{"pipeline", entry.pipeline},
          {"order", entry.order},
          {"residual", optional_value(entry.residual)},
          {"operands", operands},
          {"dq_dtype", entry.dq_in_fp32 ? "fp32" : "bf16"},
          {"judged", entry.judged},
          {"dq_rope_rel_l2", optional_value(errors.dq_rope)},
          {"dq_latent_rel_l2", optional_value(errors.dq_latent)},
          {"dk_rope_rel_l2", optional_value(errors.dk_rope)},
          {"dkv_latent_rel_l2", optional_value(errors.dkv_latent)},
          {"dsink_rel_l2", optional_value(errors.dsink)},
          {"dq_row_p99", optional_value(errors.dq_row_p99)},
          {"dq_row_p999", optional_value(errors.dq_row_p999)},
          {"nonfinite_mismatches", entry.nonfinite_mismatches}};
}

template <typename Entry, typename ToJson>
Json array_of(const std::vector<Entry>& entries, const ToJson& to_json_value) {
  Json result = Json::array();
  for (const Entry& entry : entries) result.push_back(to_json_value(entry));
  return result;
}

}  // namespace

std::string to_json(const AuditReport& report) {
  const Json json = {
      {"setup", setup_json(report.setup)},
      {"floors",
       {{"out_rel_l2", number(report.floors.out_rel_l2)}, {"row_gain_rms", number(report.floors.row_gain_rms)}}},
      {"forward", array_of(report.forward, forward_json)},
      {"order_difference", array_of(report.order_differences, difference_json)},
      {"gradients", array_of(report.gradients, gradient_json)},
      {"notes", report.notes},
      {"verdict", {{"passed", report.verdict.passed}, {"failures", report.verdict.failures}}}};
  // A path in `setup.source` need not be UTF-8.
  return json.dump(2, ' ', false, Json::error_handler_t::replace) + "\n";
}

}  // namespace sparsemla::audit
