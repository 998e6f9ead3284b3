// Strict reader and writer of the safetensors format.
#pragma once

#include <cstddef>
#include <filesystem>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "sparsemla/tensor.h"

namespace sparsemla::io {

/// A safetensors file held in memory (mapped, private and read-only). Its tensors are contiguous CPU views that live as
/// long as this object or a copy of it does. Each is aligned to its element: one that is not aligned in the file is
/// copied (as much memory again). Data is null where there are no elements. Contents are not looked at: a BOOL byte may
/// hold any value. A file must not be shortened in place while it is open (as with any mapping, reading then ends the
/// process); replacing it by a rename, as write_safetensors does, is safe.
class SafetensorsFile {
 public:
  /// Errors (sparsemla::Error; argument = the path, or path + tensor name): cannot be opened, shorter than its header
  /// says, header not a JSON object or over 100 MB, a dtype or shape that does not match its byte range, ranges that
  /// overlap, leave gaps or run past the end, a duplicate name or key, extents whose product overflows, a rank above
  /// Tensor::kMaxRank, a dtype the library lacks, nesting, keys or numbers that are not what the format allows.
  static SafetensorsFile open(const std::filesystem::path& path);
  /// The same over bytes the caller keeps alive. `name` stands in messages.
  static SafetensorsFile parse(std::span<const std::byte> bytes, const std::string& name);

  [[nodiscard]] const std::map<std::string, Tensor>& tensors() const noexcept { return tensors_; }
  [[nodiscard]] const std::map<std::string, std::string>& metadata() const noexcept { return metadata_; }
  /// The tensor, or one that is not defined().
  [[nodiscard]] Tensor find(const std::string& name) const;

 private:
  std::map<std::string, Tensor> tensors_;
  std::map<std::string, std::string> metadata_;
  std::shared_ptr<const void> mapping_;  // keeps the bytes alive
};

/// Writes contiguous CPU tensors in the order given; the data section starts 8-byte aligned, and since the format
/// allows no gaps a tensor after one of odd size may not be aligned. The file appears whole or not at all: it is
/// written beside `path`, then renamed (without fsync; a symbolic link at `path` is replaced, not followed). Errors: a
/// tensor that is not contiguous, a dtype the format lacks, a name twice or kept by the format, text that is not UTF-8,
/// a header over 100 MB, a `path` that is there and no regular file, a write that fails.
void write_safetensors(const std::filesystem::path& path, const std::vector<std::pair<std::string, Tensor>>& tensors,
                       const std::map<std::string, std::string>& metadata = {});

}  // namespace sparsemla::io
