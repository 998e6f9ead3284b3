#include "backends/cpu/key_blocks.h"

#include <algorithm>

namespace sparsemla::cpu {

bool has_key(const RowKeys& row, const std::int32_t* list, std::int64_t stride) noexcept {
  for (std::int64_t slot = 0; slot < row.num_slots; ++slot) {
    if (row.selects(list[slot * stride])) return true;
  }
  return false;
}

KeyBlocks::KeyBlocks(std::int64_t topk) {
  keys_.reserve(static_cast<std::size_t>(topk));
  blocks_.reserve(static_cast<std::size_t>(topk));  // at most a block a key
}

void KeyBlocks::collect(const RowKeys& row, const std::int32_t* list, std::int64_t stride) {
  keys_.clear();
  blocks_.clear();
  for (std::int64_t slot = 0; slot < row.num_slots; ++slot) {
    const std::int32_t index = list[slot * stride];
    if (row.selects(index)) keys_.push_back(row.key_begin + index);
  }
}

void KeyBlocks::cut(std::int64_t key_block) {
  const auto count = static_cast<std::int64_t>(keys_.size());
  for (std::int64_t begin = 0; begin < count; begin += key_block) {
    blocks_.push_back({begin, std::min(key_block, count - begin)});
  }
}

void KeyBlocks::assign(const RowKeys& row, const std::int32_t* list, std::int64_t stride, const Pipeline& pipeline) {
  if (pipeline.canonical) {
    collect(row, list, stride);
    std::sort(keys_.begin(), keys_.end());
    cut(pipeline.key_block);
  } else {
    keys_.clear();
    blocks_.clear();
    for (std::int64_t slot = 0; slot < row.num_slots; slot += pipeline.key_block) {
      const std::int64_t end = std::min<std::int64_t>(slot + pipeline.key_block, row.num_slots);
      const auto begin = static_cast<std::int64_t>(keys_.size());
      for (std::int64_t i = slot; i < end; ++i) {
        const std::int32_t index = list[i * stride];
        if (row.selects(index)) keys_.push_back(row.key_begin + index);
      }
      const std::int64_t count = static_cast<std::int64_t>(keys_.size()) - begin;
      if (count > 0) blocks_.push_back({begin, count});
    }
  }
  if (pipeline.walk == WalkDirection::kLastToFirst) std::reverse(blocks_.begin(), blocks_.end());
}

void KeyBlocks::assign_ascending(const RowKeys& row, const std::int32_t* list, std::int64_t stride,
                                 std::int64_t key_tile) {
  collect(row, list, stride);
  std::sort(keys_.begin(), keys_.end());
  cut(key_tile);
}

}  // namespace sparsemla::cpu
