// Worker threads for the time of one call. std::thread, so that ThreadSanitizer sees every hand-over.
#pragma once

#include <atomic>
#include <cstdint>
#include <limits>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

namespace sparsemla::cpu {

/// Runs body(worker) for worker = 0 .. num_workers - 1, the last on the calling thread. `body` must not throw.
template <typename Body>
void run_workers(int num_workers, const Body& body) {
  std::vector<std::jthread> threads;
  threads.reserve(static_cast<std::size_t>(num_workers - 1));
  for (int worker = 0; worker + 1 < num_workers; ++worker) threads.emplace_back([&body, worker] { body(worker); });
  body(num_workers - 1);
}

/// Hands out tokens 0, 1, 2, ... and lets their scatters into shared rows happen as if one token came after the other,
/// while the work before each scatter runs in parallel. Each token must touch rows in ascending order: then a token may
/// touch a row as soon as every earlier token has passed it, and a row's sum is in token order for any thread count.
class OrderedTokens {
 public:
  OrderedTokens(std::int64_t num_tokens, int num_workers)
      : num_tokens_(num_tokens), num_workers_(num_workers), slots_(std::make_unique<Slot[]>(num_workers)) {}

  /// The next token for this worker, or num_tokens when none is left.
  std::int64_t take(int worker) {
    const std::lock_guard lock(mutex_);
    const std::int64_t token = next_ < num_tokens_ ? next_++ : num_tokens_;
    // Token first: a reader that sees the new (low) progress must also see whose it is.
    slots_[worker].token.store(token, std::memory_order_release);
    slots_[worker].passed.store(token < num_tokens_ ? -1 : kEverything, std::memory_order_release);
    return token;
  }

  /// Waits until every token before `token` has passed row `row`.
  void wait_to_touch(int worker, std::int64_t token, std::int64_t row) const {
    for (int other = 0; other < num_workers_; ++other) {
      if (other == worker) continue;
      for (int spins = 0; !has_passed(slots_[other], token, row); ++spins) {
        if (spins > 64) std::this_thread::yield();
      }
    }
  }

  /// This worker's token will touch no row <= `row` any more.
  void pass(int worker, std::int64_t row) { slots_[worker].passed.store(row, std::memory_order_release); }
  void finish(int worker) { pass(worker, kEverything); }

 private:
  static constexpr std::int64_t kEverything = std::numeric_limits<std::int64_t>::max();
  struct alignas(64) Slot {
    std::atomic<std::int64_t> token{-1};
    std::atomic<std::int64_t> passed{kEverything};
  };

  static bool has_passed(const Slot& slot, std::int64_t token, std::int64_t row) {
    return slot.passed.load(std::memory_order_acquire) >= row || slot.token.load(std::memory_order_acquire) > token;
  }

  std::int64_t num_tokens_;
  int num_workers_;
  std::mutex mutex_;
  std::int64_t next_ = 0;
  std::unique_ptr<Slot[]> slots_;
};

}  // namespace sparsemla::cpu
