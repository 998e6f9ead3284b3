// What a backend is to the rest of the library.
#pragma once

#include <string>
#include <vector>

#include "sparsemla/attention.h"
#include "sparsemla/backend.h"

namespace sparsemla {

/// What the caller lends to a running call. Checked against the plan: `workspace` holds plan.workspace_bytes.
struct Execution {
  void* stream = nullptr;  // a cudaStream_t of the tensors' device; null: that device's default stream
  void* workspace = nullptr;
};

/// What a backend hands to the registry. `default_pipeline` is what runs when the caller names none, and adds why.
/// `complete_*` fill in a plan's variant, threads, tiles and bytes; they throw Error for an option, a pipeline or a
/// layout that this backend does not have. forward and backward get validated arguments and a complete plan.
struct Backend {
  const char* name;
  DeviceType device;
  BackendInfo (*info)();
  Pipeline (*default_pipeline)(Purpose purpose, bool has_residual, std::vector<std::string>& reasons);
  void (*complete_forward)(Plan& plan, const ForwardArguments& arguments, const Options& options);
  void (*complete_backward)(Plan& plan, const BackwardArguments& arguments, const Options& options);
  void (*forward)(const ForwardArguments& arguments, const Plan& plan, const Execution& execution);
  void (*backward)(const BackwardArguments& arguments, const Plan& plan, const Execution& execution);
};

namespace cpu {
[[nodiscard]] const Backend& backend();
}
namespace sm90 {
[[nodiscard]] const Backend& backend();
}

}  // namespace sparsemla
