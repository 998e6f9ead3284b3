// The index rule where the operation's own tests cannot bring it: offsets that nobody has checked, as on a device.
#include "core/index_rules.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <limits>
#include <random>
#include <vector>

namespace sparsemla {
namespace {

TEST(IndexRulesTest, DocumentsCausalityAndLengths) {
  const std::vector<std::int32_t> queries{0, 2, 2, 5};
  const std::vector<std::int32_t> keys{0, 4, 4, 9};
  const std::vector<std::int32_t> lengths{3, 99, -7, 0, 4, 4};
  IndexRuleView rules;
  rules.cu_seqlens_q = queries.data();
  rules.cu_seqlens_k = keys.data();
  rules.topk_length = lengths.data();
  rules.cu_seqlens_q_stride = rules.cu_seqlens_k_stride = rules.topk_length_stride = 1;
  rules.num_documents = 3;
  rules.num_tokens = 6;
  rules.num_keys = 10;
  rules.topk = 8;
  rules.causal = true;
  const auto expect_row = [&](std::int64_t token, std::int64_t key_begin, std::int64_t limit, std::int64_t slots) {
    const RowKeys row = rules.row(token);
    EXPECT_EQ(row.key_begin, key_begin) << token;
    EXPECT_EQ(row.limit, limit) << token;
    EXPECT_EQ(row.num_slots, slots) << token;
  };
  expect_row(0, 0, 3, 3);
  expect_row(1, 0, 4, 8);  // the length is clamped to the list
  expect_row(2, 4, 3, 0);  // document 2: document 1 is empty
  expect_row(3, 4, 4, 0);
  expect_row(4, 4, 5, 4);
  expect_row(5, 0, 0, 0);  // past the last document
}

/// No row may reach past the keys or the list, whatever the offsets are.
TEST(IndexRulesTest, HostileOffsetsStayInBounds) {
  constexpr std::int64_t kTokens = 7;
  constexpr std::int64_t kKeys = 11;
  constexpr std::int64_t kTopk = 5;
  const std::int32_t values[] = {0,
                                 1,
                                 3,
                                 7,
                                 11,
                                 12,
                                 1000,
                                 -1,
                                 -9,
                                 std::numeric_limits<std::int32_t>::max(),
                                 std::numeric_limits<std::int32_t>::min()};
  std::mt19937 random(3);
  const auto draw = [&](std::size_t count) {
    std::vector<std::int32_t> drawn(count);
    for (std::int32_t& value : drawn) value = values[random() % std::size(values)];
    return drawn;
  };
  for (int round = 0; round < 3000; ++round) {
    const std::vector<std::int32_t> queries = draw(4);
    const std::vector<std::int32_t> keys = draw(4);
    const std::vector<std::int32_t> lengths = draw(kTokens);
    IndexRuleView rules;
    rules.cu_seqlens_q = queries.data();
    rules.cu_seqlens_k = keys.data();
    rules.topk_length = lengths.data();
    rules.cu_seqlens_q_stride = rules.cu_seqlens_k_stride = rules.topk_length_stride = 1;
    rules.num_documents = 3;
    rules.num_tokens = kTokens;
    rules.num_keys = kKeys;
    rules.topk = kTopk;
    rules.causal = round % 2 == 0;
    for (std::int64_t token = 0; token < kTokens; ++token) {
      const RowKeys row = rules.row(token);
      ASSERT_GE(row.key_begin, 0);
      ASSERT_GE(row.limit, 0);
      ASSERT_LE(row.key_begin + row.limit, kKeys);
      ASSERT_GE(row.num_slots, 0);
      ASSERT_LE(row.num_slots, kTopk);
      for (const std::int32_t index : values) ASSERT_EQ(row.selects(index), index >= 0 && index < row.limit);
    }
  }
}

}  // namespace
}  // namespace sparsemla
