// Public reports about indices, list lengths, empty rows and packed documents.
#include <numeric>

#include "cases/builders.h"

namespace sparsemla::cases {
namespace {

constexpr std::uint32_t kBoth = kForward | kBackward | kCpu | kGpu;

/// A q = 0 case: `lists` as the caller sends them, `valid` as they must be understood.
Case mean_case(std::string name, std::vector<std::string> reports, Shape shape, Lists lists, Lists valid) {
  return {.name = std::move(name),
          .reports = std::move(reports),
          .tags = kBoth | kHostile,
          .make = [shape, lists = std::move(lists)] { return q0(shape, lists); },
          .expect = [valid = std::move(valid)](const Problem& p) { return means(p, valid); }};
}

/// The same with topk_length.
Case length_case(std::string name, std::vector<std::string> reports, Shape shape, Lists lists,
                 std::vector<std::int32_t> lengths, Lists valid) {
  Case result = mean_case(std::move(name), std::move(reports), shape, {}, std::move(valid));
  result.make = [shape, lists = std::move(lists), lengths = std::move(lengths)] {
    Problem problem = q0(shape, lists);
    problem.topk_length = lengths;
    return problem;
  };
  return result;
}

void add_bad_indices(std::vector<Case>& table) {
  table.push_back(mean_case("bad_indices", {"cuFE#676"}, {.tokens = 1, .keys = 4, .heads = 2, .topk = 64},
                            {{0, 2, -1, 4, kIntMax, kIntMin}}, {{0, 2}}));
  table.push_back(mean_case("bad_indices_edges", {"cuFE#676", "FA#2755"},
                            {.tokens = 4, .keys = 5, .heads = 3, .topk = 9},
                            {{5, 4, -2, 6, 0, -5, 0x7FFF0000, 65536, -65536},
                             {kIntMin, kIntMin + 1, kIntMin + 4, kIntMax - 4, -1, -1, -1, -1, 3},
                             {-1, -1, -1, -1, -1, -1, -1, -1, -1},
                             {1 << 30, 1 << 22, 1 << 23, 1 << 24, 4, 2, 512, 576, -512}},
                            {{4, 0}, {3}, {}, {4, 2}}));
  table.push_back(mean_case("both_sentinels", {"TileLang V32 sentinel"},
                            {.tokens = 2, .keys = 6, .heads = 2, .topk = 8},
                            {{6, 1, -1, 5, 6, -1}, {6, 6, 6, 6, 6, 6, 6, 6}}, {{1, 5}, {}}));
  table.push_back(mean_case("duplicates", {"TileLang reference against kernel"},
                            {.tokens = 2, .keys = 3, .heads = 2, .topk = 5}, {{0, 0, 1}, {2, 2, 2, 2, 0}},
                            {{0, 0, 1}, {2, 2, 2, 2, 0}}));
}

void add_lengths(std::vector<Case>& table) {
  table.push_back(length_case("length_zero", {"cuFE#439", "cuFE#433"}, {.tokens = 2, .keys = 4, .heads = 2, .topk = 4},
                              {{0, 1, 2, 3}, {3, 1, 0, 2}}, {0, 3}, {{}, {3, 1, 0}}));
  table.push_back(length_case("length_clamped", {"cuFE#785"}, {.tokens = 7, .keys = 8, .heads = 2, .topk = 5},
                              {{0, 1, 2, 3, 4},
                               {0, 1, 2, 3, 4},
                               {7, 6, 5, 4, 3},
                               {7, 6, 5, -1, 3},
                               {1, 2, 3, 4, 5},
                               {1, 2, 3, 4, 5},
                               {6, -1, 6, 5, 8}},
                              {-7, 0, 1, 5 + 9, kIntMin, kIntMax, 5},
                              {{}, {}, {7}, {7, 6, 5, 3}, {}, {1, 2, 3, 4, 5}, {6, 6, 5}}));
  table.push_back(length_case("length_with_holes", {"PaddleFleet#1626"},
                              {.tokens = 1, .keys = 5, .heads = 2, .topk = 128}, {{3, -1, 1, -1, 0, 2, 4}}, {4},
                              {{3, 1}}));
  Case past = length_case("nan_past_length", {"FlashMLA README caveat", "FlashInfer#941"},
                          {.tokens = 1, .keys = 8, .heads = 2, .topk = 64}, {{0, 1, 5, 6, 7}}, {2}, {{0, 1}});
  past.make = [make = past.make] {
    Problem problem = make();
    poison_unlisted_keys(problem, {{0, 1}});
    return problem;
  };
  table.push_back(std::move(past));
  const Lists prefix = {{4, 2, 6}};
  table.push_back(mean_case("prefix_padded", {"vLLM#36616", "vLLM#36524", "vLLM#44550"},
                            {.tokens = 1, .keys = 7, .heads = 2, .topk = 130}, prefix, prefix));
  table.push_back(length_case("prefix_with_length", {"vLLM#36616", "vLLM#36524", "vLLM#44550"},
                              {.tokens = 1, .keys = 7, .heads = 2, .topk = 130}, prefix, {3}, prefix));
  table.push_back(length_case("padded_rows", {"FlashInfer#5015"}, {.tokens = 4, .keys = 4, .heads = 2, .topk = 3},
                              {{}, {1, 2}, {}, {}}, {0, 2, 0, 3}, {{}, {1, 2}, {}, {}}));
}

void add_leading_holes(std::vector<Case>& table) {
  for (const int leading : {1, 16, 63, 64, 65, 100, 128, 192}) {
    std::vector<std::int32_t> list(static_cast<std::size_t>(leading), -1);
    list.push_back(3);
    table.push_back({.name = "leading_holes_" + std::to_string(leading),
                     .reports = {"vLLM#48366", "vLLM#48364"},
                     .tags = kBoth | kHostile,
                     .make = [list] { return iid_with_lists({.keys = 5, .heads = 2, .topk = 256}, {list}); },
                     .expect = [](const Problem& p) { return single_keys(p, {3}); }});
  }
}

void add_empty_rows(std::vector<Case>& table) {
  table.push_back({.name = "masked_row_between",
                   .reports = {"Megatron#6910", "Megatron#6939", "Megatron#7434"},
                   .tags = kBoth | kHostile,
                   .make = [] {
                     return iid_with_lists({.tokens = 3, .keys = 40, .heads = 4, .topk = 20},
                                           {{3, 7, 11, 2, 39}, {}, {5, 0, 7, 3}});
                   }});
  table.push_back({.name = "masked_row_in_loss", .reports = {"Megatron#3674"}, .tags = kBoth | kHostile, .make = [] {
                     Problem p = iid_with_lists({.tokens = 3, .keys = 9, .heads = 3, .topk = 6}, {{1, 2, 3}, {}, {8}});
                     p.sink = {0.5F, kInf, -kInf};
                     add_dlse(p, 37);
                     return p;
                   }});
  table.push_back({.name = "counts_zero_to_topk", .reports = {"slime#2201"}, .tags = kBoth | kRandom, .make = [] {
                     Problem p = iid({.tokens = 66, .keys = 100, .heads = 4, .topk = 65});
                     for (std::int64_t t = 0; t < 66; ++t) {
                       std::fill(p.indices.begin() + t * 65 + t, p.indices.begin() + (t + 1) * 65, -1);
                     }
                     return p;
                   }});
}

void add_rows_and_documents(std::vector<Case>& table) {
  for (const int heads : {8, 16, 32}) {
    table.push_back(mean_case("own_key_per_token_h" + std::to_string(heads), {"cuFE#384", "cuFE#385", "cuFE#388"},
                              {.tokens = 3, .keys = 3, .heads = heads, .topk = 64}, {{0}, {1}, {2}}, {{0}, {1}, {2}}));
  }
  // Two documents of 2 tokens and 3 keys; local index 3 would be the next document's first key.
  Case local = mean_case("local_index_past_document", {"cuFE#550"}, {.tokens = 4, .keys = 6, .heads = 2, .topk = 6}, {},
                         {{0}, {2, 1}, {3}, {5}});
  local.make = [] {
    Problem p = q0({.tokens = 4, .keys = 6, .heads = 2, .topk = 6},
                   {{0, 3}, {2, 1, 4, 5, 6, -1}, {0, 3, -3, -1}, {2, 5, kIntMax}});
    p.cu_seqlens_q = {0, 2, 4};
    p.cu_seqlens_k = {0, 3, 6};
    return p;
  };
  table.push_back(std::move(local));
  table.push_back({.name = "packed_equals_batched", .reports = {"FlashMLA#105"}, .tags = kBoth | kRandom, .make = [] {
                     Problem p = iid({.tokens = 12, .keys = 60, .heads = 3, .topk = 20, .seed = 57});
                     for (auto& i : p.indices) i %= 20;
                     p.cu_seqlens_q = {0, 4, 8, 12};
                     p.cu_seqlens_k = {0, 20, 40, 60};
                     return p;
                   }});
}

}  // namespace

void add_report_index_cases(std::vector<Case>& table) {
  add_bad_indices(table);
  add_lengths(table);
  add_leading_holes(table);
  add_empty_rows(table);
  add_rows_and_documents(table);
}

}  // namespace sparsemla::cases
