// Which backends this build has, and why not the others.
#pragma once

#include <string>
#include <vector>

#include "sparsemla/tensor.h"

namespace sparsemla {

struct BackendInfo {
  std::string name;  // "cpu", "sm90"
  DeviceType device = DeviceType::kCpu;
  bool available = false;
  std::string detail;  // what it will use ("amx-bf16, avx512, 2 threads"), or why it is not available
};

/// In order of preference.
[[nodiscard]] std::vector<BackendInfo> backends();

/// The library's version, "0.1.0".
[[nodiscard]] const char* version() noexcept;

}  // namespace sparsemla
