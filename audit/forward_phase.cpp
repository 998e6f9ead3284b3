// Forward: each pipeline and order against the reference, and two orders against each other.
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <utility>

#include "audit/experiment.h"
#include "device/call.h"

namespace sparsemla::audit {
namespace {

constexpr int kHistogramBins = 60;
constexpr double kHistogramLowest = -7;  // log10 |gain|
constexpr double kHistogramHighest = -1;

Histogram histogram_of(const std::vector<double>& gains) {
  constexpr double kStep = (kHistogramHighest - kHistogramLowest) / kHistogramBins;
  Histogram histogram;
  histogram.counts.assign(kHistogramBins, 0);
  for (int i = 0; i <= kHistogramBins; ++i) {
    histogram.edges.push_back(std::pow(10.0, kHistogramLowest + i * kStep));
  }
  for (const double gain : gains) {
    // -inf for a gain of 0 and NaN for a row that is not finite both need an end of the range before the cast.
    const double bin = std::isfinite(gain) ? (std::log10(std::abs(gain)) - kHistogramLowest) / kStep : kHistogramBins;
    ++histogram.counts[static_cast<std::size_t>(std::clamp(bin, 0.0, kHistogramBins - 1.0))];
  }
  return histogram;
}

struct ReferenceViews {
  Tensor out;
  Tensor lse;
};

ForwardEntry measure(const Tensor& out, const Tensor& lse, const ReferenceViews& reference, int threads) {
  ForwardEntry entry;
  entry.out_rel_l2 = rel_l2(out, reference.out, threads);
  entry.row_gain = row_gain(out, reference.out, reference.out, threads);
  entry.row_gain_histogram = histogram_of(row_gains(out, reference.out, reference.out, threads));
  entry.nonfinite_mismatches = count_nonfinite_mismatch(out, reference.out, threads);
  if (lse.defined()) {
    entry.lse_max_abs = max_abs_difference(lse, reference.lse, threads);
    entry.nonfinite_mismatches += count_nonfinite_mismatch(lse, reference.lse, threads);
  }
  return entry;
}

/// Positions in `orders` of the two that are compared: first and last if both are there, else the first two.
std::array<std::size_t, 2> compared_orders(const std::vector<SlotOrder>& orders) {
  const auto first = std::find(orders.begin(), orders.end(), SlotOrder::kDominantFirst);
  const auto last = std::find(orders.begin(), orders.end(), SlotOrder::kDominantLast);
  if (first != orders.end() && last != orders.end()) {
    return {static_cast<std::size_t>(first - orders.begin()), static_cast<std::size_t>(last - orders.begin())};
  }
  return {0, 1};
}

OrderDifference compare(const ForwardRun& a, const ForwardRun& b, const Tensor& reference_out, int threads) {
  const RowGain gain = row_gain(a.out.view(), b.out.view(), reference_out, threads);
  OrderDifference difference;
  difference.out_rel_l2 = rel_l2_difference(a.out.view(), b.out.view(), reference_out, threads);
  difference.row_gain_rms = gain.rms;
  difference.noise_floor = gain.noise_floor;
  difference.ratio = gain.noise_floor == 0 ? 0 : gain.rms / gain.noise_floor;
  difference.bitwise_equal = bitwise_equal(a.out, b.out) && bitwise_equal(a.lse, b.lse);
  return difference;
}

ForwardRun run_one(const Experiment& experiment, const Pipeline& pipeline, SlotOrder order) {
  const std::vector<std::int32_t> lists = ordered_lists(experiment, order, pipeline.walk);
  Options options = options_for(experiment.request, pipeline);
  options.pipeline->residual = false;  // it changes no bit of out and lse, and saves a tensor as large as out
  ForwardRun run = allocate_forward(experiment.subject.sizes, false);
  device::forward_on(experiment.request.device, forward_arguments(experiment.subject.with_indices(lists), run),
                     options);
  return run;
}

void audit_pipeline(Experiment& experiment, const PipelineChoice& choice, const ReferenceViews& reference,
                    Steps& steps) {
  const AuditRequest& request = experiment.request;
  const int threads = request.options.num_threads;
  const std::array<std::size_t, 2> compared = compared_orders(request.orders);
  std::array<ForwardRun, 2> kept;
  for (std::size_t i = 0; i < request.orders.size(); ++i) {
    const std::string order(to_string(request.orders[i]));
    steps.begin(fmt::format("forward {} {}", choice.name, order));
    ForwardRun run = run_one(experiment, choice.pipeline, request.orders[i]);
    ForwardEntry entry = measure(run.out.view(), run.lse.view(), reference, threads);
    entry.pipeline = choice.name;
    entry.order = order;
    entry.judged = choice.judged;
    entry.settings = choice.pipeline;
    experiment.report.forward.push_back(std::move(entry));
    for (std::size_t side = 0; side < 2; ++side) {
      if (i == compared[side]) kept[side] = std::move(run);
    }
  }
  if (request.orders.size() < 2) return;
  OrderDifference difference = compare(kept[0], kept[1], reference.out, threads);
  difference.pipeline = choice.name;
  difference.first_order = to_string(request.orders[compared[0]]);
  difference.second_order = to_string(request.orders[compared[1]]);
  difference.judged = choice.judged;
  difference.canonical = choice.pipeline.canonical;
  experiment.report.order_differences.push_back(std::move(difference));
}

}  // namespace

int count_forward_steps(const Experiment& experiment) {
  const AuditRequest& request = experiment.request;
  return 1 + static_cast<int>(request.pipelines.size() * request.orders.size()) + (experiment.candidate ? 1 : 0);
}

void run_forward_phase(Experiment& experiment, Steps& steps) {
  const ProblemSizes& sizes = experiment.subject.sizes;
  const int threads = experiment.request.options.num_threads;
  steps.begin("fp64 reference, forward");
  reference::ForwardResult result = reference::forward(experiment.subject.inputs, threads);
  std::vector<double>().swap(result.max_logits);
  experiment.dominant = find_dominant(experiment.subject, result.lse, threads);
  experiment.report.setup.self_weight_median = experiment.dominant.weight_median;
  experiment.report.setup.self_weight_p90 = experiment.dominant.weight_p90;
  for (const double lse : result.lse) {
    double& largest = experiment.report.setup.largest_lse;
    if (std::isfinite(lse)) largest = std::max(largest, std::abs(lse));
  }

  const ReferenceViews reference = {
      Tensor::contiguous(result.out.data(), DataType::kFloat64, {sizes.num_tokens, sizes.num_heads, kLatentDim}),
      Tensor::contiguous(result.lse.data(), DataType::kFloat64, {sizes.num_tokens, sizes.num_heads})};
  experiment.report.floors = bf16_floors(reference.out, threads);
  for (const PipelineChoice& choice : experiment.request.pipelines) {
    audit_pipeline(experiment, choice, reference, steps);
  }
  if (experiment.candidate != nullptr) {
    steps.begin("forward candidate");
    ForwardEntry entry = measure(experiment.candidate->out, experiment.candidate->lse, reference, threads);
    entry.pipeline = kCandidateName;
    entry.order = kGivenOrder;
    experiment.report.forward.push_back(std::move(entry));
  }
}

}  // namespace sparsemla::audit
