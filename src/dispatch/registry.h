// The ordered list of backends, and the choice among them.
#pragma once

#include <string>

#include "core/backend_interface.h"

namespace sparsemla {

/// The backend named by options.backend, or the first available one for `device`. Never another one than was asked for:
/// throws Error that says why not.
[[nodiscard]] const Backend& select_backend(const Options& options, Device device);

/// The backend that a plan names.
[[nodiscard]] const Backend& find_backend(const std::string& name);

}  // namespace sparsemla
