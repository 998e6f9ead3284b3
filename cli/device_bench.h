// Timing of the forward on a CUDA device, in alternation with a cuBLAS product.
#pragma once

#include <string>
#include <vector>

#include "numerics/problem.h"
#include "sparsemla/attention.h"

namespace sparsemla::cli {

struct DeviceBenchRequest {
  std::vector<ProblemShape> shapes;
  std::vector<std::string> pipelines;  // training, inference, lazy, or what parse_pipeline reads
  double seconds = 0.5;                // of attention, at least, for each figure
  Device device;
  bool json = false;
};

/// Prints what it measured. Errors: an unknown pipeline, what the library refuses, not enough device memory.
void run_device_bench(const DeviceBenchRequest& request);

}  // namespace sparsemla::cli
