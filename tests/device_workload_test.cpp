// The lists that timing on a device runs over: distinct keys, all of them in reach, another order for each token.
#include "cli/device_workload.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <set>

namespace sparsemla::cli {
namespace {

std::vector<std::int32_t> list_of(const std::vector<std::int32_t>& lists, const ProblemShape& shape,
                                  std::int64_t token) {
  const auto first = lists.begin() + token * shape.topk;
  return {first, first + shape.topk};
}

TEST(RandomLists, AreDistinctKeysForAnySize) {
  for (const std::int64_t keys : {1, 2, 3, 63, 64, 65, 1000, 4097, 100000}) {
    const ProblemShape shape{.num_tokens = 17, .num_keys = keys, .topk = 300, .num_heads = 1};
    const std::vector<std::int32_t> lists = random_lists(shape);
    for (std::int64_t token = 0; token < shape.num_tokens; ++token) {
      const std::vector<std::int32_t> list = list_of(lists, shape, token);
      const auto valid = std::min(keys, shape.topk);
      const std::set<std::int32_t> distinct(list.begin(), list.begin() + valid);
      ASSERT_EQ(static_cast<std::int64_t>(distinct.size()), valid) << keys;
      EXPECT_GE(*distinct.begin(), 0);
      EXPECT_LT(*distinct.rbegin(), keys);
      EXPECT_TRUE(std::all_of(list.begin() + valid, list.end(), [](std::int32_t key) { return key == -1; }));
    }
  }
}

TEST(RandomLists, DifferByTokenAndCoverTheKeysEvenly) {
  const ProblemShape shape{.num_tokens = 400, .num_keys = 5000, .topk = 500, .num_heads = 1};
  const std::vector<std::int32_t> lists = random_lists(shape);
  EXPECT_NE(list_of(lists, shape, 0), list_of(lists, shape, 1));
  std::vector<int> counts(5000, 0);
  for (const std::int32_t key : lists) ++counts[static_cast<std::size_t>(key)];
  const auto [least, most] = std::minmax_element(counts.begin(), counts.end());
  EXPECT_GE(*least, 12);  // 40 on average, with a deviation of 6
  EXPECT_LE(*most, 70);
}

}  // namespace
}  // namespace sparsemla::cli
