// Shapes, layouts, causal limits, packed documents, scales: everything ordinary, and the empty ends of it.
#include <algorithm>

#include "cases/builders.h"

namespace sparsemla::cases {
namespace {

constexpr std::uint32_t kBoth = kForward | kBackward | kCpu | kGpu;

Case plain(std::string name, Shape shape, std::uint32_t more_tags = kRandom) {
  return {.name = std::move(name), .tags = kBoth | more_tags, .make = [shape] { return iid(shape); }};
}

void add_degenerate(std::vector<Case>& table) {
  table.push_back(plain("no_tokens", {.tokens = 0, .keys = 5, .heads = 3, .topk = 4}, 0));
  table.push_back(plain("no_keys", {.tokens = 3, .keys = 0, .heads = 3, .topk = 4}, 0));
  table.push_back(plain("no_slots", {.tokens = 3, .keys = 5, .heads = 3, .topk = 0}, 0));
  table.push_back(plain("nothing", {.tokens = 0, .keys = 0, .heads = 1, .topk = 0}, 0));
  table.push_back(plain("one_of_each", {}, 0));
  table.push_back(plain("one_of_each_no_rope", {.rope = 0}, 0));
  table.push_back(plain("more_slots_than_keys", {.tokens = 4, .keys = 3, .heads = 2, .topk = 10}, 0));
  table.push_back({.name = "no_keys_listed_anyway", .tags = kBoth | kHostile, .make = [] {
                     Problem p = iid({.tokens = 3, .keys = 0, .heads = 2, .topk = 4});
                     p.indices = {0, 1, -1, kIntMax, 0, 0, 0, 0, kIntMin, 5, -5, 0};
                     p.sink = {1.0F, -kInf};
                     return p;
                   }});
  for (const int tokens : {1, 2, 3, 7, 33}) {
    table.push_back(
        plain("tokens_" + std::to_string(tokens), {.tokens = tokens, .keys = 50, .heads = 9, .topk = 20, .seed = 100}));
  }
  table.push_back(plain("two_super_blocks", {.tokens = 2, .keys = 2500, .heads = 3, .topk = 2049, .seed = 101}));
  table.push_back(plain("topk_4100", {.tokens = 3, .keys = 4200, .heads = 2, .topk = 4100, .seed = 102}));
  table.push_back(plain("no_rope", {.tokens = 6, .keys = 150, .heads = 17, .topk = 100, .rope = 0, .seed = 103}));
  table.push_back(plain("heads_256_topk_300", {.tokens = 2, .keys = 400, .heads = 256, .topk = 300, .seed = 104}));
}

Case causal(std::string name, Shape shape) {
  return {.name = std::move(name), .tags = kBoth | kRandom, .make = [shape] {
            Problem p = iid(shape);
            p.causal = true;
            return p;
          }};
}

void add_causal(std::vector<Case>& table) {
  table.push_back(causal("causal_square", {.tokens = 40, .keys = 40, .heads = 3, .topk = 40, .seed = 110}));
  table.push_back(causal("causal_more_keys", {.tokens = 20, .keys = 90, .heads = 3, .topk = 66, .seed = 111}));
  // The first 50 tokens stand before the first key.
  table.push_back(causal("causal_more_tokens", {.tokens = 70, .keys = 20, .heads = 3, .topk = 20, .seed = 112}));
  table.push_back({.name = "causal_limit_by_hand",
                   .tags = kBoth | kHostile,
                   .make =
                       [] {
                         Problem p = q0({.tokens = 4, .keys = 5, .heads = 2, .topk = 7},
                                        {{0, 1, 2, 3, 4, 5, -1}, {2, 3, 0}, {4, 3, 3, 3}, {4, 5, 6, 1}});
                         p.causal = true;  // token t sees keys < t + 2
                         return p;
                       },
                   .expect =
                       [](const Problem& p) {
                         return means(p, {{0, 1}, {2, 0}, {3, 3, 3}, {4, 1}});
                       }});
}

/// Documents: 3 tokens over 40 keys, none over none, none over 7 keys, 5 tokens over 5 keys, 2 tokens over no key,
/// 9 tokens over 3 keys; then 4 tokens and 6 keys that belong to no document.
Problem documents(bool causal) {
  Problem p = iid({.tokens = 23, .keys = 61, .heads = 3, .topk = 33, .seed = 120});
  Random random(121);
  for (auto& index : p.indices) index = static_cast<std::int32_t>(random.below(44)) - 2;
  p.cu_seqlens_q = {0, 3, 3, 3, 8, 10, 19};
  p.cu_seqlens_k = {0, 40, 40, 47, 52, 52, 55};
  p.causal = causal;
  return p;
}

void add_documents(std::vector<Case>& table) {
  table.push_back({.name = "packed_documents", .tags = kBoth | kHostile, .make = [] { return documents(false); }});
  table.push_back(
      {.name = "packed_documents_causal", .tags = kBoth | kHostile, .make = [] { return documents(true); }});
  table.push_back({.name = "packed_all_tokens_outside", .tags = kBoth | kHostile, .make = [] {
                     Problem p = iid({.tokens = 4, .keys = 6, .heads = 2, .topk = 4, .seed = 122});
                     p.cu_seqlens_q = {0};
                     p.cu_seqlens_k = {0};
                     return p;
                   }});
  // Documents of 2 and 3 tokens over 3 and 2 keys; token t of a document sees keys < t + 1 + K - Q.
  table.push_back({.name = "packed_causal_by_hand",
                   .tags = kBoth | kHostile,
                   .make =
                       [] {
                         Problem p = q0({.tokens = 6, .keys = 6, .heads = 2, .topk = 4},
                                        {{0, 1, 2, 3}, {2, 2, 3, 0}, {0, 1}, {0, 1}, {1, 0, 2, -1}, {0, 1, 2, 3}});
                         p.cu_seqlens_q = {0, 2, 5};
                         p.cu_seqlens_k = {0, 3, 5};
                         p.causal = true;
                         return p;
                       },
                   .expect =
                       [](const Problem& p) {
                         return means(p, {{0, 1}, {2, 2, 0}, {}, {3}, {4, 3}, {}});
                       }});
}

void add_layouts(std::vector<Case>& table) {
  for (const Layout layout : {Layout::kFused, Layout::kPadded, Layout::kTransposed, Layout::kReversed,
                              Layout::kInterleaved, Layout::kAlignedRows}) {
    table.push_back(
        {.name = "layout_" + std::string(to_string(layout)), .tags = kBoth | kRandom, .layout = layout, .make = [] {
           Problem p = iid({.tokens = 5, .keys = 90, .heads = 6, .topk = 70, .seed = 130});
           add_dlse(p, 131);
           p.topk_length = {70, 0, 69, 65, 3};
           p.sink = {0.0F, 1.0F, -1.0F, 2.0F, -kInf, 0.5F};
           p.cu_seqlens_q = {0, 2, 5};
           p.cu_seqlens_k = {0, 45, 90};
           return p;
         }});
  }
  table.push_back({.name = "layout_broadcast", .tags = kBoth | kRandom, .layout = Layout::kBroadcast, .make = [] {
                     Problem p = iid({.tokens = 4, .keys = 60, .heads = 3, .topk = 40, .seed = 132});
                     const auto repeat = [](auto& values) {
                       const auto row = static_cast<std::int64_t>(values.size() / 4);
                       for (int t = 1; t < 4; ++t) std::copy_n(values.begin(), row, values.begin() + t * row);
                     };
                     repeat(p.q_latent);
                     repeat(p.q_rope);
                     repeat(p.indices);
                     repeat(p.dout);
                     return p;
                   }});
}

void add_scales(std::vector<Case>& table) {
  // Not 1.0 of the default: 1/sqrt(192) is the pre-absorption head width of DeepSeek models.
  for (const auto& [name, scale] : {std::pair{"scale_of_192", 0.0721687836}, std::pair{"scale_negative", -0.05},
                                    std::pair{"scale_zero", 0.0}, std::pair{"scale_tiny", 1e-30}}) {
    table.push_back(
        {.name = name, .tags = kBoth | (scale < 0 || scale > 1e-20 ? kRandom : kHostile), .make = [value = scale] {
           Problem p = iid({.tokens = 5, .keys = 100, .heads = 4, .topk = 70, .seed = 140});
           p.softmax_scale = value;
           p.sink = {0.0F, 1.0F, -3.0F, 5.0F};
           add_dlse(p, 141);
           return p;
         }});
  }
}

}  // namespace

void add_shape_cases(std::vector<Case>& table) {
  add_degenerate(table);
  add_causal(table);
  add_documents(table);
  add_layouts(table);
  add_scales(table);
}

}  // namespace sparsemla::cases
