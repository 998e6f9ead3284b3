#include <cuda_runtime_api.h>

#include <utility>

#include "device/device.h"
#include "sparsemla/error.h"

namespace sparsemla::device {
namespace {

/// The runtime keeps a failure as the thread's last error; it is reported here, so it is taken back.
void require(const char* what, cudaError_t status) {
  if (status == cudaSuccess) return;
  (void)cudaGetLastError();
  throw Error("cuda", std::string(cudaGetErrorString(status)) + " from " + what, "a device that takes the call");
}

/// Makes `device` current for a scope.
class CurrentDevice {
 public:
  explicit CurrentDevice(int device) {
    require("cudaGetDevice", cudaGetDevice(&previous_));
    require("cudaSetDevice", cudaSetDevice(device));
  }
  ~CurrentDevice() { (void)cudaSetDevice(previous_); }
  CurrentDevice(const CurrentDevice&) = delete;
  CurrentDevice& operator=(const CurrentDevice&) = delete;

 private:
  int previous_ = 0;
};

cudaStream_t as_stream(void* handle) { return static_cast<cudaStream_t>(handle); }
cudaEvent_t as_event(void* handle) { return static_cast<cudaEvent_t>(handle); }

}  // namespace

int count() {
  int devices = 0;
  if (cudaGetDeviceCount(&devices) == cudaSuccess) return devices;
  (void)cudaGetLastError();
  return 0;
}

Facts facts(int device) {
  cudaDeviceProp properties{};
  require("cudaGetDeviceProperties", cudaGetDeviceProperties(&properties, device));
  return {properties.name, properties.l2CacheSize, properties.multiProcessorCount};
}

void make_current(int device) { require("cudaSetDevice", cudaSetDevice(device)); }

DeviceMemory::DeviceMemory(std::int64_t bytes, int device) : bytes_(bytes) {
  const CurrentDevice current(device);
  void* data = nullptr;
  if (bytes > 0) require("cudaMalloc", cudaMalloc(&data, static_cast<std::size_t>(bytes)));
  data_ = static_cast<std::byte*>(data);
}

DeviceMemory::~DeviceMemory() {
  if (data_ != nullptr) (void)cudaFree(data_);
}

DeviceMemory::DeviceMemory(DeviceMemory&& other) noexcept
    : data_(std::exchange(other.data_, nullptr)), bytes_(std::exchange(other.bytes_, 0)) {}

DeviceMemory& DeviceMemory::operator=(DeviceMemory&& other) noexcept {
  std::swap(data_, other.data_);
  std::swap(bytes_, other.bytes_);
  return *this;
}

void copy_to_device(void* to, const void* from, std::int64_t bytes) {
  if (bytes == 0) return;
  require("a copy to the device", cudaMemcpy(to, from, static_cast<std::size_t>(bytes), cudaMemcpyHostToDevice));
}

void copy_to_host(void* to, const void* from, std::int64_t bytes) {
  if (bytes == 0) return;
  require("a copy to the host", cudaMemcpy(to, from, static_cast<std::size_t>(bytes), cudaMemcpyDeviceToHost));
}

void fill(void* memory, unsigned char value, std::int64_t bytes, void* stream) {
  require("cudaMemsetAsync", cudaMemsetAsync(memory, value, static_cast<std::size_t>(bytes), as_stream(stream)));
}

void synchronize(int device) {
  const CurrentDevice current(device);
  require("cudaDeviceSynchronize", cudaDeviceSynchronize());
}

Stream::Stream(int device) {
  const CurrentDevice current(device);
  cudaStream_t stream = nullptr;
  require("cudaStreamCreate", cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  handle_ = stream;
}

Stream::~Stream() { (void)cudaStreamDestroy(as_stream(handle_)); }

void Stream::synchronize() const { require("cudaStreamSynchronize", cudaStreamSynchronize(as_stream(handle_))); }

Event::Event(int device) {
  const CurrentDevice current(device);
  cudaEvent_t event = nullptr;
  require("cudaEventCreate", cudaEventCreate(&event));
  handle_ = event;
}

Event::~Event() { (void)cudaEventDestroy(as_event(handle_)); }

void Event::record(void* stream) { require("cudaEventRecord", cudaEventRecord(as_event(handle_), as_stream(stream))); }

double Event::seconds_since(const Event& start) const {
  require("cudaEventSynchronize", cudaEventSynchronize(as_event(handle_)));
  float milliseconds = 0;
  require("cudaEventElapsedTime", cudaEventElapsedTime(&milliseconds, as_event(start.handle_), as_event(handle_)));
  return static_cast<double>(milliseconds) * 1e-3;
}

}  // namespace sparsemla::device
