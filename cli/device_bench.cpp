#include "cli/device_bench.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <deque>
#include <functional>
#include <nlohmann/json.hpp>
#include <optional>

#include "cli/device_workload.h"
#include "cli/matrix_product.h"
#include "cli/progress.h"
#include "device/device.h"

namespace sparsemla::cli {
namespace {

using Json = nlohmann::ordered_json;

constexpr double kBatchSeconds = 0.03;  // of launches back to back between two events
constexpr int kMinBatches = 5;
constexpr const char* kFlopFormula = "2 * T * H * valid slots * (512 + rope + 512)";
constexpr const char* kByteFormula =
    "q 2*T*H*(512+rope) + gathered rows 2*T*valid*(512+rope) + indices 4*T*W + out 2*T*H*512 (twice with the residual) "
    "+ lse 4*T*H";

struct Figure {
  double median_s = 0;
  double best_s = 0;
};

Figure figure_of(std::vector<double> seconds) {
  std::sort(seconds.begin(), seconds.end());
  return {seconds[seconds.size() / 2], seconds.front()};
}

struct Row {
  ProblemShape shape;
  std::int64_t valid_slots = 0;
  std::string name;
  Plan plan;
  double flops = 0;
  double bytes = 0;
  Figure hot;
  Figure cold;
  std::optional<Figure> cublas;  // of the batches between those of `hot`

  [[nodiscard]] std::optional<double> share_of_cublas() const {
    if (!cublas) return std::nullopt;
    return flops / hot.median_s / (MatrixProduct::kFlops / cublas->median_s);
  }
};

class Bench {
 public:
  explicit Bench(const DeviceBenchRequest& request)
      : request_(request),
        facts_(device::facts(request.device.index)),
        stream_(request.device.index),
        product_(request.device.index, stream_.handle()),
        flush_(2 * facts_.l2_bytes, request.device.index) {}

  std::vector<Row> run(ProgressLine& progress) {
    std::vector<Row> rows;
    for (const ProblemShape& shape : request_.shapes) {
      progress.set(fmt::format("inputs, S {}", shape.num_keys));
      const DeviceWorkload workload(shape, request_.device.index);
      for (const std::string& name : request_.pipelines) {
        progress.set(fmt::format("S {}, {}", shape.num_keys, name));
        rows.push_back(measure(workload, shape, name));
      }
    }
    return rows;
  }
  [[nodiscard]] const device::Facts& facts() const { return facts_; }
  [[nodiscard]] const MatrixProduct& product() const { return product_; }

 private:
  /// Seconds of one of `count` calls enqueued back to back.
  double time_batch(int count, const std::function<void()>& call) {
    device::Event begin(request_.device.index);
    device::Event end(request_.device.index);
    begin.record(stream_.handle());
    for (int i = 0; i < count; ++i) call();
    end.record(stream_.handle());
    return end.seconds_since(begin) / count;
  }

  /// Calls to a batch, from a first batch that also warms up.
  int calls_in_batch(const std::function<void()>& call) {
    (void)time_batch(2, call);
    const double once = time_batch(3, call);
    return static_cast<int>(std::clamp(std::ceil(kBatchSeconds / std::max(once, 1e-7)), 1.0, 10000.0));
  }

  /// Batches of the call and of the product in turn, so that both meet the same clocks and the same heat.
  void time_hot(const std::function<void()>& call, Row& row) {
    const int count = calls_in_batch(call);
    const auto multiply = [this] { product_.enqueue(); };
    const int products = product_.available() ? calls_in_batch(multiply) : 0;
    std::vector<double> seconds;
    std::vector<double> product_seconds;
    for (double total = 0; total < request_.seconds || static_cast<int>(seconds.size()) < kMinBatches;) {
      seconds.push_back(time_batch(count, call));
      total += seconds.back() * count;
      if (products > 0) product_seconds.push_back(time_batch(products, multiply));
    }
    row.hot = figure_of(std::move(seconds));
    if (products > 0) row.cublas = figure_of(std::move(product_seconds));
  }

  /// Each call by itself, after a write of twice the L2 cache.
  void time_cold(const std::function<void()>& call, Row& row) {
    constexpr int kInFlight = 16;
    std::vector<double> seconds;
    for (double total = 0; total < request_.seconds;) {
      std::deque<device::Event> begins;
      std::deque<device::Event> ends;
      for (int i = 0; i < kInFlight; ++i) {
        device::fill(flush_.data(), static_cast<unsigned char>(i), flush_.bytes(), stream_.handle());
        begins.emplace_back(request_.device.index).record(stream_.handle());
        call();
        ends.emplace_back(request_.device.index).record(stream_.handle());
      }
      for (std::size_t i = 0; i < ends.size(); ++i) {
        seconds.push_back(ends[i].seconds_since(begins[i]));
        total += seconds.back();
      }
    }
    row.cold = figure_of(std::move(seconds));
  }

  /// What a caller of that name would ask for.
  [[nodiscard]] static Options options_of(const std::string& name) {
    Options options;
    options.backend = "sm90";
    options.purpose = name == "training" ? Purpose::kTraining : Purpose::kInference;
    if (name == "training" || name == "inference") return options;
    options.pipeline = name == "lazy" ? Pipeline::lazy_inference() : parse_pipeline(name);
    return options;
  }

  Row measure(const DeviceWorkload& workload, const ProblemShape& shape, const std::string& name) {
    Options options = options_of(name);
    const bool residual = options.pipeline ? options.pipeline->residual : options.purpose == Purpose::kTraining;
    const ForwardArguments arguments = workload.arguments(residual);
    Row row;
    row.shape = shape;
    row.valid_slots = workload.valid_slots();
    row.name = name;
    row.plan = plan(arguments, options);
    const device::DeviceMemory workspace(row.plan.workspace_bytes, request_.device.index);
    options.workspace = workspace.data();
    options.workspace_bytes = workspace.bytes();
    options.stream = stream_.handle();
    row.flops = row.plan.flops * static_cast<double>(row.valid_slots) / static_cast<double>(shape.topk);
    row.bytes = bytes_of(row, residual);
    const auto call = [&] { forward(arguments, options); };
    time_hot(call, row);
    time_cold(call, row);
    return row;
  }

  static double bytes_of(const Row& row, bool residual) {
    const auto tokens = static_cast<double>(row.shape.num_tokens);
    const double rows = tokens * static_cast<double>(row.shape.num_heads);
    const auto width = static_cast<double>(kLatentDim + row.shape.rope_dim);
    const double gathered = 2 * tokens * static_cast<double>(row.valid_slots) * width;
    const double lists = 4 * tokens * static_cast<double>(row.shape.topk);
    return 2 * rows * width + gathered + lists + 2 * rows * kLatentDim * (residual ? 2 : 1) + 4 * rows;
  }

  const DeviceBenchRequest& request_;
  device::Facts facts_;
  device::Stream stream_;
  MatrixProduct product_;
  device::DeviceMemory flush_;
};

Json figure_json(const Figure& figure, double flops, double bytes) {
  Json json = {{"seconds_median", figure.median_s},
               {"seconds_best", figure.best_s},
               {"tflops_median", flops / figure.median_s * 1e-12}};
  if (bytes > 0) json["gbytes_per_s_median"] = bytes / figure.median_s * 1e-9;
  return json;
}

Json row_json(const Row& row) {
  const std::optional<double> share = row.share_of_cublas();
  return {{"name", row.name},
          {"pipeline", to_string(row.plan.pipeline)},
          {"variant", row.plan.variant},
          {"tokens", row.shape.num_tokens},
          {"keys", row.shape.num_keys},
          {"topk", row.shape.topk},
          {"valid_slots", row.valid_slots},
          {"heads", row.shape.num_heads},
          {"rope_dim", row.shape.rope_dim},
          {"flops", row.flops},
          {"bytes", row.bytes},
          {"hot", figure_json(row.hot, row.flops, row.bytes)},
          {"cold", figure_json(row.cold, row.flops, row.bytes)},
          {"cublas", row.cublas ? figure_json(*row.cublas, MatrixProduct::kFlops, 0) : Json(nullptr)},
          {"share_of_cublas", share ? Json(*share) : Json(nullptr)}};
}

void print_json(const DeviceBenchRequest& request, const Bench& bench, const std::vector<Row>& rows) {
  Json list = Json::array();
  for (const Row& row : rows) list.push_back(row_json(row));
  const Json json = {{"operation", "forward"},
                     {"device", bench.facts().name},
                     {"multiprocessors", bench.facts().num_multiprocessors},
                     {"l2_bytes", bench.facts().l2_bytes},
                     {"seconds_at_least", request.seconds},
                     {"flop_formula", kFlopFormula},
                     {"byte_formula", kByteFormula},
                     {"cublas", bench.product().available() ? Json(bench.product().library()) : Json(nullptr)},
                     {"cublas_missing", bench.product().why_not()},
                     {"cublas_size", MatrixProduct::kSize},
                     {"results", list}};
  fmt::print("{}\n", json.dump(2));
}

void print_text(const Bench& bench, const std::vector<Row>& rows) {
  const device::Facts& facts = bench.facts();
  fmt::print("{}, {} SMs, L2 {} MiB\n", facts.name, facts.num_multiprocessors, facts.l2_bytes >> 20);
  if (bench.product().available()) {
    fmt::print("cuBLAS: bf16 {0}^3 of {1}, in alternation with each row's hot batches\n", MatrixProduct::kSize,
               bench.product().library());
  } else {
    fmt::print("cuBLAS: {}, so its columns are empty\n", bench.product().why_not());
  }
  fmt::print("hot: back to back; cold: one call after a write of twice the L2. Medians\nFLOP  {}\nbytes {}\n",
             kFlopFormula, kByteFormula);
  std::size_t width = 0;
  for (const Row& row : rows) width = std::max(width, row.name.size() + 1);
  width = std::max<std::size_t>(width, 10);
  fmt::print("{:<{}}{:>7}{:>9}{:>7}{:>6}{:>6}{:>11}{:>9}{:>9}{:>9}{:>11}{:>9}{:>9}\n", "forward", width, "T", "S", "W",
             "H", "rope", "hot ms", "TFLOP/s", "cuBLAS", "share", "cold ms", "TFLOP/s", "GB/s");
  for (const Row& row : rows) {
    const std::optional<double> share = row.share_of_cublas();
    fmt::print("{:<{}}{:>7}{:>9}{:>7}{:>6}{:>6}{:>11.4f}{:>9.1f}{:>9}{:>9}{:>11.4f}{:>9.1f}{:>9.0f}\n", row.name, width,
               row.shape.num_tokens, row.shape.num_keys, row.shape.topk, row.shape.num_heads, row.shape.rope_dim,
               row.hot.median_s * 1e3, row.flops / row.hot.median_s * 1e-12,
               row.cublas ? fmt::format("{:.1f}", MatrixProduct::kFlops / row.cublas->median_s * 1e-12) : "-",
               share ? fmt::format("{:.1f} %", *share * 100) : "-", row.cold.median_s * 1e3,
               row.flops / row.cold.median_s * 1e-12, row.bytes / row.cold.median_s * 1e-9);
  }
}

}  // namespace

void run_device_bench(const DeviceBenchRequest& request) {
  std::optional<Bench> bench;
  std::vector<Row> rows;
  {
    ProgressLine progress;
    progress.set("device");
    device::make_current(request.device.index);  // where cuBLAS starts
    bench.emplace(request);
    rows = bench->run(progress);
  }
  request.json ? print_json(request, *bench, rows) : print_text(*bench, rows);
}

}  // namespace sparsemla::cli
