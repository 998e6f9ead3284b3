// A token's valid keys, cut into the blocks that a walk visits.
#pragma once

#include <cstdint>
#include <vector>

#include "core/index_rules.h"
#include "sparsemla/pipeline.h"

namespace sparsemla::cpu {

/// Whether a token's list holds a key at all.
[[nodiscard]] bool has_key(const RowKeys& row, const std::int32_t* list, std::int64_t stride) noexcept;

struct KeyBlock {
  std::int64_t begin = 0;  // into KeyBlocks::keys
  std::int64_t count = 0;  // > 0: a block without a valid slot is not visited
};

/// Rows of kv_latent in slot order, and blocks in visiting order. A block is `key_block` consecutive slots of the list
/// as given, less its empty ones; under `canonical`, of the ascending list of valid keys.
class KeyBlocks {
 public:
  /// Room for lists of `topk` slots; assign() then allocates nothing.
  explicit KeyBlocks(std::int64_t topk);

  void assign(const RowKeys& row, const std::int32_t* list, std::int64_t stride, const Pipeline& pipeline);
  /// Ascending keys in blocks of `key_tile`: what the backward walks, whatever the forward's walk was.
  void assign_ascending(const RowKeys& row, const std::int32_t* list, std::int64_t stride, std::int64_t key_tile);

  [[nodiscard]] const std::vector<std::int64_t>& keys() const noexcept { return keys_; }
  [[nodiscard]] const std::vector<KeyBlock>& blocks() const noexcept { return blocks_; }

 private:
  void collect(const RowKeys& row, const std::int32_t* list, std::int64_t stride);
  void cut(std::int64_t key_block);

  std::vector<std::int64_t> keys_;
  std::vector<KeyBlock> blocks_;
};

}  // namespace sparsemla::cpu
