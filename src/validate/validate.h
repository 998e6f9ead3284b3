// Every rejection, each with its sentence. After this nobody checks again.
#pragma once

#include "sparsemla/attention.h"

namespace sparsemla {

/// Shapes, dtypes, null pointers, devices, overlap of outputs with themselves; and, for CPU tensors, cu_seqlens'
/// values. Throws Error.
void validate(const ForwardArguments& arguments);
void validate(const BackwardArguments& arguments);
/// Throws Error for a pipeline that cannot be run safely, or whose dtype is not built.
void validate(const Pipeline& pipeline);
void validate(const Options& options);
/// Throws Error where the workspace given is not what the plan of a call that is about to run needs.
void validate_workspace(const Options& options, const Plan& plan);

}  // namespace sparsemla
