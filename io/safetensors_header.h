// The header of a safetensors file as plain records, and the names of its dtypes. Internal to io/.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <string_view>

#include "sparsemla/tensor.h"

namespace sparsemla::io {

/// Longest header that is read or written; the limit of the format's reference implementation.
inline constexpr std::uint64_t kMaxHeaderBytes = 100'000'000;
/// Bytes before the header: its length, little-endian.
inline constexpr std::size_t kLengthBytes = 8;
inline constexpr std::string_view kMetadataKey = "__metadata__";

/// A tensor as the header declares it. Extents and offsets are not negative; nothing is held against the data yet.
struct HeaderEntry {
  DataType dtype = DataType::kNone;
  int rank = 0;
  std::array<std::int64_t, Tensor::kMaxRank> shape{};
  std::int64_t begin = 0;  // bytes from the start of the data section
  std::int64_t end = 0;
};

struct Header {
  std::map<std::string, HeaderEntry> tensors;
  std::map<std::string, std::string> metadata;
};

/// Reads the JSON text. Takes constant stack whatever the nesting. Errors: anything that is not exactly
/// {name: {dtype, shape, data_offsets}, ..., "__metadata__": {string: string}}; `file` stands in the message.
[[nodiscard]] Header parse_header(std::string_view json, const std::string& file);

/// kNone for a name that the library has no dtype for.
[[nodiscard]] DataType dtype_from_name(std::string_view name) noexcept;
/// Empty for a dtype that the format lacks.
[[nodiscard]] std::string_view dtype_name(DataType dtype) noexcept;

/// Bytes of a contiguous tensor. Nothing when the product of the extents other than 0 does not fit in 63 bits: the
/// strides of such a tensor would not fit either, even where another extent is 0.
[[nodiscard]] std::optional<std::int64_t> byte_count(std::span<const std::int64_t> shape, DataType dtype) noexcept;

/// Text from a file, fit for a message: bytes outside printable ASCII as \xHH, cut after `limit` bytes.
[[nodiscard]] std::string printable(std::string_view text, std::size_t limit = 100);
/// `file: tensor "name"`.
[[nodiscard]] std::string tensor_label(const std::string& file, std::string_view name);

}  // namespace sparsemla::io
