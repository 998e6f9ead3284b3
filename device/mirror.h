// Copies of host tensors on a device: the same strides, and the bytes between the elements as they are on the host.
#pragma once

#include <cstddef>
#include <span>
#include <vector>

#include "device/device.h"
#include "sparsemla/attention.h"

namespace sparsemla::device {

/// Host memory is named first (add), then copied as a whole (upload); views into it then have their like on the device.
/// Each block begins at a multiple of 256 bytes there, and ends where it ends: what runs past it is past an allocation.
class Mirror {
 public:
  explicit Mirror(int device) : device_(device) {}

  /// A block of host memory: a tensor with its gaps and guards.
  void add(std::span<std::byte> block);
  /// The bytes from the first to the last element. Views that interleave, as latent and rope part of a fused tensor do,
  /// are one block.
  void add(const Tensor& tensor);

  void upload();
  /// The tensor's like on the device; undefined for a tensor that is not given. It was added, or lies within a block
  /// that was.
  [[nodiscard]] Tensor view(const Tensor& host) const;
  /// Copies back the block around a tensor, gaps and all.
  void download(const Tensor& host) const;

 private:
  struct Block {
    std::byte* begin = nullptr;
    std::byte* end = nullptr;
    DeviceMemory memory = {};
  };
  [[nodiscard]] const Block& block_of(const Tensor& host) const;

  int device_ = 0;
  std::vector<Block> blocks_;
};

/// All tensors of AttentionInputs.
[[nodiscard]] const std::vector<Tensor AttentionInputs::*>& input_members();

}  // namespace sparsemla::device
