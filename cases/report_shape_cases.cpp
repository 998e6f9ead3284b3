// Public reports about head counts, list widths, long inputs and contention.
#include <algorithm>

#include "cases/builders.h"

namespace sparsemla::cases {
namespace {

constexpr std::uint32_t kBoth = kForward | kBackward | kCpu | kGpu;

void add_heads_and_widths(std::vector<Case>& table) {
  const std::vector<std::string> independent = {
      "PaddleFleet#1836",  "SGLang#22372",    "SGLang#27954", "SGLang#13646", "vLLM#46189",
      "TensorRT-LLM#9484", "FlashInfer#3554", "FA#2883",      "FA#2882",      "Megatron#5049"};
  for (const int heads : {1, 2, 3, 8, 16, 24, 32, 40, 48, 63, 64, 65, 96, 127, 128, 129, 256}) {
    table.push_back(
        {.name = "heads_" + std::to_string(heads), .reports = independent, .tags = kBoth | kRandom, .make = [heads] {
           return iid({.tokens = 3, .keys = 80, .heads = heads, .topk = 70, .seed = 41});
         }});
  }
  for (const int topk : {1, 63, 64, 65, 100, 127, 128, 129, 300}) {
    table.push_back(
        {.name = "topk_" + std::to_string(topk),
         .reports = {"FlashMLA SM90 assert on topk"},
         .tags = kBoth | kRandom,
         .make = [topk] { return iid({.tokens = 13, .keys = 310, .heads = 5, .topk = topk, .seed = 47}); }});
  }
  table.push_back(
      {.name = "no_rope_topk_2176", .reports = {"vLLM#55277", "vLLM#53906"}, .tags = kBoth | kRandom, .make = [] {
         return iid({.tokens = 2, .keys = 2300, .heads = 2, .topk = 2176, .rope = 0, .seed = 46});
       }});
  for (int seed = 0; seed < 20; ++seed) {
    table.push_back(
        {.name = "h32_topk_512_seed_" + std::to_string(seed),
         .reports = {"cuFE#418"},
         .tags = kBoth | kRandom,
         .make = [seed] {
           return iid(
               {.tokens = 2, .keys = 512, .heads = 32, .topk = 512, .seed = 580U + static_cast<std::uint64_t>(seed)});
         }});
  }
}

/// Every list is a rotation of the same few keys: the worst contention for a scatter.
Problem contended(const Shape& shape, std::int32_t hot_keys) {
  Problem p = iid(shape);
  for (std::int64_t t = 0; t < shape.tokens; ++t) {
    for (std::int64_t j = 0; j < shape.topk; ++j) {
      p.indices[t * shape.topk + j] = static_cast<std::int32_t>((t + j) % hot_keys);
    }
  }
  return p;
}

void add_contention(std::vector<Case>& table) {
  const std::vector<std::string> reports = {"TileLang#2199", "miles#1571", "miles#1642", "prime-rl#2520"};
  table.push_back({.name = "large_topk_h64", .reports = reports, .tags = kBoth | kRandom, .make = [] {
                     return iid({.tokens = 12, .keys = 512, .heads = 64, .topk = 256, .seed = 38});
                   }});
  table.push_back({.name = "contention_32_keys", .reports = reports, .tags = kBoth | kRandom, .make = [] {
                     return contended({.tokens = 200, .keys = 64, .heads = 3, .topk = 32, .seed = 39}, 32);
                   }});
  table.push_back({.name = "contention_one_key", .reports = reports, .tags = kBoth | kHostile, .make = [] {
                     return contended({.tokens = 70, .keys = 3, .heads = 2, .topk = 65, .seed = 40}, 1);
                   }});
}

void add_long_inputs(std::vector<Case>& table) {
  table.push_back({.name = "tokens_70000",
                   .reports = {"FlashMLA#173", "FlashMLA#182", "vLLM#27043", "vllm-project/FlashMLA#10", "SGLang#34941",
                               "SGLang#34947", "FlashInfer#3125"},
                   .tags = kBoth | kRandom | kLarge,
                   .make = [] { return iid({.tokens = 70000, .keys = 97, .heads = 1, .topk = 4, .seed = 48}); }});
  // Only listed keys hold numbers, so a read past a list, or of a wrong row, shows as NaN.
  table.push_back({.name = "keys_262209", .reports = {"cuFE#311"}, .tags = kBoth | kRandom | kLarge, .make = [] {
                     Problem p = iid({.tokens = 3, .keys = 262209, .heads = 2, .topk = 300, .seed = 54});
                     p.indices[0] = 262208;
                     p.indices[1] = 0;
                     p.indices[2] = 131071;
                     Lists lists(3);
                     for (std::int64_t t = 0; t < 3; ++t) {
                       lists[t].assign(p.indices.begin() + t * 300, p.indices.begin() + (t + 1) * 300);
                     }
                     poison_unlisted_keys(p, lists);
                     return p;
                   }});
}

}  // namespace

void add_report_shape_cases(std::vector<Case>& table) {
  add_heads_and_widths(table);
  add_contention(table);
  add_long_inputs(table);
}

}  // namespace sparsemla::cases
