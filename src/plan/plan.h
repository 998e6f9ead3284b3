// Decisions as values: pure functions from a validated call to what it will do.
#pragma once

#include "dispatch/registry.h"
#include "sparsemla/attention.h"

namespace sparsemla {

/// The pipeline, and the reason for it. `has_residual`: whether out_residual is given. Throws Error where the argument
/// and the pipeline disagree about the residual.
[[nodiscard]] Plan make_plan(const AttentionInputs& inputs, const Options& options, bool backward, bool has_residual);

}  // namespace sparsemla
