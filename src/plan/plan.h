// Decisions as values: pure functions from a validated call to what it will do.
#pragma once

#include "dispatch/registry.h"
#include "sparsemla/attention.h"

namespace sparsemla {

/// The backend, the pipeline and the reasons for them, completed by the backend. Throws Error where out_residual and
/// the pipeline disagree, and where the backend has no such call.
[[nodiscard]] Plan make_plan(const ForwardArguments& arguments, const Options& options);
[[nodiscard]] Plan make_plan(const BackwardArguments& arguments, const Options& options);

}  // namespace sparsemla
