// A build without CUDA: no devices, and every other call says so.
#include "device/device.h"
#include "sparsemla/error.h"

namespace sparsemla::device {
namespace {

[[noreturn]] void refuse() { throw Error("device", "cuda", "cpu: this build has no CUDA"); }

}  // namespace

int count() { return 0; }
Facts facts(int) { refuse(); }
void make_current(int) { refuse(); }
DeviceMemory::DeviceMemory(std::int64_t, int) { refuse(); }
DeviceMemory::~DeviceMemory() = default;
DeviceMemory::DeviceMemory(DeviceMemory&&) noexcept = default;
DeviceMemory& DeviceMemory::operator=(DeviceMemory&&) noexcept = default;
void copy_to_device(void*, const void*, std::int64_t) { refuse(); }
void copy_to_host(void*, const void*, std::int64_t) { refuse(); }
void fill(void*, unsigned char, std::int64_t, void*) { refuse(); }
void synchronize(int) { refuse(); }
Stream::Stream(int) { refuse(); }
Stream::~Stream() = default;
void Stream::synchronize() const { refuse(); }
Event::Event(int) { refuse(); }
Event::~Event() = default;
void Event::record(void*) { refuse(); }
double Event::seconds_since(const Event&) const { refuse(); }

}  // namespace sparsemla::device
