#include "cli/progress.h"

#include <fmt/format.h>
#include <unistd.h>

#include <cstdio>

namespace sparsemla::cli {

ProgressLine::ProgressLine() : enabled_(::isatty(STDERR_FILENO) == 1) {
  if (enabled_) refresher_ = std::thread([this] { refresh_until_stopped(); });
}

ProgressLine::~ProgressLine() {
  if (!enabled_) return;
  {
    const std::scoped_lock lock(mutex_);
    stopped_ = true;
  }
  wake_.notify_all();
  refresher_.join();
  std::fputs("\r\x1b[K", stderr);
  std::fflush(stderr);
}

void ProgressLine::set(const std::string& what) {
  if (!enabled_) return;
  const std::scoped_lock lock(mutex_);
  what_ = what;
  draw();
}

void ProgressLine::draw() {
  if (what_.empty()) return;
  const auto elapsed = std::chrono::duration_cast<std::chrono::seconds>(std::chrono::steady_clock::now() - start_);
  std::fputs(fmt::format("\r\x1b[K{}  {} s", what_, elapsed.count()).c_str(), stderr);
  std::fflush(stderr);
}

void ProgressLine::refresh_until_stopped() {
  std::unique_lock lock(mutex_);
  while (!wake_.wait_for(lock, std::chrono::milliseconds(500), [this] { return stopped_; })) draw();
}

}  // namespace sparsemla::cli
