// Small audits, and ways to look into their reports.
#pragma once

#include <algorithm>
#include <filesystem>
#include <string>
#include <string_view>
#include <vector>

#include "audit/audit.h"

namespace sparsemla::audit {

/// Both orders of one small peaked problem: two key blocks a list, so that a stale max has something to be stale over.
inline AuditRequest small_request(const std::vector<std::string>& pipelines, double beta = 0.25) {
  AuditRequest request;
  request.generated = preset("small");
  request.generated->beta = beta;
  request.generated->shape.num_heads = 16;
  for (const std::string& name : pipelines) request.pipelines.push_back({name, parse_pipeline(name)});
  request.orders = {SlotOrder::kDominantFirst, SlotOrder::kDominantLast};
  return request;
}

inline const ForwardEntry& forward_of(const AuditReport& report, std::string_view pipeline, std::string_view order) {
  return *std::find_if(report.forward.begin(), report.forward.end(),
                       [&](const ForwardEntry& entry) { return entry.pipeline == pipeline && entry.order == order; });
}

inline const OrderDifference& difference_of(const AuditReport& report, std::string_view pipeline) {
  return *std::find_if(report.order_differences.begin(), report.order_differences.end(),
                       [&](const OrderDifference& difference) { return difference.pipeline == pipeline; });
}

inline const GradientEntry& gradients_of(const AuditReport& report, std::string_view pipeline, std::string_view order,
                                         bool residual, Operands operands) {
  return *std::find_if(report.gradients.begin(), report.gradients.end(), [&](const GradientEntry& entry) {
    return entry.pipeline == pipeline && entry.order == order && entry.residual == residual &&
           entry.operands == operands;
  });
}

/// How many failures hold `text`.
inline std::ptrdiff_t count_failures(const Verdict& verdict, std::string_view text) {
  return std::count_if(verdict.failures.begin(), verdict.failures.end(),
                       [&](const std::string& failure) { return failure.find(text) != std::string::npos; });
}

inline std::string joined(const Verdict& verdict) {
  std::string text;
  for (const std::string& failure : verdict.failures) text += failure + "\n";
  return text;
}

/// A folder that goes with the test.
class TemporaryFolder {
 public:
  TemporaryFolder() {
    std::string pattern = (std::filesystem::temp_directory_path() / "sparsemla_audit_XXXXXX").string();
    path_ = ::mkdtemp(pattern.data());
  }
  ~TemporaryFolder() { std::filesystem::remove_all(path_); }
  TemporaryFolder(const TemporaryFolder&) = delete;
  TemporaryFolder& operator=(const TemporaryFolder&) = delete;

  [[nodiscard]] std::filesystem::path operator/(const char* name) const { return path_ / name; }

 private:
  std::filesystem::path path_;
};

}  // namespace sparsemla::audit
