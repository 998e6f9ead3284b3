#include "device/forward.h"

#include "device/mirror.h"

namespace sparsemla::device {
namespace {

constexpr Tensor ForwardArguments::*kOutputs[] = {&ForwardArguments::out, &ForwardArguments::lse,
                                                  &ForwardArguments::max_logits, &ForwardArguments::out_residual};

void download_outputs(const Mirror& mirror, const ForwardArguments& host) {
  for (const auto member : kOutputs) mirror.download(host.*member);
}

}  // namespace

void forward_on_device(const ForwardArguments& host, Options options, int device,
                       const std::vector<std::span<std::byte>>& surroundings) {
  Mirror mirror(device);
  add(mirror, host);
  for (const auto block : surroundings) mirror.add(block);
  for (const auto member : kOutputs) mirror.add(host.*member);
  mirror.upload();

  ForwardArguments arguments;
  static_cast<AttentionInputs&>(arguments) = view(mirror, host);
  for (const auto member : kOutputs) arguments.*member = mirror.view(host.*member);
  try {
    const DeviceMemory workspace(workspace_bytes(arguments, options), device);
    options.workspace = workspace.data();
    options.workspace_bytes = workspace.bytes();
    forward(arguments, options);
    synchronize(device);
  } catch (...) {
    download_outputs(mirror, host);
    throw;
  }
  download_outputs(mirror, host);
}

}  // namespace sparsemla::device
