#include "device/call.h"

#include "device/mirror.h"

namespace sparsemla::device {
namespace {

/// Tensors of a call that are no AttentionInputs.
std::vector<Tensor ForwardArguments::*> read_by(const ForwardArguments&) { return {}; }
std::vector<Tensor ForwardArguments::*> written_by(const ForwardArguments&) {
  return {&ForwardArguments::out, &ForwardArguments::lse, &ForwardArguments::max_logits,
          &ForwardArguments::out_residual};
}
std::vector<Tensor BackwardArguments::*> read_by(const BackwardArguments&) {
  return {&BackwardArguments::out, &BackwardArguments::out_residual, &BackwardArguments::lse, &BackwardArguments::dout,
          &BackwardArguments::dlse};
}
std::vector<Tensor BackwardArguments::*> written_by(const BackwardArguments&) {
  return {&BackwardArguments::dq_latent, &BackwardArguments::dq_rope, &BackwardArguments::dkv_latent,
          &BackwardArguments::dk_rope, &BackwardArguments::dsink};
}

void call(const ForwardArguments& arguments, const Options& options) { forward(arguments, options); }
void call(const BackwardArguments& arguments, const Options& options) { backward(arguments, options); }

/// The same call with each tensor replaced by what `change` makes of it.
template <typename Arguments, typename Change>
Arguments with_tensors(const Arguments& host, const Change& change) {
  Arguments result = host;
  for (const auto member : input_members()) result.*member = change(host.*member);
  for (const auto member : read_by(host)) result.*member = change(host.*member);
  for (const auto member : written_by(host)) result.*member = change(host.*member);
  return result;
}

/// Planning reads no data, so one address serves for all tensors.
Tensor stand_in(Tensor tensor, Device where) {
  alignas(256) static std::byte somewhere[256];
  if (!tensor.defined()) return tensor;
  tensor.device = where;
  tensor.data = somewhere;
  return tensor;
}

template <typename Arguments>
Plan plan_call(Device where, const Arguments& host, const Options& options) {
  if (where.type == DeviceType::kCpu) return plan(host, options);
  return plan(with_tensors(host, [where](const Tensor& tensor) { return stand_in(tensor, where); }), options);
}

template <typename Arguments>
void make_call(Device where, const Arguments& host, Options options,
               const std::vector<std::span<std::byte>>& surroundings) {
  if (where.type == DeviceType::kCpu) return call(host, options);
  Mirror mirror(where.index);
  for (const auto block : surroundings) mirror.add(block);
  (void)with_tensors(host, [&](const Tensor& tensor) {
    mirror.add(tensor);
    return tensor;
  });
  mirror.upload();
  const auto download = [&] {
    for (const auto member : written_by(host)) mirror.download(host.*member);
  };
  try {
    const Arguments arguments = with_tensors(host, [&](const Tensor& tensor) { return mirror.view(tensor); });
    const DeviceMemory workspace(plan(arguments, options).workspace_bytes, where.index);
    options.workspace = workspace.data();
    options.workspace_bytes = workspace.bytes();
    call(arguments, options);
    synchronize(where.index);
  } catch (...) {
    download();
    throw;
  }
  download();
}

}  // namespace

Plan plan_on(Device where, const ForwardArguments& host, const Options& options) {
  return plan_call(where, host, options);
}
Plan plan_on(Device where, const BackwardArguments& host, const Options& options) {
  return plan_call(where, host, options);
}

void forward_on(Device where, const ForwardArguments& host, const Options& options,
                const std::vector<std::span<std::byte>>& surroundings) {
  make_call(where, host, options, surroundings);
}
void backward_on(Device where, const BackwardArguments& host, const Options& options,
                 const std::vector<std::span<std::byte>>& surroundings) {
  make_call(where, host, options, surroundings);
}

}  // namespace sparsemla::device
