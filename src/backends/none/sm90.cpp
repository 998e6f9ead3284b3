// Stands in for the Hopper backend in a build without it: says so, and runs nothing.
#include "core/backend_interface.h"
#include "sparsemla/error.h"

namespace sparsemla::sm90 {
namespace {

constexpr const char* kWhy = "the Hopper kernels are not part of this build";

[[noreturn]] void refuse() { throw Error("backend", "\"sm90\"", kWhy); }

}  // namespace

const Backend& backend() {
  static const Backend kBackend{
      "sm90",
      DeviceType::kCuda,
      [] {
        return BackendInfo{"sm90", DeviceType::kCuda, false, kWhy};
      },
      [](Purpose, bool, std::vector<std::string>&) -> Pipeline { refuse(); },
      [](Plan&, const ForwardArguments&, const Options&) { refuse(); },
      [](Plan&, const BackwardArguments&, const Options&) { refuse(); },
      [](const ForwardArguments&, const Plan&, const Execution&) { refuse(); },
      [](const BackwardArguments&, const Plan&, const Execution&) { refuse(); },
  };
  return kBackend;
}

}  // namespace sparsemla::sm90
