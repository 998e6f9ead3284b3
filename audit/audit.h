// The experiment: run pipelines and slot orders over one problem, hold them against the fp64 reference, and say which
// rounding errors are more than rounding.
#pragma once

#include <filesystem>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "audit/report.h"
#include "numerics/problem.h"
#include "sparsemla/attention.h"

namespace sparsemla::audit {

/// Setup P of docs/numerics.md at some size (make_peaked).
struct GeneratedSource {
  ProblemShape shape;
  double beta = 0.25;
};

/// "order" (T = S = 512, W 256, H 128, beta 0.25), "residual" (the same, beta 0.4), "peaked-4096" (T = S = 4096, W
/// 2048, H 128, beta 0.25), "small" (T = S = 256, W 128, H 32, beta 0.25). Errors: another name.
[[nodiscard]] GeneratedSource preset(std::string_view name);

struct PipelineChoice {
  std::string name;  // as it stands in tables and JSON
  Pipeline pipeline;
  bool judged = true;  // false: shown, but the verdict leaves it out
};

struct AuditRequest {
  // One of the two:
  std::optional<GeneratedSource> generated;
  std::filesystem::path input_file;  // an AttentionFile

  std::vector<PipelineChoice> pipelines;
  std::vector<SlotOrder> orders;
  std::uint64_t order_seed = 1;  // of SlotOrder::kRandom
  /// For each pipeline and order the gradients with the residual on and off and operands bf16 and split. An input file
  /// must then hold dout.
  bool gradients = false;
  DataType grad_dtype = DataType::kBFloat16;  // of dq: kBFloat16 or kFloat32
  /// A CandidateFile: what some other kernel made of the same inputs (empty path: none).
  std::filesystem::path candidate_file;
  /// Where to write the inputs, for another kernel to run on (empty path: nowhere).
  std::filesystem::path write_inputs;

  std::optional<double> softmax_scale;  // wins over the input file's
  bool causal = false;
  Options options;  // backend, engine, threads; purpose and pipeline are the audit's own
  /// Where the pipelines run: the CPU, or copies of the tensors on a CUDA device. The reference and the metrics are the
  /// CPU's, and take the threads. On a device whose backend has no backward, gradients are left out, with a note.
  Device device;
};

/// Called before each step, on the calling thread.
struct ProgressStep {
  std::string what;
  int step = 0;  // 1..total
  int total = 0;
};
using ProgressCallback = std::function<void(const ProgressStep&)>;

/// Runs all of it. Holds one fp64 copy of the largest tensor at a time.
/// Errors (sparsemla::Error): no source or two, no pipeline and no candidate, what AttentionFile, CandidateFile and the
/// library reject, gradients asked for without dout.
[[nodiscard]] AuditReport run_audit(const AuditRequest& request, const ProgressCallback& progress = {});

}  // namespace sparsemla::audit
