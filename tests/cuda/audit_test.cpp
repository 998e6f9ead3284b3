// The audit with its pipelines on the device.
#include "audit/audit.h"

#include <algorithm>

#include "tests/cuda/fixture.h"

namespace sparsemla::cuda_test {
namespace {

class CudaAudit : public CudaTest {
 protected:
  static audit::AuditRequest request() {
    audit::AuditRequest request;
    request.generated = audit::preset("small");
    request.pipelines = {{"lazy", parse_pipeline("lazy"), false},
                         {"exact", parse_pipeline("exact")},
                         {"canonical", parse_pipeline("canonical")}};
    request.orders = {SlotOrder::kDominantFirst, SlotOrder::kDominantLast};
    request.options.backend = cases::kDeviceBackend;
    request.options.num_threads = 3;  // of the reference
    request.device = {DeviceType::kCuda, 0};
    return request;
  }
};

TEST_F(CudaAudit, PassesExactAndSeesLazy) {
  const audit::AuditReport report = audit::run_audit(request());
  EXPECT_EQ(report.setup.backend, cases::kDeviceBackend);
  EXPECT_TRUE(report.verdict.passed) << report.verdict.failures.front();
  ASSERT_EQ(report.order_differences.size(), 3U);
  EXPECT_GT(report.order_differences[0].ratio, 4.0) << "lazy";
  EXPECT_TRUE(report.order_differences[2].bitwise_equal) << "canonical";
  audit::AuditRequest judged = request();
  judged.pipelines[0].judged = true;
  EXPECT_FALSE(audit::run_audit(judged).verdict.passed) << "lazy, when judged";
}

TEST_F(CudaAudit, GradientsAreThereOrSaidToBeLeftOut) {
  audit::AuditRequest with_gradients = request();
  with_gradients.pipelines = {{"exact", parse_pipeline("exact")}};
  with_gradients.gradients = true;
  const audit::AuditReport report = audit::run_audit(with_gradients);
  const bool noted = std::any_of(report.notes.begin(), report.notes.end(), [](const std::string& note) {
    return note.find("gradients are left out") != std::string::npos;
  });
  EXPECT_EQ(report.gradients.empty(), noted);
}

}  // namespace
}  // namespace sparsemla::cuda_test
