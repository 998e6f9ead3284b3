// No exception crosses the C interface: every allocation of a call fails once, on the calling thread and on workers,
// and each time the call returns SPARSEMLA_INTERNAL and works again afterwards.
#include <gtest/gtest.h>

#include <atomic>
#include <cstdlib>
#include <limits>
#include <new>

#include "sparsemla/capi.h"
#include "tests/capi_test_support.h"

namespace {

// Allocations still allowed, over all threads; only a test that armed it ever reaches 0.
constexpr long kUnlimited = std::numeric_limits<long>::max() / 2;
std::atomic<long> allocations_left{kUnlimited};

void* allocate(std::size_t size, std::size_t alignment) {
  if (allocations_left.load(std::memory_order_relaxed) < kUnlimited / 2 &&
      allocations_left.fetch_sub(1, std::memory_order_relaxed) == 0) {
    throw std::bad_alloc();
  }
  const std::size_t rounded = (size + alignment - 1) / alignment * alignment;
  void* memory = std::aligned_alloc(alignment, rounded == 0 ? alignment : rounded);
  if (memory == nullptr) throw std::bad_alloc();
  return memory;
}

}  // namespace

// Not inlined: the compiler would see half a pair and warn of memory from new that free() takes.
[[gnu::noinline]] void* operator new(std::size_t size) { return allocate(size, alignof(std::max_align_t)); }
[[gnu::noinline]] void* operator new(std::size_t size, std::align_val_t alignment) {
  return allocate(size, static_cast<std::size_t>(alignment));
}
[[gnu::noinline]] void operator delete(void* memory) noexcept { std::free(memory); }
[[gnu::noinline]] void operator delete(void* memory, std::size_t) noexcept { std::free(memory); }
[[gnu::noinline]] void operator delete(void* memory, std::align_val_t) noexcept { std::free(memory); }
[[gnu::noinline]] void operator delete(void* memory, std::size_t, std::align_val_t) noexcept { std::free(memory); }

namespace sparsemla {
namespace {

/// Runs `call` with its n-th allocation failing, for n = 0, 1, ... until it gets by without; returns how often it
/// failed.
template <typename F>
int fail_every_allocation(const F& call) {
  constexpr int kMost = 5000;
  for (int n = 0; n < kMost; ++n) {
    allocations_left = n;
    const sparsemla_status status = call();
    const bool failed_once = allocations_left < 0;
    allocations_left = kUnlimited;
    if (!failed_once) {
      EXPECT_EQ(status, SPARSEMLA_OK) << sparsemla_last_error();
      return n;
    }
    EXPECT_EQ(status, SPARSEMLA_INTERNAL) << "allocation " << n;
    EXPECT_STREQ(sparsemla_last_error(), "std::bad_alloc");
  }
  ADD_FAILURE() << "more than " << kMost << " allocations in one small call";
  return kMost;
}

class CApiMemory : public testing::TestWithParam<int> {};

TEST_P(CApiMemory, EveryAllocationMayFail) {
  const Problem problem = capi_test::full_problem();
  capi_test::Call call(problem);
  capi_test::Views views;
  const sparsemla_forward_arguments forward = views.to_c(call.forward);
  const sparsemla_backward_arguments backward = views.to_c(call.backward);
  sparsemla_options options{};
  options.struct_size = sizeof options;
  options.num_threads = GetParam();
  EXPECT_GT(fail_every_allocation([&] { return sparsemla_forward(&forward, &options); }), 0);
  EXPECT_GT(fail_every_allocation([&] { return sparsemla_backward(&backward, &options); }), 0);
  EXPECT_GT(fail_every_allocation([&] { return sparsemla_plan_forward(&forward, &options, nullptr, 0, nullptr); }), 0);
}

INSTANTIATE_TEST_SUITE_P(Threads, CApiMemory, testing::Values(1, 2, 3));

}  // namespace
}  // namespace sparsemla
