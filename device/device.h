// What tests, the program and benchmarks need of a CUDA device, without a CUDA header. The library itself allocates
// nothing there; this is the caller's side. In a build without CUDA count() is 0 and everything else throws Error.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace sparsemla::device {

struct Facts {
  std::string name;
  std::int64_t l2_bytes = 0;
  int num_multiprocessors = 0;
};

/// Devices of this process; 0 without a driver.
[[nodiscard]] int count();
[[nodiscard]] Facts facts(int device);

/// Makes a device the thread's current one, for libraries that look at that. What is in this header leaves it as it is.
void make_current(int device);

/// Memory on a device, aligned to 256 bytes at least. Errors: not enough of it, no such device.
class DeviceMemory {
 public:
  DeviceMemory() = default;
  explicit DeviceMemory(std::int64_t bytes, int device = 0);
  ~DeviceMemory();
  DeviceMemory(DeviceMemory&& other) noexcept;
  DeviceMemory& operator=(DeviceMemory&& other) noexcept;

  [[nodiscard]] std::byte* data() const noexcept { return data_; }
  [[nodiscard]] std::int64_t bytes() const noexcept { return bytes_; }

 private:
  std::byte* data_ = nullptr;
  std::int64_t bytes_ = 0;
};

/// Copies; return when they are done.
void copy_to_device(void* to, const void* from, std::int64_t bytes);
void copy_to_host(void* to, const void* from, std::int64_t bytes);
/// Enqueues writing `value` into every byte.
void fill(void* memory, unsigned char value, std::int64_t bytes, void* stream = nullptr);
/// Waits for all work of the device. Errors: what went wrong in that work.
void synchronize(int device = 0);

/// A stream that does not wait for the default stream.
class Stream {
 public:
  explicit Stream(int device = 0);
  ~Stream();
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;

  [[nodiscard]] void* handle() const noexcept { return handle_; }
  void synchronize() const;

 private:
  void* handle_ = nullptr;
};

/// A point in a stream's work, with the time at which it was passed.
class Event {
 public:
  explicit Event(int device = 0);
  ~Event();
  Event(const Event&) = delete;
  Event& operator=(const Event&) = delete;

  void record(void* stream);
  /// Waits for this event. `start` was recorded before it.
  [[nodiscard]] double seconds_since(const Event& start) const;

 private:
  void* handle_ = nullptr;
};

}  // namespace sparsemla::device
