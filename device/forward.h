// The public calls over host tensors, run on a device.
#pragma once

#include <cstddef>
#include <span>
#include <vector>

#include "sparsemla/attention.h"

namespace sparsemla::device {

/// Copies inputs and outputs there, lends the workspace, calls forward(), waits, copies the outputs back; a call that
/// throws has its outputs copied back too, so that one sees whether it wrote to them. `surroundings`: host memory
/// around outputs (gaps, guards) that goes both ways with them.
/// Errors: those of forward(), and what the device reports while the call runs.
void forward_on_device(const ForwardArguments& host, Options options, int device = 0,
                       const std::vector<std::span<std::byte>>& surroundings = {});

}  // namespace sparsemla::device
