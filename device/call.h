// The public calls over host tensors, run where the caller says: on the CPU as they are, on a CUDA device over copies.
#pragma once

#include <cstddef>
#include <span>
#include <vector>

#include "sparsemla/attention.h"

namespace sparsemla::device {

/// plan() for the tensors' like on `where`. Nothing is copied, and no device memory is needed.
[[nodiscard]] Plan plan_on(Device where, const ForwardArguments& host, const Options& options);
[[nodiscard]] Plan plan_on(Device where, const BackwardArguments& host, const Options& options);

/// On a device: copies inputs and outputs there, lends the workspace, makes the call, waits, copies the outputs back. A
/// call that throws has its outputs copied back too, so that one sees whether it wrote to them. `surroundings`: host
/// memory around outputs (gaps, guards) that goes both ways with them.
/// Errors: those of the call, and what the device reports while it runs.
void forward_on(Device where, const ForwardArguments& host, const Options& options,
                const std::vector<std::span<std::byte>>& surroundings = {});
void backward_on(Device where, const BackwardArguments& host, const Options& options,
                 const std::vector<std::span<std::byte>>& surroundings = {});

}  // namespace sparsemla::device
