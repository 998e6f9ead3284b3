#include "dispatch/registry.h"

#include <fmt/format.h>

#include <array>

#include "sparsemla/error.h"

namespace sparsemla {
namespace {

std::array<const Backend*, 2> all_backends() { return {&sm90::backend(), &cpu::backend()}; }

std::string describe_all() {
  std::string text;
  for (const Backend* backend : all_backends()) {
    const BackendInfo info = backend->info();
    if (!text.empty()) text += "; ";
    text += info.available ? info.name : fmt::format("not {}: {}", info.name, info.detail);
  }
  return text;
}

const Backend* find(const std::string& name) {
  for (const Backend* backend : all_backends()) {
    if (name == backend->name) return backend;
  }
  return nullptr;
}

}  // namespace

const Backend& find_backend(const std::string& name) {
  const Backend* backend = find(name);
  if (backend == nullptr) throw Error("backend", fmt::format("\"{}\"", name), describe_all());
  return *backend;
}

const Backend& select_backend(const Options& options, Device device) {
  if (!options.backend.empty()) {
    const Backend& backend = find_backend(options.backend);
    const BackendInfo info = backend.info();
    if (!info.available) throw Error("backend", fmt::format("\"{}\" ({})", info.name, info.detail), describe_all());
    if (backend.device != device.type) {
      throw Error("backend", fmt::format("\"{}\" with tensors on {}", info.name, to_string(device)),
                  "the backend of the tensors' device");
    }
    return backend;
  }
  for (const Backend* backend : all_backends()) {
    if (backend->device == device.type && backend->info().available) return *backend;
  }
  throw Error("q_latent", fmt::format("a tensor on {}", to_string(device)),
              fmt::format("a device that a backend of this build runs on ({})", describe_all()));
}

std::vector<BackendInfo> backends() {
  std::vector<BackendInfo> infos;
  for (const Backend* backend : all_backends()) infos.push_back(backend->info());
  return infos;
}

const char* version() noexcept { return SPARSEMLA_VERSION; }

}  // namespace sparsemla
