// Threads over an index range, for code outside the library. The split into blocks depends only on the arguments
// `count` and `block`, never on the number of threads, so a caller that combines per-block results in block order gets
// the same bits from any number of threads.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <exception>
#include <mutex>
#include <thread>
#include <vector>

namespace sparsemla {

/// 0 = all cores; never less than 1.
[[nodiscard]] inline int resolve_num_threads(int num_threads) noexcept {
  if (num_threads > 0) return num_threads;
  return std::max(1, static_cast<int>(std::thread::hardware_concurrency()));
}

/// Calls work(begin, end) once for every block [i*block, min(count, (i+1)*block)), in any order, from several threads.
/// The first exception that a call throws is thrown again here after all threads have stopped.
template <typename Work>
void parallel_blocks(std::int64_t count, std::int64_t block, int num_threads, const Work& work) {
  const std::int64_t num_blocks = (count + block - 1) / block;
  std::atomic<std::int64_t> next{0};
  std::exception_ptr error;
  std::mutex error_mutex;
  const auto run = [&] {
    try {
      for (std::int64_t i = next++; i < num_blocks; i = next++) work(i * block, std::min(count, (i + 1) * block));
    } catch (...) {
      next = num_blocks;
      const std::scoped_lock lock(error_mutex);
      if (!error) error = std::current_exception();
    }
  };
  {
    std::vector<std::jthread> helpers;
    const auto threads = std::min<std::int64_t>(resolve_num_threads(num_threads), num_blocks);
    for (std::int64_t i = 1; i < threads; ++i) helpers.emplace_back(run);
    run();
  }
  if (error) std::rethrow_exception(error);
}

}  // namespace sparsemla
