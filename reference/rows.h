// The tokens' and keys' rows in fp64, laid out for the products.
//
// A query or key row is [latent | rope], each part padded with zeros to whole groups. Two rows are an odd number of
// groups apart, so that a column of a matrix does not fall into a few cache sets.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "reference/problem_view.h"
#include "reference/product.h"

namespace sparsemla::reference {

using Values = std::vector<double>;

/// Keys gathered at a time: 64 rows of 576 doubles stay in a second-level cache.
inline constexpr std::int64_t kKeyTile = 64;

inline std::int64_t row_stride(std::int64_t columns) {
  return padded(columns) + (padded(columns) / kGroup % 2 == 0 ? kGroup : 0);
}

struct Layout {
  explicit Layout(const Extents& e)
      : heads(padded(e.heads)),
        rope_begin(padded(e.latent)),
        columns(padded(e.latent) + padded(e.rope)),
        stride(row_stride(columns)),
        head_stride(row_stride(e.heads)) {}

  std::int64_t heads;        // H in whole groups
  std::int64_t rope_begin;   // first rope column
  std::int64_t columns;      // [latent | rope]
  std::int64_t stride;       // between rows of [latent | rope]
  std::int64_t head_stride;  // between rows of [H]
};

/// rows[h, :] = [latent[token,h,:] | rope[token,h,:]]. `rope` may be undefined.
inline void read_heads(const Tensor& latent, const Tensor& rope, std::int64_t token, const Layout& layout,
                       Values& rows) {
  rows.assign(static_cast<std::size_t>(layout.heads * layout.stride), 0);
  for (std::int64_t h = 0; h < latent.shape[1]; ++h) {
    decode_row(latent, token, h, &rows[h * layout.stride]);
    if (rope.defined()) decode_row(rope, token, h, &rows[h * layout.stride + layout.rope_begin]);
  }
}

/// transposed[d, h] = rows[h, d].
inline void transpose(const Values& rows, const Layout& layout, Values& transposed) {
  transposed.resize(static_cast<std::size_t>(layout.columns * layout.head_stride));
  for (std::int64_t d = 0; d < layout.columns; ++d)
    for (std::int64_t h = 0; h < layout.heads; ++h)
      transposed[d * layout.head_stride + h] = rows[h * layout.stride + d];
}

/// One token's keys, kKeyTile at a time.
struct KeyTile {
  std::int64_t begin = 0;  // position in the token's list of selected keys
  std::int64_t count = 0;
  Values rows;  // [kKeyTile, stride]: [latent | rope]; rows past count are stale numbers whose products nobody reads
};

/// Calls use() with the tile filled, for the tiles of `keys` in order.
template <typename Use>
void for_key_tiles(const AttentionInputs& inputs, const std::vector<std::int64_t>& keys, const Layout& layout,
                   KeyTile& tile, const Use& use) {
  tile.rows.resize(static_cast<std::size_t>(kKeyTile * layout.stride));
  const auto num_keys = static_cast<std::int64_t>(keys.size());
  for (tile.begin = 0; tile.begin < num_keys; tile.begin += kKeyTile) {
    tile.count = std::min(kKeyTile, num_keys - tile.begin);
    for (std::int64_t j = 0; j < tile.count; ++j) {
      double* const row = &tile.rows[j * layout.stride];
      decode_row(inputs.kv_latent, keys[tile.begin + j], row);
      if (inputs.k_rope.defined()) decode_row(inputs.k_rope, keys[tile.begin + j], row + layout.rope_begin);
    }
    use();
  }
}

}  // namespace sparsemla::reference
