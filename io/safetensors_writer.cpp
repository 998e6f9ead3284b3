#include <fcntl.h>
#include <fmt/format.h>
#include <fmt/ranges.h>  // join, in fmt 11 and later
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdint>
#include <cstring>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>
#include <string_view>
#include <system_error>

#include "io/safetensors.h"
#include "io/safetensors_header.h"
#include "sparsemla/error.h"

namespace sparsemla::io {
namespace {

namespace fs = std::filesystem;
using NamedTensor = std::pair<std::string, Tensor>;

/// Errors: as write_safetensors. Returns the tensor's bytes.
std::int64_t check_tensor(const Tensor& tensor, const std::string& label) {
  if (dtype_name(tensor.dtype).empty()) throw Error(label, to_string(tensor), "a dtype that safetensors has");
  if (tensor.device.type != DeviceType::kCpu) throw Error(label, "data on " + to_string(tensor.device), "data on cpu");
  if (tensor.rank < 0 || tensor.rank > Tensor::kMaxRank) {
    throw Error(label, fmt::format("rank {}", tensor.rank), fmt::format("a rank of 0 to {}", Tensor::kMaxRank));
  }
  const std::span shape(tensor.shape.data(), static_cast<std::size_t>(tensor.rank));
  if (std::any_of(shape.begin(), shape.end(), [](std::int64_t extent) { return extent < 0; })) {
    throw Error(label, shape_string(tensor), "extents of 0 or more");
  }
  const std::optional<std::int64_t> bytes = byte_count(shape, tensor.dtype);
  if (!bytes) throw Error(label, shape_string(tensor), "extents whose product is below 2^63 bytes");
  if (!tensor.is_contiguous()) {
    const std::span strides(tensor.strides.data(), shape.size());
    throw Error(label, fmt::format("{} with strides [{}]", shape_string(tensor), fmt::join(strides, ", ")),
                "a contiguous tensor");
  }
  if (*bytes > 0 && tensor.data == nullptr) throw Error(label, "null data", "the tensor's elements");
  return *bytes;
}

/// A JSON string. The header is UTF-8, so other bytes cannot be written. Errors: those.
std::string quoted(const std::string& text, const std::string& path) {
  try {
    return nlohmann::json(text).dump();
  } catch (const nlohmann::json::exception&) {
    throw Error(path, fmt::format("the text \"{}\"", printable(text)), "names and metadata in UTF-8");
  }
}

/// Length and JSON, padded with spaces so that the data starts at a multiple of 8.
std::string make_header(const std::string& path, const std::vector<NamedTensor>& tensors,
                        const std::map<std::string, std::string>& metadata) {
  std::string json;
  for (const auto& [key, value] : metadata) {
    json += (json.empty() ? "" : ",") + quoted(key, path) + ":" + quoted(value, path);
  }
  if (!json.empty()) json = fmt::format("\"{}\":{{{}}}", kMetadataKey, json);

  std::set<std::string> names;
  std::int64_t offset = 0;
  for (const auto& [name, tensor] : tensors) {
    const std::string label = tensor_label(path, name);
    if (name == kMetadataKey) throw Error(label, "the name that the format keeps for metadata", "another name");
    if (!names.insert(name).second) throw Error(label, "the name twice", "each name once");
    const std::int64_t begin = offset;
    if (__builtin_add_overflow(offset, check_tensor(tensor, label), &offset)) {
      throw Error(label, "2^63 bytes of data or more in all", "less");
    }
    const std::span shape(tensor.shape.data(), static_cast<std::size_t>(tensor.rank));
    json += fmt::format("{}{}:{{\"dtype\":\"{}\",\"shape\":[{}],\"data_offsets\":[{},{}]}}", json.empty() ? "" : ",",
                        quoted(name, path), dtype_name(tensor.dtype), fmt::join(shape, ","), begin, offset);
  }
  json = "{" + json + "}";
  json.append((8 - json.size() % 8) % 8, ' ');
  if (json.size() > kMaxHeaderBytes) {
    throw Error(path, fmt::format("a header of {} bytes", json.size()), fmt::format("at most {}", kMaxHeaderBytes));
  }
  const std::uint64_t length = json.size();
  std::string header(kLengthBytes, '\0');
  std::memcpy(header.data(), &length, kLengthBytes);
  return header + json;
}

/// A new file in the folder of `path`, under a name nobody has. Gone at the end unless it was renamed to `path`.
class PendingFile {
 public:
  explicit PendingFile(const fs::path& path) : path_(path) {
    static std::atomic<unsigned> counter{0};
    constexpr int kAttempts = 1000;  // names that a killed process left behind, or one of another pid namespace has
    for (int attempt = 0; attempt < kAttempts; ++attempt) {
      // Short, whatever the name of `path`: that one may be as long as the file system lets it.
      temporary_ = path_.parent_path() / fmt::format(".sparsemla-{}-{}.tmp", ::getpid(), counter++);
      descriptor_ = ::open(temporary_.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
      if (descriptor_ >= 0) return;
      if (errno != EEXIST) break;
    }
    fail();
  }
  PendingFile(const PendingFile&) = delete;
  PendingFile& operator=(const PendingFile&) = delete;
  ~PendingFile() {
    if (descriptor_ >= 0) ::close(descriptor_);
    if (!renamed_) ::unlink(temporary_.c_str());
  }

  void write(const void* data, std::size_t size) {
    for (const char* next = static_cast<const char*>(data); size > 0;) {
      const ssize_t written = ::write(descriptor_, next, size);  // at most 2 GiB a call, so more than once for more
      if (written < 0 && errno == EINTR) continue;
      if (written < 0) fail();
      next += written;
      size -= static_cast<std::size_t>(written);
    }
  }

  void commit() {
    // Some file systems report a full disk only here.
    if (::close(std::exchange(descriptor_, -1)) != 0) fail();
    if (::rename(temporary_.c_str(), path_.c_str()) != 0) fail();
    renamed_ = true;
  }

 private:
  [[noreturn]] void fail() const {
    throw Error(path_.string(), std::generic_category().message(errno), "a file that can be written");
  }

  fs::path path_;
  fs::path temporary_;
  int descriptor_ = -1;
  bool renamed_ = false;
};

}  // namespace

void write_safetensors(const fs::path& path, const std::vector<NamedTensor>& tensors,
                       const std::map<std::string, std::string>& metadata) {
  const std::string header = make_header(path.string(), tensors, metadata);
  // Renaming over /dev/null or a pipe would replace it by a file.
  std::error_code ignored;
  const fs::file_status status = fs::status(path, ignored);
  if (fs::exists(status) && !fs::is_regular_file(status)) {
    throw Error(path.string(), fs::is_directory(status) ? "a directory" : "a pipe or device", "a regular file");
  }
  PendingFile file(path);
  file.write(header.data(), header.size());
  for (const auto& [name, tensor] : tensors) {
    file.write(tensor.data, static_cast<std::size_t>(tensor.num_elements() * size_bytes(tensor.dtype)));
  }
  file.commit();
}

}  // namespace sparsemla::io
