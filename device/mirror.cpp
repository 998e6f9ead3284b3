#include "device/mirror.h"

#include <algorithm>
#include <array>
#include <functional>
#include <utility>

#include "sparsemla/error.h"

namespace sparsemla::device {
namespace {

/// First byte and one past the last.
std::array<std::byte*, 2> span_of(const Tensor& tensor) {
  std::int64_t lowest = 0;
  std::int64_t highest = 0;
  for (int axis = 0; axis < tensor.rank; ++axis) {
    const std::int64_t reach = (tensor.shape[axis] - 1) * tensor.strides[axis];
    (reach < 0 ? lowest : highest) += reach;
  }
  const std::int64_t element = size_bytes(tensor.dtype);
  auto* const data = static_cast<std::byte*>(tensor.data);
  return {data + lowest * element, data + (highest + 1) * element};
}

bool has_elements(const Tensor& tensor) { return tensor.defined() && tensor.num_elements() > 0; }

}  // namespace

void Mirror::add(std::span<std::byte> block) {
  Block joined{block.data(), block.data() + block.size()};
  const auto overlaps = [&](const Block& other) { return joined.begin < other.end && other.begin < joined.end; };
  // Joining may reach a further block, so as long as there is one.
  for (auto found = std::find_if(blocks_.begin(), blocks_.end(), overlaps); found != blocks_.end();
       found = std::find_if(blocks_.begin(), blocks_.end(), overlaps)) {
    joined.begin = std::min(joined.begin, found->begin);
    joined.end = std::max(joined.end, found->end);
    blocks_.erase(found);
  }
  if (joined.begin != joined.end) blocks_.push_back(std::move(joined));
}

void Mirror::add(const Tensor& tensor) {
  if (!has_elements(tensor)) return;
  const auto [begin, end] = span_of(tensor);
  add(std::span(begin, end));
}

void Mirror::upload() {
  for (Block& block : blocks_) {
    block.memory = DeviceMemory(block.end - block.begin, device_);
    copy_to_device(block.memory.data(), block.begin, block.end - block.begin);
  }
}

const Mirror::Block& Mirror::block_of(const Tensor& host) const {
  const auto [begin, end] = span_of(host);
  const auto holds = [begin = begin, end = end](const Block& block) {
    return std::less_equal<>{}(block.begin, begin) && std::less_equal<>{}(end, block.end);
  };
  const auto found = std::find_if(blocks_.begin(), blocks_.end(), holds);
  if (found == blocks_.end()) throw Error("mirror", to_string(host), "a tensor that was added");
  return *found;
}

Tensor Mirror::view(const Tensor& host) const {
  Tensor result = host;
  result.device = {DeviceType::kCuda, device_};
  if (!host.defined()) return {};
  if (!has_elements(host)) {
    result.data = nullptr;
    return result;
  }
  const Block& block = block_of(host);
  result.data = block.memory.data() + (static_cast<std::byte*>(host.data) - block.begin);
  return result;
}

void Mirror::download(const Tensor& host) const {
  if (!has_elements(host)) return;
  const Block& block = block_of(host);
  copy_to_host(block.begin, block.memory.data(), block.end - block.begin);
}

const std::vector<Tensor AttentionInputs::*>& input_members() {
  using Inputs = AttentionInputs;
  static const std::vector<Tensor Inputs::*> kMembers = {
      &Inputs::q_latent,    &Inputs::q_rope, &Inputs::kv_latent,    &Inputs::k_rope,      &Inputs::indices,
      &Inputs::topk_length, &Inputs::sink,   &Inputs::cu_seqlens_q, &Inputs::cu_seqlens_k};
  return kMembers;
}

}  // namespace sparsemla::device
