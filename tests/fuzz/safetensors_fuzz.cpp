// Feeds arbitrary bytes to the safetensors reader. A finding is: a crash, a sanitizer report, an exception other than
// sparsemla::Error, a message that is not plain text, or an accepted file whose tensors are not what the format says.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <span>
#include <string_view>

#include "io/safetensors.h"
#include "sparsemla/error.h"

// Of libFuzzer.
extern "C" std::size_t LLVMFuzzerMutate(std::uint8_t* data, std::size_t size, std::size_t max_size);

namespace {

using sparsemla::Tensor;

constexpr std::size_t kLengthBytes = 8;

void require(bool condition, const char* what) {
  if (condition) return;
  std::fprintf(stderr, "not true of an accepted file: %s\n", what);
  std::abort();
}

/// Reads every byte, so that AddressSanitizer sees a view that is not inside the input or a live copy.
std::uint64_t touch(const Tensor& tensor, std::size_t size) {
  std::uint64_t sum = 0;
  const auto* const bytes = static_cast<const volatile std::uint8_t*>(tensor.data);
  for (std::size_t i = 0; i < size; ++i) sum += bytes[i];
  return sum;
}

void check_file(const sparsemla::io::SafetensorsFile& file, std::span<const std::byte> input) {
  std::uint64_t header = 0;
  std::memcpy(&header, input.data(), kLengthBytes);
  const std::span<const std::byte> data = input.subspan(kLengthBytes + header);
  std::uint64_t expected = 0;
  for (const std::byte byte : data) expected += static_cast<std::uint8_t>(byte);

  std::uint64_t bytes = 0;
  std::uint64_t sum = 0;
  for (const auto& [name, tensor] : file.tensors()) {
    const std::int64_t element = sparsemla::size_bytes(tensor.dtype);
    require(element > 0, "a known dtype");
    require(tensor.rank >= 0 && tensor.rank <= Tensor::kMaxRank, "a rank that fits");
    require(tensor.is_contiguous(), "contiguous tensors");
    require(tensor.num_elements() >= 0, "a size of 0 or more");
    require(reinterpret_cast<std::uintptr_t>(tensor.data) % static_cast<std::uintptr_t>(element) == 0, "alignment");
    require(file.find(name).data == tensor.data, "find() finds it");
    const auto size = static_cast<std::size_t>(tensor.num_elements() * element);
    sum += touch(tensor, size);
    bytes += size;
  }
  // Together with a sum of contents this pins that the tensors are the data section, each byte once.
  require(bytes == data.size(), "tensors as large as the data section");
  require(sum == expected, "the same bytes as in the data section");
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const std::span<const std::byte> input(reinterpret_cast<const std::byte*>(data), size);
  try {
    check_file(sparsemla::io::SafetensorsFile::parse(input, "fuzz"), input);
  } catch (const sparsemla::Error& error) {
    const std::string_view message = error.what();
    const auto plain = [](char c) { return c >= 0x20 && c < 0x7F; };
    require(std::all_of(message.begin(), message.end(), plain) && message.size() < 1000, "a message of plain text");
  }
  return 0;
}

/// Most mutations change where the header ends, and a length that does not follow would hide the JSON behind it. So
/// three times in four the length is set to the end of the last object there.
extern "C" std::size_t LLVMFuzzerCustomMutator(std::uint8_t* data, std::size_t size, std::size_t max_size,
                                               unsigned seed) {
  size = LLVMFuzzerMutate(data, size, max_size);
  if (seed % 4 == 0 || size <= kLengthBytes) return size;
  std::uint64_t end = size;
  while (end > kLengthBytes && data[end - 1] != '}') --end;
  end -= kLengthBytes;
  if (end > 0) std::memcpy(data, &end, kLengthBytes);
  return size;
}
