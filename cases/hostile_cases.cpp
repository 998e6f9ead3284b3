// Inputs that hold garbage, infinities, subnormals, ties, or the worst order for a stale row max.
#include <cmath>

#include "cases/builders.h"

namespace sparsemla::cases {
namespace {

constexpr std::uint32_t kBoth = kForward | kBackward | kCpu | kGpu;

/// Lists of valid keys, repeats and every kind of invalid entry, with lengths, sinks and dlse.
Problem index_soup(std::uint64_t seed) {
  const Shape shape{.tokens = 37, .keys = 50, .heads = 5, .topk = 150, .seed = seed};
  Problem p = iid(shape);
  Random random(seed + 1);
  const std::int32_t bad[] = {-1, kIntMin, kIntMax, 50, 51, -50, 1 << 20, -2};
  for (auto& index : p.indices) {
    index = random.below(3) == 0 ? bad[random.below(8)] : static_cast<std::int32_t>(random.below(50));
  }
  for (std::int64_t t = 0; t < shape.tokens; ++t) {
    p.topk_length.push_back(static_cast<std::int32_t>(random.below(200)) - 25);
  }
  p.sink = {0.0F, -kInf, kInf, 2.5F, -40.0F};
  add_dlse(p, seed + 2);
  return p;
}

void add_soups(std::vector<Case>& table) {
  for (const int seed : {1, 2, 3}) {
    table.push_back({.name = "index_soup_" + std::to_string(seed),
                     .reports = {"cuFE#676", "cuFE#785", "cuFE#877", "PaddleFleet#1038"},
                     .tags = kBoth | kHostile,
                     .make = [seed] { return index_soup(900U + static_cast<std::uint64_t>(seed)); }});
  }
  table.push_back({.name = "index_soup_causal", .tags = kBoth | kHostile, .make = [] {
                     Problem p = index_soup(910);
                     p.causal = true;
                     return p;
                   }});
}

void add_sinks(std::vector<Case>& table) {
  table.push_back({.name = "sink_mix", .reports = {"cuFE#676", "cuFE#940"}, .tags = kBoth | kHostile, .make = [] {
                     Problem p = iid({.tokens = 6, .keys = 60, .heads = 10, .topk = 40, .seed = 200});
                     p.sink = {kInf, -kInf, 0.0F, -0.0F, 3.4e38F, -3.4e38F, 100.0F, -100.0F, 1e-45F, 4.0F};
                     set_list(p, 2, {});
                     set_list(p, 4, {7});
                     add_dlse(p, 201);
                     return p;
                   }});
  table.push_back({.name = "sink_on_empty_rows",
                   .reports = {"cuFE#676"},
                   .tags = kBoth | kHostile,
                   .make =
                       [] {
                         Problem p = q0({.tokens = 3, .keys = 4, .heads = 4, .topk = 3}, {{}, {1, 2}, {-1, 4, 9}});
                         p.sink = {kInf, -kInf, 1.0F, 3.4e38F};
                         return p;
                       },
                   .expect =
                       [](const Problem& p) {
                         return means(p, {{}, {1, 2}, {}});
                       }});
}

void add_ties(std::vector<Case>& table) {
  table.push_back({.name = "constant_rows",
                   .tags = kBoth | kHostile,
                   .make =
                       [] {
                         Problem p = iid({.tokens = 3, .keys = 90, .heads = 4, .topk = 77, .seed = 210});
                         fill(p.kv_latent, 1.0F);
                         fill(p.k_rope, -0.5F);
                         return p;
                       },
                   .expect =
                       [](const Problem& p) {
                         Expectation e;
                         e.out.assign(p.dout.size(), 1.0);
                         e.dq_latent.assign(p.dout.size(), 0.0);
                         e.dq_rope.assign(p.q_rope.size(), 0.0);
                         return e;
                       }});
  table.push_back({.name = "one_key_300_times",
                   .tags = kBoth | kHostile,
                   .make =
                       [] {
                         Problem p = iid({.tokens = 2, .keys = 9, .heads = 3, .topk = 300, .seed = 211});
                         std::fill(p.indices.begin(), p.indices.end(), 8);
                         return p;
                       },
                   .expect =
                       [](const Problem& p) {
                         Expectation e = single_keys(p, {8, 8});
                         for (double& x : e.lse) x += std::log(300.0);
                         return e;
                       }});
}

/// Block b of 64 slots scores `step` natural units below block b-1, so a last-to-first walk meets the row max last.
Problem staircase(double step) {
  Problem p = iid({.tokens = 2, .keys = 320, .heads = 3, .topk = 320, .seed = 220});
  scale_by(p.q_latent, 0.0F);
  fill(p.q_rope, 0.0F);
  for (std::int64_t row = 0; row < 6; ++row) p.q_rope[row * kRopeDim] = to_bfloat16(1.0F);
  for (std::int64_t key = 0; key < 320; ++key) {
    p.indices[key] = static_cast<std::int32_t>(key);
    p.indices[320 + key] = static_cast<std::int32_t>(key);
    const double jitter = 0.25 * static_cast<double>(key % 4);
    p.k_rope[key * kRopeDim] = to_bfloat16(static_cast<float>(static_cast<double>(4 - key / 64) * step + jitter));
  }
  p.softmax_scale = 1.0;
  return p;
}

void add_walk_orders(std::vector<Case>& table) {
  for (const auto& [name, step] : {std::pair{"staircase_below_threshold", 5.25},
                                   std::pair{"staircase_above_threshold", 6.0}, std::pair{"staircase_steep", 40.0}}) {
    table.push_back({.name = name, .tags = kBoth | kHostile, .make = [value = step] { return staircase(value); }});
  }
  for (const int tenths : {2, 4, 6}) {
    table.push_back({.name = "peaked_0_" + std::to_string(tenths), .tags = kBoth | kRandom, .make = [tenths] {
                       return make_peaked(
                           {.num_tokens = 150, .num_keys = 150, .topk = 100, .num_heads = 4, .seed = 230}, 0.1 * tenths,
                           /*with_gradient=*/true);
                     }});
  }
}

/// Tokens 0 and 2 list key 3, token 1 does not; token 3 is empty.
Problem with_key_3(std::uint64_t seed) {
  Problem p = iid_with_lists({.tokens = 4, .keys = 7, .heads = 3, .topk = 70, .seed = seed},
                             {{1, 3, 5}, {0, 1, 6}, {-1, 3}, {}});
  p.sink = {0.0F, -kInf, 1.0F};
  return p;
}

void add_nonfinite(std::vector<Case>& table) {
  const auto add = [&](std::string name, std::function<Problem()> make) {
    table.push_back({.name = std::move(name), .tags = kBoth | kHostile | kNonFinite, .make = std::move(make)});
  };
  add("nan_in_key_latent", [] {
    Problem p = with_key_3(240);
    p.kv_latent[3 * kLatentDim + 17] = to_bfloat16(kNan);
    return p;
  });
  add("nan_in_key_rope", [] {
    Problem p = with_key_3(241);
    p.k_rope[3 * kRopeDim + 63] = to_bfloat16(kNan);
    return p;
  });
  add("nan_in_query", [] {
    Problem p = with_key_3(242);
    p.q_latent[(2 * 3 + 1) * kLatentDim + 511] = to_bfloat16(kNan);
    p.q_rope[(3 * 3 + 0) * kRopeDim] = to_bfloat16(kNan);  // an empty row: changes nothing
    return p;
  });
  add("nan_in_dout", [] {
    Problem p = with_key_3(243);
    p.dout[(0 * 3 + 2) * kLatentDim] = to_bfloat16(kNan);
    return p;
  });
  add("nan_in_dlse", [] {
    Problem p = with_key_3(244);
    add_dlse(p, 245);
    p.dlse[1 * 3 + 2] = kNan;
    return p;
  });
  // q_rope > 0 in that column, so the score is +inf and the row's p = exp(inf - inf).
  add("plus_inf_score", [] {
    Problem p = with_key_3(247);
    for (std::int64_t row = 0; row < 12; ++row) p.q_rope[row * kRopeDim + 5] = to_bfloat16(0.5F);
    p.k_rope[3 * kRopeDim + 5] = to_bfloat16(kInf);
    return p;
  });
  // The score is -inf: weight 0, so the row's outputs are finite where other keys stand beside it, and only the product
  // 0 * -inf in dq_rope is NaN. Token 2 lists no other key: its p = exp(-inf + inf).
  add("minus_inf_score", [] {
    Problem p = with_key_3(248);
    for (std::int64_t row = 0; row < 12; ++row) p.q_rope[row * kRopeDim + 5] = to_bfloat16(0.5F);
    p.k_rope[3 * kRopeDim + 5] = to_bfloat16(-kInf);
    return p;
  });
  add("nan_everywhere_in_key", [] {
    Problem p = with_key_3(246);
    fill_row(p.kv_latent, 3, kLatentDim, kNan);
    fill_row(p.k_rope, 3, kRopeDim, kNan);
    return p;
  });
}

void add_magnitudes(std::vector<Case>& table) {
  // Key 1 holds 1e38 where no query looks; its weight is 0 for tokens 0 and 1 and all for token 2.
  table.push_back({.name = "huge_value_weight_zero", .tags = kBoth | kHostile, .make = [] {
                     Problem p = iid_with_lists({.tokens = 3, .keys = 4, .heads = 2, .topk = 66, .seed = 250},
                                                {{0, 1, 2}, {1, 3}, {1}});
                     for (std::int64_t row = 0; row < 6; ++row) {
                       p.q_latent[row * kLatentDim] = p.dout[row * kLatentDim] = to_bfloat16(0.0F);
                       fill_row(p.q_rope, row, kRopeDim, 32.0F);
                     }
                     fill_row(p.k_rope, 1, kRopeDim, -32.0F);
                     p.kv_latent[1 * kLatentDim] = to_bfloat16(1e38F);
                     return p;
                   }});
  table.push_back({.name = "huge_query_tiny_key", .tags = kBoth | kHostile, .make = [] {
                     Problem p = iid({.tokens = 3, .keys = 50, .heads = 3, .topk = 40, .seed = 251});
                     scale_by(p.q_rope, 0x1p100F);
                     scale_by(p.k_rope, 0x1p-100F);
                     return p;
                   }});
  table.push_back({.name = "tiny_values", .tags = kBoth | kHostile, .make = [] {
                     Problem p = iid({.tokens = 3, .keys = 50, .heads = 3, .topk = 40, .seed = 252});
                     scale_by(p.kv_latent, 0x1p-100F);
                     return p;
                   }});
  // A scale near the largest of which fp32 holds log2(e) times, on scores of 0.
  table.push_back({.name = "scale_near_fp32_max",
                   .tags = kBoth | kHostile,
                   .make =
                       [] {
                         Problem p = q0({.tokens = 2, .keys = 5, .heads = 2, .topk = 4}, {{0, 1, 2}, {3}});
                         p.softmax_scale = 0x1p127;
                         scale_by(p.dout, 0x1p-40F);
                         return p;
                       },
                   .expect =
                       [](const Problem& p) {
                         return means(p, {{0, 1, 2}, {3}});
                       }});
  // Integers throughout: every product is exact, every row has one key of weight 1, and all dS are exactly 0.
  table.push_back({.name = "scale_huge", .tags = kBoth | kHostile, .make = [] {
                     Problem p = iid({.tokens = 5, .keys = 60, .heads = 3, .topk = 40, .seed = 253});
                     Random random(254);
                     for (auto* v : {&p.q_latent, &p.q_rope, &p.kv_latent, &p.k_rope, &p.dout}) {
                       for (auto& x : *v) x = to_bfloat16(static_cast<float>(random.below(5) - 2));
                     }
                     p.softmax_scale = 1e6;
                     return p;
                   }});
}

void add_subnormals(std::vector<Case>& table) {
  table.push_back({.name = "subnormal_queries", .tags = kBoth | kHostile, .make = [] {
                     Problem p = iid({.tokens = 3, .keys = 50, .heads = 3, .topk = 40, .seed = 260});
                     scale_by(p.q_latent, 1e-40F);
                     scale_by(p.q_rope, 1e-40F);
                     return p;
                   }});
  table.push_back({.name = "subnormal_values", .tags = kBoth | kHostile, .make = [] {
                     Problem p = iid({.tokens = 3, .keys = 50, .heads = 3, .topk = 40, .seed = 261});
                     scale_by(p.kv_latent, 1e-39F);
                     return p;
                   }});
  // The scores are of order 1 only if subnormal bf16 inputs count as what they are.
  table.push_back({.name = "subnormal_query_times_huge_key", .tags = kBoth | kHostile | kSubnormal, .make = [] {
                     Problem p = iid({.tokens = 3, .keys = 50, .heads = 3, .topk = 40, .seed = 262});
                     fill(p.q_latent, 0.0F);
                     scale_by(p.q_rope, 0x1p-130F);
                     scale_by(p.k_rope, 0x1p100F);
                     scale_by(p.dout, 0x1p-20F);
                     p.softmax_scale = 0x1p25;
                     return p;
                   }});
}

}  // namespace

void add_hostile_cases(std::vector<Case>& table) {
  add_soups(table);
  add_sinks(table);
  add_ties(table);
  add_walk_orders(table);
  add_nonfinite(table);
  add_magnitudes(table);
  add_subnormals(table);
}

}  // namespace sparsemla::cases
