#include "reference/reference.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <exception>
#include <limits>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include "reference/problem_view.h"
#include "reference/product.h"
#include "reference/rows.h"

namespace sparsemla::reference {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

/// Calls work(i, scratch[thread]) for i in [0, count), one thread for each element of `scratch`. An exception in one of
/// them is thrown again here.
template <typename Scratch, typename Work>
void for_all(std::int64_t count, std::vector<Scratch>& scratch, const Work& work) {
  std::atomic<std::int64_t> next{0};
  std::exception_ptr error;
  std::mutex error_mutex;
  const auto run = [&](std::size_t thread) {
    try {
      for (std::int64_t i = next++; i < count; i = next++) work(i, scratch[thread]);
    } catch (...) {
      next = count;
      const std::scoped_lock lock(error_mutex);
      error = std::current_exception();
    }
  };
  {
    std::vector<std::jthread> helpers;
    const auto threads = std::min(scratch.size(), static_cast<std::size_t>(count));
    for (std::size_t thread = 1; thread < threads; ++thread) helpers.emplace_back(run, thread);
    run(0);
  }
  if (error) std::rethrow_exception(error);
}

std::size_t resolve_threads(int num_threads) {
  return num_threads > 0 ? static_cast<std::size_t>(num_threads) : std::max(1U, std::thread::hardware_concurrency());
}

// ---------------------------------------------------------------------------------------------------------------------
// Softmax over the keys of one token. Matrices are [n selected keys, H], so that loops over heads vectorise.

struct Softmax {
  Values probability;  // [n, head_stride]: P_keys[j,h] = exp(scale*score - lse)
  Values max;          // [H] max_j scale*score
  Values lse;          // [H] log sum_j exp(scale*score)
};

/// In: probability[j,h] = score. Two passes: the maximum of scale*score, then the exponentials and their sum. A NaN
/// score makes its whole row NaN, max included; so does +inf, and -inf if it is the largest.
void softmax(std::int64_t num_keys, const Extents& e, const Layout& layout, Softmax& s) {
  s.max.assign(static_cast<std::size_t>(e.heads), -kInfinity);
  s.lse.assign(static_cast<std::size_t>(e.heads), 0);
  for (std::int64_t j = 0; j < num_keys; ++j) {
    double* const row = &s.probability[j * layout.head_stride];
    for (std::int64_t h = 0; h < e.heads; ++h) {
      row[h] *= e.scale;
      if (row[h] > s.max[h] || std::isnan(row[h])) s.max[h] = row[h];
    }
  }
  Values& sum = s.lse;
  for (std::int64_t j = 0; j < num_keys; ++j) {
    double* const row = &s.probability[j * layout.head_stride];
    for (std::int64_t h = 0; h < e.heads; ++h) {
      row[h] = std::exp(row[h] - s.max[h]);
      sum[h] += row[h];
    }
  }
  for (std::int64_t j = 0; j < num_keys; ++j) {
    double* const row = &s.probability[j * layout.head_stride];
    for (std::int64_t h = 0; h < e.heads; ++h) row[h] /= sum[h];
  }
  for (std::int64_t h = 0; h < e.heads; ++h) s.lse[h] = s.max[h] + std::log(sum[h]);
}

/// The sink's logits [H], -inf (no weight) without a sink.
Values read_sink(const AttentionInputs& inputs, const Extents& e) {
  Values sink(static_cast<std::size_t>(e.heads), -kInfinity);
  if (inputs.sink.defined()) decode(inputs.sink, 0, inputs.sink.strides[0], e.heads, sink.data());
  return sink;
}

// With lse_total = log(exp(lse) + exp(sink)). Both forms take any sink, +-inf included, without overflow.
double weight_of_keys(double lse, double sink) { return 1 / (1 + std::exp(sink - lse)); }  // exp(lse - lse_total)
double weight_of_sink(double lse, double sink) { return 1 / (1 + std::exp(lse - sink)); }  // exp(sink - lse_total)

/// score[j,h] = q_rope[h,:].k_rope[j,:] + q_latent[h,:].kv_latent[j,:], both parts in one product.
void add_scores(const KeyTile& tile, const Values& q_transposed, const Layout& layout, Values& score) {
  add_product(&score[tile.begin * layout.head_stride], layout.head_stride, {tile.rows.data(), layout.stride},
              q_transposed.data(), layout.head_stride, {padded(tile.count), layout.heads, layout.columns});
}

/// Zeroes a [n, head_stride] matrix with room for whole tiles.
void clear(Values& matrix, std::int64_t num_keys, const Layout& layout) {
  const std::int64_t rows = (num_keys + kKeyTile - 1) / kKeyTile * kKeyTile;
  matrix.assign(static_cast<std::size_t>(rows * layout.head_stride), 0);
}

// ---------------------------------------------------------------------------------------------------------------------
// Forward.

struct ForwardScratch {
  std::vector<std::int64_t> keys;
  Values q;             // [heads, stride]
  Values q_transposed;  // [columns, head_stride]
  KeyTile tile;
  Softmax softmax;
  Values out;  // [heads, stride]
};

void forward_token(const AttentionInputs& inputs, const Extents& e, const Values& sink, std::int64_t token,
                   ForwardScratch& w, ForwardResult& result) {
  const Layout layout(e);
  selected_keys(inputs, e, token, w.keys);
  const auto num_keys = static_cast<std::int64_t>(w.keys.size());
  if (num_keys == 0) return;
  read_heads(inputs.q_latent, inputs.q_rope, token, layout, w.q);
  transpose(w.q, layout, w.q_transposed);

  Values& p = w.softmax.probability;
  clear(p, num_keys, layout);
  for_key_tiles(inputs, w.keys, layout, w.tile, [&] { add_scores(w.tile, w.q_transposed, layout, p); });
  softmax(num_keys, e, layout, w.softmax);

  // out[h,:] = exp(lse - lse_total) * sum_j P_keys[j,h] * kv_latent[j,:]
  w.out.assign(static_cast<std::size_t>(layout.heads * layout.stride), 0);
  for_key_tiles(inputs, w.keys, layout, w.tile, [&] {
    add_product(w.out.data(), layout.stride, {&p[w.tile.begin * layout.head_stride], 1, layout.head_stride},
                w.tile.rows.data(), layout.stride, {layout.heads, layout.rope_begin, w.tile.count});
  });
  for (std::int64_t h = 0; h < e.heads; ++h) {
    const std::int64_t row = token * e.heads + h;
    const double weight = weight_of_keys(w.softmax.lse[h], sink[h]);
    for (std::int64_t d = 0; d < e.latent; ++d) result.out[row * e.latent + d] = weight * w.out[h * layout.stride + d];
    result.lse[row] = w.softmax.lse[h];
    result.max_logits[row] = w.softmax.max[h];
  }
}

// ---------------------------------------------------------------------------------------------------------------------
// Backward.

/// What the gradients of a token's keys are made of.
struct TokenGradient {
  std::vector<std::int64_t> keys;
  Values q;      // [heads, stride]
  Values dout;   // [heads, stride], rope columns 0
  Values p;      // [n, head_stride]: P = exp(scale*score - lse_total)
  Values ds;     // [n, head_stride]
  Values dsink;  // [H], this token's part
};

struct BackwardScratch {
  Values q_transposed;
  Values dout_transposed;
  KeyTile tile;
  Softmax softmax;
  Values dq;       // [heads, stride]
  Values columns;  // [kKeyTile, some columns]
};

/// In: ds = dP. Out: p, ds, dsink.
///   dpsum = sum_j P[j] * dP[j] = dout . out         dS = (P * (dP - dpsum) + P_keys * dlse) * scale
///   dsink = -exp(sink - lse_total) * dpsum, and 0 for an infinite sink whatever the keys hold
void differentiate_softmax(const Extents& e, const Layout& layout, const Softmax& s, const Values& sink,
                           const Values& dlse, TokenGradient& g) {
  const auto num_keys = static_cast<std::int64_t>(g.keys.size());
  Values weight(static_cast<std::size_t>(e.heads));
  Values dpsum(static_cast<std::size_t>(e.heads), 0);
  for (std::int64_t h = 0; h < e.heads; ++h) weight[h] = weight_of_keys(s.lse[h], sink[h]);
  for (std::int64_t j = 0; j < num_keys; ++j)
    for (std::int64_t h = 0; h < e.heads; ++h) {
      const std::int64_t jh = j * layout.head_stride + h;
      g.p[jh] = s.probability[jh] * weight[h];
      dpsum[h] += g.p[jh] * g.ds[jh];
    }
  for (std::int64_t j = 0; j < num_keys; ++j)
    for (std::int64_t h = 0; h < e.heads; ++h) {
      const std::int64_t jh = j * layout.head_stride + h;
      g.ds[jh] = (g.p[jh] * (g.ds[jh] - dpsum[h]) + s.probability[jh] * dlse[h]) * e.scale;
    }
  for (std::int64_t h = 0; h < e.heads; ++h)
    g.dsink[h] = std::isinf(sink[h]) ? 0 : -weight_of_sink(s.lse[h], sink[h]) * dpsum[h];
}

/// Everything of one token but the scatter into its keys: fills `g`, writes the token's rows of dq.
void backward_token(const AttentionInputs& inputs, const Tensor& dout, const Tensor& dlse, const Extents& e,
                    const Values& sink, std::int64_t token, BackwardScratch& w, TokenGradient& g,
                    BackwardResult& result) {
  const Layout layout(e);
  selected_keys(inputs, e, token, g.keys);
  g.dsink.assign(static_cast<std::size_t>(e.heads), 0);
  const auto num_keys = static_cast<std::int64_t>(g.keys.size());
  if (num_keys == 0) return;
  read_heads(inputs.q_latent, inputs.q_rope, token, layout, g.q);
  read_heads(dout, {}, token, layout, g.dout);
  transpose(g.q, layout, w.q_transposed);
  transpose(g.dout, layout, w.dout_transposed);

  // dP[j,h] = dout[h,:] . kv_latent[j,:]
  Values& dp = g.ds;
  for (Values* const matrix : {&w.softmax.probability, &g.p, &dp}) clear(*matrix, num_keys, layout);
  for_key_tiles(inputs, g.keys, layout, w.tile, [&] {
    add_scores(w.tile, w.q_transposed, layout, w.softmax.probability);
    add_product(&dp[w.tile.begin * layout.head_stride], layout.head_stride, {w.tile.rows.data(), layout.stride},
                w.dout_transposed.data(), layout.head_stride, {padded(w.tile.count), layout.heads, layout.rope_begin});
  });
  softmax(num_keys, e, layout, w.softmax);
  Values dlse_of_token(static_cast<std::size_t>(e.heads), 0);
  if (dlse.defined()) decode_row(dlse, token, dlse_of_token.data());
  differentiate_softmax(e, layout, w.softmax, sink, dlse_of_token, g);

  // dq[h,:] = sum_j dS[j,h] * [kv_latent | k_rope][j,:]
  w.dq.assign(static_cast<std::size_t>(layout.heads * layout.stride), 0);
  for_key_tiles(inputs, g.keys, layout, w.tile, [&] {
    add_product(w.dq.data(), layout.stride, {&g.ds[w.tile.begin * layout.head_stride], 1, layout.head_stride},
                w.tile.rows.data(), layout.stride, {layout.heads, layout.columns, w.tile.count});
  });
  for (std::int64_t h = 0; h < e.heads; ++h) {
    const std::int64_t row = token * e.heads + h;
    const double* const dq = &w.dq[h * layout.stride];
    std::copy_n(dq, e.latent, result.dq_latent.begin() + row * e.latent);
    std::copy_n(dq + layout.rope_begin, e.rope, result.dq_rope.begin() + row * e.rope);
  }
}

/// Adds one token to `num_columns` columns (whole groups) of its keys' gradients, `begin` counted in [latent | rope]:
///   dkv_latent[i,:] += sum_h P[j,h] * dout[h,:] + dS[j,h] * q_latent[h,:]       dk_rope[i,:] += sum_h dS[j,h] *
///   q_rope[h,:]
void scatter_columns(const TokenGradient& g, const Extents& e, std::int64_t begin, std::int64_t num_columns,
                     Values& tile, BackwardResult& result) {
  const Layout layout(e);
  const auto num_keys = static_cast<std::int64_t>(g.keys.size());
  const bool latent = begin < layout.rope_begin;
  const std::int64_t first = latent ? begin : begin - layout.rope_begin;
  const std::int64_t width = latent ? e.latent : e.rope;
  double* const gradient = latent ? result.dkv_latent.data() : result.dk_rope.data();
  for (std::int64_t j0 = 0; j0 < num_keys; j0 += kKeyTile) {
    const std::int64_t count = std::min(kKeyTile, num_keys - j0);
    const ProductShape shape{padded(count), num_columns, e.heads};
    tile.assign(static_cast<std::size_t>(kKeyTile * num_columns), 0);
    if (latent)
      add_product(tile.data(), num_columns, {&g.p[j0 * layout.head_stride], layout.head_stride}, &g.dout[begin],
                  layout.stride, shape);
    add_product(tile.data(), num_columns, {&g.ds[j0 * layout.head_stride], layout.head_stride}, &g.q[begin],
                layout.stride, shape);
    for (std::int64_t j = 0; j < count; ++j) {
      double* const row = gradient + g.keys[j0 + j] * width + first;
      for (std::int64_t d = 0; d < std::min(num_columns, width - first); ++d) row[d] += tile[j * num_columns + d];
    }
  }
}

/// Columns of [latent | rope] in blocks that do not straddle the two.
std::vector<std::pair<std::int64_t, std::int64_t>> column_blocks(const Layout& layout) {
  constexpr std::int64_t kBlock = 4 * kGroup;
  std::vector<std::pair<std::int64_t, std::int64_t>> blocks;  // begin, count
  const auto add = [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t d = begin; d < end; d += kBlock) blocks.emplace_back(d, std::min(kBlock, end - d));
  };
  add(0, layout.rope_begin);
  add(layout.rope_begin, layout.columns);
  return blocks;
}

/// Tokens whose gradients are held at once. Any number gives the same bits: the scatter runs token by token.
std::int64_t token_chunk(const Extents& e, std::size_t num_threads) {
  const Layout layout(e);
  const auto doubles =
      static_cast<double>(2 * (e.width + kKeyTile) * layout.head_stride + 2 * layout.heads * layout.stride);
  constexpr double kMaxDoubles = 1 << 27;  // 1 GiB
  return std::clamp<std::int64_t>(static_cast<std::int64_t>(kMaxDoubles / doubles), 1,
                                  static_cast<std::int64_t>(4 * num_threads));
}

}  // namespace

ForwardResult forward(const AttentionInputs& inputs, int num_threads) {
  const Extents e = check(inputs);
  const Values sink = read_sink(inputs, e);
  const std::int64_t rows = e.tokens * e.heads;
  ForwardResult result;
  result.out.assign(static_cast<std::size_t>(rows * e.latent), 0);
  result.lse.assign(static_cast<std::size_t>(rows), -kInfinity);
  result.max_logits.assign(static_cast<std::size_t>(rows), -kInfinity);
  std::vector<ForwardScratch> scratch(resolve_threads(num_threads));
  for_all(e.tokens, scratch,
          [&](std::int64_t token, ForwardScratch& own) { forward_token(inputs, e, sink, token, own, result); });
  return result;
}

BackwardResult backward(const AttentionInputs& inputs, const Tensor& dout, const Tensor& dlse, int num_threads) {
  const Extents e = check(inputs);
  require(dout, "dout", Kind::kFloat, {e.tokens, e.heads, e.latent});
  if (dlse.defined()) require(dlse, "dlse", Kind::kFloat, {e.tokens, e.heads});
  const Values sink = read_sink(inputs, e);
  BackwardResult result;
  result.dq_latent.assign(static_cast<std::size_t>(e.tokens * e.heads * e.latent), 0);
  result.dq_rope.assign(static_cast<std::size_t>(e.tokens * e.heads * e.rope), 0);
  result.dkv_latent.assign(static_cast<std::size_t>(e.keys * e.latent), 0);
  result.dk_rope.assign(static_cast<std::size_t>(e.keys * e.rope), 0);
  if (inputs.sink.defined()) result.dsink.assign(static_cast<std::size_t>(e.heads), 0);

  // Chunk by chunk: each thread takes whole tokens; then each takes whole columns and adds the chunk's tokens to them
  // in token order. So every sum has one order, whatever the number of threads.
  std::vector<BackwardScratch> scratch(resolve_threads(num_threads));
  std::vector<TokenGradient> chunk(static_cast<std::size_t>(token_chunk(e, scratch.size())));
  const auto blocks = column_blocks(Layout(e));
  const auto chunk_size = static_cast<std::int64_t>(chunk.size());
  for (std::int64_t begin = 0; begin < e.tokens; begin += chunk_size) {
    const std::int64_t count = std::min(chunk_size, e.tokens - begin);
    for_all(count, scratch, [&](std::int64_t i, BackwardScratch& own) {
      backward_token(inputs, dout, dlse, e, sink, begin + i, own, chunk[i], result);
    });
    for_all(static_cast<std::int64_t>(blocks.size()), scratch, [&](std::int64_t b, BackwardScratch& own) {
      for (std::int64_t i = 0; i < count; ++i)
        scatter_columns(chunk[i], e, blocks[b].first, blocks[b].second, own.columns, result);
    });
    for (std::int64_t i = 0; i < count && inputs.sink.defined(); ++i)
      for (std::int64_t h = 0; h < e.heads; ++h) result.dsink[h] += chunk[i].dsink[h];
  }
  return result;
}

}  // namespace sparsemla::reference
