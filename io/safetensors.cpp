#include "io/safetensors.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <fmt/ranges.h>  // join, in fmt 11 and later
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cerrno>
#include <cstdint>
#include <cstring>
#include <new>
#include <optional>
#include <string_view>
#include <system_error>
#include <tuple>

#include "io/safetensors_header.h"
#include "sparsemla/error.h"

namespace sparsemla::io {
namespace {

static_assert(std::endian::native == std::endian::little, "the format is little-endian and is mapped as it is");

/// Aligned copies of the tensors whose bytes lie badly in the file.
using Copies = std::vector<std::unique_ptr<std::uint64_t[]>>;

/// A whole file in memory, unmapped at the end.
struct Mapping {
  Mapping(void* mapped_address, std::size_t mapped_size) noexcept : address(mapped_address), size(mapped_size) {}
  Mapping(const Mapping&) = delete;
  Mapping& operator=(const Mapping&) = delete;
  ~Mapping() { ::munmap(address, size); }

  void* address;
  std::size_t size;
  std::shared_ptr<const void> copies;
};

[[noreturn]] void throw_errno(const std::string& path, std::string_view wanted) {
  throw Error(path, std::generic_category().message(errno), wanted);
}

std::shared_ptr<Mapping> map_file(const std::string& path) {
  // O_NONBLOCK: opening a FIFO must not wait for its writer. It means nothing to a regular file.
  const int descriptor = ::open(path.c_str(), O_RDONLY | O_NONBLOCK | O_NOCTTY | O_CLOEXEC);
  if (descriptor < 0) throw_errno(path, "a file that can be read");
  struct Closer {
    int descriptor;
    ~Closer() { ::close(descriptor); }
  } const closer{descriptor};
  struct stat status {};
  if (::fstat(descriptor, &status) != 0) throw_errno(path, "a file that can be read");
  if (!S_ISREG(status.st_mode)) {
    throw Error(path, S_ISDIR(status.st_mode) ? "a directory" : "a pipe or device", "a regular file");
  }
  const auto size = static_cast<std::size_t>(status.st_size);
  if (size < kLengthBytes) throw Error(path, fmt::format("{} bytes", size), "at least 8, the length of the header");
  void* const address = ::mmap(nullptr, size, PROT_READ, MAP_PRIVATE, descriptor, 0);
  if (address == MAP_FAILED) throw_errno(path, "a file that can be mapped");
  return std::make_shared<Mapping>(address, size);
}

/// The header's text; what follows it is the data section.
std::string_view header_text(std::span<const std::byte> bytes, const std::string& name) {
  if (bytes.size() < kLengthBytes) {
    throw Error(name, fmt::format("{} bytes", bytes.size()), "at least 8, the length of the header");
  }
  std::uint64_t length = 0;
  std::memcpy(&length, bytes.data(), kLengthBytes);
  if (length > kMaxHeaderBytes) {
    throw Error(name, fmt::format("a header length of {}", length), fmt::format("at most {}", kMaxHeaderBytes));
  }
  const std::uint64_t rest = bytes.size() - kLengthBytes;
  if (length > rest) {
    throw Error(name, fmt::format("a header length of {}", length), fmt::format("at most the {} bytes there", rest));
  }
  return {reinterpret_cast<const char*>(bytes.data()) + kLengthBytes, static_cast<std::size_t>(length)};
}

/// Holds an entry's range against its own shape and the size of the data section.
void check_entry(const HeaderEntry& entry, std::size_t data_bytes, const std::string& file, const std::string& name) {
  const std::span shape(entry.shape.data(), static_cast<std::size_t>(entry.rank));
  const std::optional<std::int64_t> bytes = byte_count(shape, entry.dtype);
  const auto described = [&] { return fmt::format("{} [{}]", dtype_name(entry.dtype), fmt::join(shape, ", ")); };
  if (!bytes) throw Error(tensor_label(file, name), described(), "extents whose product is below 2^63 bytes");
  const auto range = [&] { return fmt::format("data_offsets [{}, {}]", entry.begin, entry.end); };
  if (entry.begin > entry.end) throw Error(tensor_label(file, name), range(), "begin <= end");
  if (static_cast<std::uint64_t>(entry.end) > data_bytes) {
    throw Error(tensor_label(file, name), range(), fmt::format("offsets within the {} bytes of data", data_bytes));
  }
  if (entry.end - entry.begin != *bytes) {
    throw Error(tensor_label(file, name), range(), fmt::format("the {} bytes of {}", *bytes, described()));
  }
}

/// The tensors must cover the data section exactly: no byte in two of them, none in nobody's.
void check_coverage(const Header& header, std::size_t data_bytes, const std::string& file) {
  std::vector<std::tuple<std::int64_t, std::int64_t, const std::string*>> ranges;
  ranges.reserve(header.tensors.size());
  for (const auto& [name, entry] : header.tensors) ranges.emplace_back(entry.begin, entry.end, &name);
  // Empty tensors share their begin with the next one, and must come before it.
  std::sort(ranges.begin(), ranges.end(), [](const auto& a, const auto& b) {
    return std::tie(std::get<0>(a), std::get<1>(a)) < std::tie(std::get<0>(b), std::get<1>(b));
  });
  std::int64_t covered = 0;
  for (const auto& [begin, end, name] : ranges) {
    if (begin != covered) {
      throw Error(tensor_label(file, *name), fmt::format("data_offsets [{}, {}]", begin, end),
                  fmt::format("begin {}, where the tensors before it end ({})", covered,
                              begin < covered ? "ranges must not overlap" : "no gaps"));
    }
    covered = end;
  }
  if (static_cast<std::size_t>(covered) != data_bytes) {
    throw Error(file, fmt::format("{} bytes of data", data_bytes),
                fmt::format("the {} that the tensors have", covered));
  }
}

Tensor make_view(const HeaderEntry& entry, std::span<const std::byte> data) {
  Tensor tensor;
  tensor.dtype = entry.dtype;
  tensor.rank = entry.rank;
  tensor.shape = entry.shape;
  std::int64_t stride = 1;
  for (int axis = entry.rank; axis-- > 0;) {
    const auto i = static_cast<std::size_t>(axis);
    tensor.strides[i] = stride;
    stride *= std::max<std::int64_t>(entry.shape[i], 1);
  }
  if (entry.begin < entry.end) tensor.data = const_cast<std::byte*>(data.data() + entry.begin);
  return tensor;
}

/// The format lets a header have any length, so any element may start at any byte.
void align(Tensor& tensor, std::size_t bytes, Copies& copies, const std::string& file, const std::string& name) {
  const auto element = static_cast<std::uintptr_t>(size_bytes(tensor.dtype));
  if (reinterpret_cast<std::uintptr_t>(tensor.data) % element == 0) return;
  std::unique_ptr<std::uint64_t[]> copy(new (std::nothrow) std::uint64_t[(bytes + 7) / 8]);
  if (!copy) {
    throw Error(tensor_label(file, name), fmt::format("{} misaligned bytes, too many to copy", bytes),
                "data aligned to its elements, or more memory");
  }
  std::memcpy(copy.get(), tensor.data, bytes);
  tensor.data = copy.get();
  copies.push_back(std::move(copy));
}

}  // namespace

SafetensorsFile SafetensorsFile::open(const std::filesystem::path& path) {
  const std::shared_ptr<Mapping> mapping = map_file(path.string());
  SafetensorsFile file = parse({static_cast<const std::byte*>(mapping->address), mapping->size}, path.string());
  mapping->copies = std::move(file.mapping_);
  file.mapping_ = mapping;
  return file;
}

SafetensorsFile SafetensorsFile::parse(std::span<const std::byte> bytes, const std::string& name) {
  const std::string_view text = header_text(bytes, name);
  const std::span<const std::byte> data = bytes.subspan(kLengthBytes + text.size());
  Header header = parse_header(text, name);
  for (const auto& [tensor, entry] : header.tensors) check_entry(entry, data.size(), name, tensor);
  check_coverage(header, data.size(), name);

  SafetensorsFile file;
  const auto copies = std::make_shared<Copies>();
  for (const auto& [tensor_name, entry] : header.tensors) {
    Tensor tensor = make_view(entry, data);
    align(tensor, static_cast<std::size_t>(entry.end - entry.begin), *copies, name, tensor_name);
    file.tensors_.emplace_hint(file.tensors_.end(), tensor_name, tensor);
  }
  file.metadata_ = std::move(header.metadata);
  file.mapping_ = copies;
  return file;
}

Tensor SafetensorsFile::find(const std::string& name) const {
  const auto found = tensors_.find(name);
  return found == tensors_.end() ? Tensor{} : found->second;
}

}  // namespace sparsemla::io
