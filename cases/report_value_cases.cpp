// Public reports about log-sum-exp units, sinks, gradients into lse, and extreme scores.
#include <cmath>

#include "cases/builders.h"

namespace sparsemla::cases {
namespace {

constexpr std::uint32_t kBoth = kForward | kBackward | kCpu | kGpu;

Case mean_case(std::string name, std::vector<std::string> reports, Shape shape, Lists lists,
               std::vector<float> sink = {}) {
  return {.name = std::move(name),
          .reports = std::move(reports),
          .tags = kBoth,
          .make =
              [shape, lists, sink] {
                Problem p = q0(shape, lists);
                p.sink = sink;
                return p;
              },
          .expect = [lists](const Problem& p) { return means(p, lists); }};
}

void add_lse_units(std::vector<Case>& table) {
  const std::vector<std::string> reports = {"FlashMLA#106",    "FlashInfer#2114", "FlashInfer#4485",
                                            "FlashInfer#4650", "FlashInfer#5203", "slime SGLangSparseMLA"};
  table.push_back(mean_case("lse_is_natural", reports, {.tokens = 4, .keys = 5, .heads = 3, .topk = 5},
                            {{0, 1}, {2, 3, 4}, {1}, {0, 1, 2, 3, 4}}));
  // Tokens 0 and 1 hold the two partial lists (Z = 2 and 8) of token 2's list.
  table.push_back(mean_case("partial_lists_2_and_8", {"vLLM#43919", "vLLM#47079", "SGLang#33064"},
                            {.tokens = 3, .keys = 10, .heads = 2, .topk = 10},
                            {{9, 3}, {0, 1, 2, 4, 5, 6, 7, 8}, {0, 1, 2, 3, 4, 5, 6, 7, 8, 9}}));
}

void add_sinks(std::vector<Case>& table) {
  table.push_back(mean_case("sink_infinities", {"cuFE#676", "cuFE#940"},
                            {.tokens = 2, .keys = 5, .heads = 3, .topk = 4}, {{0, 1, 2}, {4, 1}}, {kInf, -kInf, 0.0F}));
  table.push_back(mean_case("sink_zero", {"cuFE#421", "cuFE#405", "ISEEKYAN/Megatron-LM#205"},
                            {.tokens = 3, .keys = 6, .heads = 2, .topk = 3}, {{0, 1, 2}, {3, 4, 5}, {5, 0, 2}},
                            {0.0F, 0.0F}));
  table.push_back({.name = "dsink_4096_tokens",
                   .reports = {"cuFE#676", "aiter#3070", "cuFE#1134", "FA#2893", "cuFE#817"},
                   .tags = kBoth | kRandom,
                   .make = [] {
                     Problem p = iid({.tokens = 4096, .keys = 300, .heads = 2, .topk = 8, .seed = 28});
                     p.sink = {1.5F, -0.25F};
                     return p;
                   }});
}

/// dout = 0, dlse given, one valid key a token: dq = scale * dlse * k, dk = scale * dlse * q.
Expectation dlse_single(const Problem& p) {
  Expectation e = single_keys(p, {4, 2});
  const auto times = [&](BFloat16 x, std::int64_t row) {
    return scale_of(p) * static_cast<double>(p.dlse[row]) * static_cast<double>(to_float(x));
  };
  for (std::int64_t row = 0; row < p.num_tokens * p.num_heads; ++row) {
    const std::int64_t key = row / p.num_heads == 0 ? 4 : 2;
    for (std::int64_t d = 0; d < kLatentDim; ++d) {
      e.dq_latent[row * kLatentDim + d] = times(p.kv_latent[key * kLatentDim + d], row);
      e.dkv_latent[key * kLatentDim + d] += times(p.q_latent[row * kLatentDim + d], row);
    }
    for (std::int64_t d = 0; d < kRopeDim; ++d) {
      e.dq_rope[row * kRopeDim + d] = times(p.k_rope[key * kRopeDim + d], row);
      e.dk_rope[key * kRopeDim + d] += times(p.q_rope[row * kRopeDim + d], row);
    }
  }
  if (!p.sink.empty()) {  // the sink shares out's denominator: out is stated only without one
    e.out.clear();
    e.dsink.assign(p.sink.size(), 0.0);
  }
  return e;
}

void add_lse_gradients(std::vector<Case>& table) {
  for (const bool sink : {false, true}) {
    table.push_back({.name = sink ? "dlse_single_key_sink" : "dlse_single_key",
                     .reports = {"FA#2706", "Megatron#3674"},
                     .tags = kBoth,
                     .make =
                         [sink] {
                           Problem p = iid_with_lists({.tokens = 2, .keys = 6, .heads = 3, .topk = 2}, {{4}, {-1, 2}});
                           fill(p.dout, 0.0F);
                           add_dlse(p, 36);
                           if (sink) p.sink = {1.0F, -2.0F, kInf};
                           return p;
                         },
                     .expect = dlse_single});
  }
  table.push_back({.name = "dlse_and_sink", .reports = {"FA#2706"}, .tags = kBoth | kRandom, .make = [] {
                     Problem p = iid({.tokens = 9, .keys = 90, .heads = 4, .topk = 70, .seed = 361});
                     add_dlse(p, 362);
                     p.sink = {3.0F, -1.0F, 4.5F, 0.0F};
                     return p;
                   }});
}

/// Scores that are the same for every key, exact in fp32: q_rope = (a, b), k_rope = (c, d), scale 1.
Problem constant_score(const Shape& shape, const Lists& lists, float a, float b, float c, float d) {
  Problem p = q0(shape, lists);
  fill(p.k_rope, 0.0F);
  p.softmax_scale = 1.0;
  for (std::int64_t row = 0; row < shape.tokens * shape.heads; ++row) {
    p.q_rope[row * kRopeDim] = to_bfloat16(a);
    p.q_rope[row * kRopeDim + 1] = to_bfloat16(b);
  }
  for (std::int64_t key = 0; key < shape.keys; ++key) {
    p.k_rope[key * kRopeDim] = to_bfloat16(c);
    p.k_rope[key * kRopeDim + 1] = to_bfloat16(d);
  }
  return p;
}

Expectation shifted_means(const Problem& p, const Lists& lists, double shift) {
  Expectation e = means(p, lists);
  for (double& x : e.lse) x += shift;
  for (double& x : e.max_logits) x += shift;
  e.dk_rope.clear();  // q_rope is not 0 here
  return e;
}

void add_extreme_scores(std::vector<Case>& table) {
  table.push_back({.name = "scores_minus_30000",
                   .reports = {"cuFE#1072"},
                   .tags = kBoth,
                   .make =
                       [] {
                         return constant_score({.keys = 4, .heads = 2, .topk = 4}, {{0, 1, 2, 3}}, -128, -48, 234, 1);
                       },
                   .expect =
                       [](const Problem& p) {
                         return shifted_means(p, {{0, 1, 2, 3}}, -30000.0);
                       }});
  // Two scores a natural unit apart, 5000 and 4999, at scale 1.
  table.push_back({.name = "scores_plus_5000",
                   .reports = {"cuFE#676"},
                   .tags = kBoth,
                   .make =
                       [] {
                         Problem p = constant_score({.keys = 2, .heads = 2, .topk = 2}, {{0, 1}}, 64, 1, 78, 8);
                         p.k_rope[kRopeDim + 1] = to_bfloat16(7.0F);
                         return p;
                       },
                   .expect =
                       [](const Problem& p) {
                         Expectation e;
                         const double weight = 1.0 / (1.0 + std::exp(-1.0));  // .7311
                         for (std::int64_t row = 0; row < 2; ++row) {
                           for (std::int64_t d = 0; d < kLatentDim; ++d) {
                             e.out.push_back(weight * static_cast<double>(to_float(p.kv_latent[d])) +
                                             (1.0 - weight) *
                                                 static_cast<double>(to_float(p.kv_latent[kLatentDim + d])));
                           }
                           e.lse.push_back(5000.0 - std::log(weight));
                           e.max_logits.push_back(5000.0);
                         }
                         return e;
                       }});
  // One large q element times k = 1 shifts all scores of a row; everything else is the same as without the shift.
  for (const int shift : {0, -200}) {
    table.push_back({.name = shift == 0 ? "scores_around_0" : "scores_around_minus_200",
                     .reports = {"cuFE#744"},
                     .tags = kBoth | kRandom,
                     .make = [shift] {
                       Problem p = iid({.tokens = 6, .keys = 200, .heads = 4, .topk = 128, .seed = 31});
                       for (std::int64_t key = 0; key < 200; ++key) p.k_rope[key * kRopeDim] = to_bfloat16(1.0F);
                       for (std::int64_t row = 0; row < 24; ++row) {
                         p.q_rope[row * kRopeDim] = to_bfloat16(static_cast<float>(shift) * 24.0F);
                       }
                       return p;
                     }});
  }
}

void add_unreferenced(std::vector<Case>& table) {
  for (const bool poison : {false, true}) {
    table.push_back({.name = poison ? "unreferenced_nan" : "unreferenced_numbers",
                     .reports = {"FlashInfer#941", "FlashMLA tests"},
                     .tags = kBoth | kRandom,
                     .make = [poison] {
                       Problem p = iid({.tokens = 5, .keys = 400, .heads = 3, .topk = 66, .seed = 35});
                       Lists lists(5);
                       for (std::int64_t t = 0; t < 5; ++t) {
                         lists[t].assign(p.indices.begin() + t * 66, p.indices.begin() + (t + 1) * 66);
                       }
                       if (poison) poison_unlisted_keys(p, lists);
                       return p;
                     }});
  }
}

}  // namespace

void add_report_value_cases(std::vector<Case>& table) {
  add_lse_units(table);
  add_sinks(table);
  add_lse_gradients(table);
  add_extreme_scores(table);
  add_unreferenced(table);
}

}  // namespace sparsemla::cases
