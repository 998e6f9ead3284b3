// The subcommands. Each function adds one to `root`; its `execute` runs after parsing and returns the exit code.
#pragma once

#include <CLI/CLI.hpp>
#include <functional>

namespace sparsemla::cli {

struct Command {
  CLI::App* app = nullptr;
  /// 0, or 1 when `audit --check` finds a budget exceeded. Errors (sparsemla::Error or another std::exception): bad
  /// input.
  std::function<int()> execute;
};

[[nodiscard]] Command add_info(CLI::App& root);
[[nodiscard]] Command add_run(CLI::App& root);
[[nodiscard]] Command add_audit(CLI::App& root);
[[nodiscard]] Command add_plan(CLI::App& root);
[[nodiscard]] Command add_bench(CLI::App& root);

}  // namespace sparsemla::cli
