// Sizes around the tiles of the kernels, blocks and rows without a key, device data that nobody has checked.
#include <algorithm>
#include <limits>
#include <set>

#include "core/index_rules.h"
#include "device/call.h"
#include "tests/cuda/fixture.h"

namespace sparsemla::cuda_test {
namespace {

using cases::differences;
using cases::ForwardOutputs;
using cases::run_forward;

constexpr std::int32_t kIntMin = std::numeric_limits<std::int32_t>::min();
constexpr std::int32_t kIntMax = std::numeric_limits<std::int32_t>::max();

class CudaShapes : public CudaTest {};

const std::vector<std::string> kPipelines = {"exact", "lazy+no-residual", "exact+canonical",
                                             "lazy+first-to-last+no-residual"};

/// Rows that no list names become NaN: reading one shows.
void poison_unlisted(Problem& problem) {
  const std::set<std::int32_t> listed(problem.indices.begin(), problem.indices.end());
  const auto nan = to_bfloat16(std::numeric_limits<float>::quiet_NaN());
  for (std::int32_t key = 0; key < problem.num_keys; ++key) {
    if (listed.count(key) != 0) continue;
    std::fill_n(problem.kv_latent.begin() + key * kLatentDim, kLatentDim, nan);
    std::fill_n(problem.k_rope.begin() + key * problem.rope_dim, problem.rope_dim, nan);
  }
}

TEST_F(CudaShapes, Heads) {
  for (const std::int64_t heads : {1, 2, 3, 16, 17, 63, 64, 65, 100, 128, 130, 256}) {
    for (const std::int64_t rope : {kRopeDim, std::int64_t{0}}) {
      expect_conforms(
          std::to_string(heads) + " heads, rope " + std::to_string(rope),
          [&] {
            Problem problem = make_iid(
                {.num_tokens = 3, .num_keys = 200, .topk = 130, .num_heads = heads, .rope_dim = rope, .seed = 31},
                false);
            for (std::int64_t h = 0; h < heads; ++h) problem.sink.push_back(static_cast<float>(h % 5) - 2.0F);
            poison_unlisted(problem);
            return problem;
          },
          kPipelines);
    }
  }
}

TEST_F(CudaShapes, ListWidths) {
  for (const std::int64_t topk : {0, 1, 2, 63, 64, 65, 127, 128, 129, 200, 1024, 1025}) {
    for (const std::int64_t heads : {5, 70}) {
      expect_conforms(
          std::to_string(topk) + " slots",
          [&] {
            Problem problem =
                make_iid({.num_tokens = 4, .num_keys = 1100, .topk = topk, .num_heads = heads, .seed = 32}, false);
            poison_unlisted(problem);
            return problem;
          },
          kPipelines, cases::kHostile);
    }
  }
}

/// Token t has keys in block b iff bit b of t is set: all patterns of five blocks, the empty row among them.
Problem block_patterns(std::int64_t keys_a_block) {
  Problem problem = make_iid({.num_tokens = 32, .num_keys = 400, .topk = 320, .num_heads = 9, .seed = 33}, false);
  for (std::int64_t t = 0; t < 32; ++t) {
    for (std::int64_t slot = 0; slot < 320; ++slot) {
      const bool has_keys = ((t >> (slot / 64)) & 1) != 0;
      const std::int64_t place = (slot % 64 + 7 * t) % 64;  // where a block has its keys depends on the token
      if (!has_keys || place >= keys_a_block) problem.indices[t * 320 + slot] = slot % 3 == 0 ? kIntMin : 400;
    }
  }
  poison_unlisted(problem);
  return problem;
}

TEST_F(CudaShapes, EmptyBlocks) {
  for (const std::int64_t keys_a_block : {1, 63, 64}) {
    expect_conforms(
        std::to_string(keys_a_block) + " keys in a block", [&] { return block_patterns(keys_a_block); }, kPipelines,
        cases::kHostile);
  }
}

TEST_F(CudaShapes, NothingToDo) {
  for (const auto& [tokens, keys, topk] : {std::tuple{0, 9, 4}, {0, 0, 0}, {3, 0, 4}, {3, 9, 0}, {3, 0, 0}}) {
    expect_conforms(
        "T " + std::to_string(tokens) + " S " + std::to_string(keys) + " W " + std::to_string(topk),
        [&, t = tokens, s = keys, w = topk] {
          Problem problem = make_iid({.num_tokens = t, .num_keys = s, .topk = w, .num_heads = 3, .seed = 34}, false);
          problem.indices.assign(problem.indices.size(), s == 0 ? 0 : -1);
          return problem;
        },
        kPipelines, cases::kHostile);
  }
}

/// Outputs that are the first heads of a wider tensor: the heads behind them are the caller's.
TEST_F(CudaShapes, HeadsPastTheLastAreUntouched) {
  for (const std::int64_t heads : {1, 63, 65, 130}) {
    const Problem problem =
        make_iid({.num_tokens = 4, .num_keys = 200, .topk = 100, .num_heads = heads, .seed = 35}, false);
    const ForwardOutputs expected = run_forward(problem.inputs(), options_of("exact"));
    Problem wider = problem;
    wider.num_heads = heads + 70;
    ForwardOutputs outputs = cases::make_forward_outputs(wider.inputs(), true);
    ForwardArguments arguments = cases::forward_arguments(problem.inputs(), outputs);
    for (Tensor* tensor : {&arguments.out, &arguments.lse, &arguments.max_logits, &arguments.out_residual}) {
      *tensor = narrowed(*tensor, 1, 0, heads);
    }
    device::forward_on(
        {DeviceType::kCuda, 0}, arguments, options_of("exact"),
        {outputs.out.storage(), outputs.lse.storage(), outputs.max_logits.storage(), outputs.out_residual.storage()});
    EXPECT_EQ(cases::packed_bytes(arguments.out), expected.out.bytes()) << heads;
    EXPECT_EQ(cases::packed_bytes(arguments.lse), expected.lse.bytes()) << heads;
    EXPECT_TRUE(outputs.gaps_untouched()) << heads;
    for (const cases::OwnedTensor* whole : {&outputs.out, &outputs.lse, &outputs.max_logits, &outputs.out_residual}) {
      const auto rest = cases::packed_bytes(narrowed(whole->tensor(), 1, heads, 70));
      EXPECT_TRUE(std::all_of(rest.begin(), rest.end(), [](std::byte b) { return b == std::byte{0xA5}; })) << heads;
    }
  }
}

TEST_F(CudaShapes, OptionalOutputsMayBeLeftOut) {
  const Problem problem = make_iid({.num_tokens = 4, .num_keys = 200, .topk = 100, .num_heads = 65, .seed = 36}, false);
  const ForwardOutputs expected = run_forward(problem.inputs(), options_of("exact"));
  for (const auto member : {&ForwardArguments::lse, &ForwardArguments::max_logits}) {
    ForwardOutputs outputs = cases::make_forward_outputs(problem.inputs(), true);
    ForwardArguments arguments = cases::forward_arguments(problem.inputs(), outputs);
    arguments.*member = {};
    device::forward_on({DeviceType::kCuda, 0}, arguments, options_of("exact"));
    EXPECT_EQ(outputs.out.bytes(), expected.out.bytes());
    EXPECT_EQ(outputs.out_residual.bytes(), expected.out_residual.bytes());
    EXPECT_EQ(outputs.lse.untouched(), member == &ForwardArguments::lse);
    EXPECT_EQ(outputs.max_logits.untouched(), member == &ForwardArguments::max_logits);
  }
}

/// The same keys in the same slots, written out as rows of kv_latent: no documents, no causality, no lengths.
Problem written_out(const Problem& problem) {
  Problem result = problem;
  const IndexRuleView rules = make_index_rules(problem.inputs());
  for (std::int64_t t = 0; t < problem.num_tokens; ++t) {
    const RowKeys row = rules.row(t);
    for (std::int64_t slot = 0; slot < problem.topk; ++slot) {
      std::int32_t& index = result.indices[t * problem.topk + slot];
      const bool valid = slot < row.num_slots && row.selects(index);
      index = valid ? static_cast<std::int32_t>(row.key_begin + index) : -1;
    }
  }
  result.causal = false;
  result.topk_length.clear();
  result.cu_seqlens_q.clear();
  result.cu_seqlens_k.clear();
  return result;
}

struct Offsets {
  std::vector<std::int32_t> queries;
  std::vector<std::int32_t> keys;
};

/// Offsets on the device are never checked. Those that break the rule select nothing outside the tensors.
TEST_F(CudaShapes, OffsetsAndLengthsOfAnyContent) {
  constexpr std::int32_t kTokens = 12;
  constexpr std::int32_t kKeys = 90;
  const std::vector<Offsets> all = {
      {{0, 5, kTokens}, {0, 40, kKeys}},               // as it should be
      {{0, 5, 9}, {0, 40, 80}},                        // tokens past the last document
      {{0, 0, 0}, {0, 0, 0}},                          // no document has a token
      {{3, 5, kTokens}, {10, 40, kKeys}},              // tokens before the first
      {{0, kIntMax, kIntMax}, {0, kIntMax, kIntMax}},  // far past the end
      {{kIntMin, kIntMin, kTokens}, {kIntMin, 20, kIntMax}},
      {{0, 9, 4}, {80, 20, 60}},  // decreasing
      {{kTokens, 0, kTokens}, {kKeys, 0, kKeys}},
      {{0, 6, kTokens}, {-1000, 1000000000, -2000000000}},
      {{7, -7, 100, -100, 13}, {kIntMax, kIntMin, 0, 89, 91}},
  };
  Random random(9);
  for (const Offsets& offsets : all) {
    for (const bool causal : {false, true}) {
      Problem problem =
          make_iid({.num_tokens = kTokens, .num_keys = kKeys, .topk = 70, .num_heads = 5, .seed = 37}, false);
      problem.causal = causal;
      problem.cu_seqlens_q = offsets.queries;
      problem.cu_seqlens_k = offsets.keys;
      problem.topk_length.resize(kTokens);
      for (std::int32_t& length : problem.topk_length) {
        const std::int32_t lengths[] = {kIntMin, -1, 0, 1, 64, 65, 70, 71, kIntMax};
        length = lengths[random.below(std::size(lengths))];
      }
      const Problem plain = written_out(problem);
      for (const std::string& pipeline : kPipelines) {
        // Canonical walks the valid keys without the holes between them, in both.
        EXPECT_EQ(differences(run_forward(problem.inputs(), options_of(pipeline)),
                              run_forward(plain.inputs(), options_of(pipeline))),
                  "")
            << pipeline << (causal ? ", causal" : "") << ", first offsets " << offsets.queries[0] << " "
            << offsets.queries[1] << " " << offsets.queries[2];
      }
    }
  }
}

TEST_F(CudaShapes, OffsetsAndLengthsWithStrides) {
  const Problem problem = cases::find("packed_documents_causal").make();
  const cases::LaidOutProblem reversed(problem, cases::Layout::kReversed);
  AttentionInputs inputs = problem.inputs();
  inputs.indices = reversed.inputs().indices;
  inputs.topk_length = reversed.inputs().topk_length;
  inputs.cu_seqlens_q = reversed.inputs().cu_seqlens_q;
  inputs.cu_seqlens_k = reversed.inputs().cu_seqlens_k;
  inputs.sink = reversed.inputs().sink;
  for (const char* pipeline : {"exact", "canonical", "lazy"}) {
    EXPECT_EQ(
        differences(run_forward(inputs, options_of(pipeline)), run_forward(problem.inputs(), options_of(pipeline))), "")
        << pipeline;
  }
}

}  // namespace
}  // namespace sparsemla::cuda_test
