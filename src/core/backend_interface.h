// What a backend is to the rest of the library.
#pragma once

#include "sparsemla/attention.h"
#include "sparsemla/backend.h"

namespace sparsemla {

/// What a backend hands to the registry. `complete` fills in a plan's variant, threads, tiles and bytes; it throws
/// Error for an option that this backend does not have. forward and backward get validated arguments and a complete
/// plan.
struct Backend {
  const char* name;
  DeviceType device;
  BackendInfo (*info)();
  void (*complete)(Plan& plan, const AttentionInputs& inputs, const Options& options);
  void (*forward)(const ForwardArguments& arguments, const Plan& plan);
  void (*backward)(const BackwardArguments& arguments, const Plan& plan);
};

namespace cpu {
[[nodiscard]] const Backend& backend();
}
namespace sm90 {
[[nodiscard]] const Backend& backend();
}

}  // namespace sparsemla
