// One line on stderr that says what runs and for how long, if stderr is a terminal; nothing at all otherwise.
#pragma once

#include <chrono>
#include <condition_variable>
#include <mutex>
#include <string>
#include <thread>

namespace sparsemla::cli {

class ProgressLine {
 public:
  ProgressLine();
  ~ProgressLine();  // clears the line
  ProgressLine(const ProgressLine&) = delete;
  ProgressLine& operator=(const ProgressLine&) = delete;

  void set(const std::string& what);

 private:
  void draw();  // with mutex_ held
  void refresh_until_stopped();

  bool enabled_ = false;
  std::chrono::steady_clock::time_point start_ = std::chrono::steady_clock::now();
  std::mutex mutex_;
  std::condition_variable wake_;
  bool stopped_ = false;
  std::string what_;
  std::thread refresher_;  // last: it uses all of the above
};

}  // namespace sparsemla::cli
