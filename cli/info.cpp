#include <fmt/format.h>

#include <algorithm>
#include <memory>
#include <nlohmann/json.hpp>

#include "cli/commands.h"
#include "sparsemla/backend.h"

namespace sparsemla::cli {
namespace {

void print_text() {
  fmt::print("sparsemla {}\n", version());
  for (const BackendInfo& backend : backends()) {
    fmt::print("{:<6}{:<15}{}\n", backend.name, backend.available ? "available" : "not available", backend.detail);
  }
}

void print_json() {
  nlohmann::ordered_json list = nlohmann::ordered_json::array();
  for (const BackendInfo& backend : backends()) {
    list.push_back({{"name", backend.name}, {"available", backend.available}, {"detail", backend.detail}});
  }
  fmt::print("{}\n", nlohmann::ordered_json{{"version", version()}, {"backends", list}}.dump(2));
}

}  // namespace

Command add_info(CLI::App& root) {
  CLI::App* app = root.add_subcommand("info", "Which backends this build has, and why not the others");
  const auto json = std::make_shared<bool>(false);
  app->add_flag("--json", *json, "Print JSON");
  return {app, [json] {
            *json ? print_json() : print_text();
            return 0;
          }};
}

}  // namespace sparsemla::cli
