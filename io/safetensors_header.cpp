#include "io/safetensors_header.h"

#include <fmt/format.h>

#include <cstring>
#include <limits>
#include <nlohmann/json.hpp>
#include <utility>

#include "sparsemla/error.h"

namespace sparsemla::io {
namespace {

using Json = nlohmann::json;

constexpr std::pair<std::string_view, DataType> kDtypes[] = {
    {"BF16", DataType::kBFloat16},
    {"F16", DataType::kFloat16},
    {"F32", DataType::kFloat32},
    {"F64", DataType::kFloat64},
    {"I8", DataType::kInt8},
    {"U8", DataType::kUInt8},
    {"I16", DataType::kInt16},
    {"I32", DataType::kInt32},
    {"I64", DataType::kInt64},
    {"BOOL", DataType::kBool},
    {"F8_E4M3", DataType::kFloat8E4M3},
    {"F8_E5M2", DataType::kFloat8E5M2},
};

constexpr std::string_view kFields[] = {"dtype", "shape", "data_offsets"};
enum Field { kDtype, kShape, kOffsets, kNumFields };

/// Takes the parser's events, so that no value is built and nesting beyond what the format has stops at once: a tree of
/// a header made of 10^8 '[' would overflow the stack when it is destroyed, or fill the memory before.
class HeaderReader final : public nlohmann::json_sax<Json> {
 public:
  explicit HeaderReader(const std::string& file) : file_(file) {}

  [[nodiscard]] Header take() { return std::move(header_); }

  bool null() override { return reject("null"); }
  bool boolean(bool value) override { return reject(value ? "true" : "false"); }
  bool number_integer(std::int64_t value) override { return reject(std::to_string(value)); }
  bool number_float(double, const std::string& text) override { return reject(printable(text)); }
  bool binary(Json::binary_t&) override { return reject("binary data"); }

  bool number_unsigned(std::uint64_t value) override {
    if (place_ != Place::kArray || value > std::uint64_t{std::numeric_limits<std::int64_t>::max()}) {
      return reject(std::to_string(value));
    }
    const auto number = static_cast<std::int64_t>(value);
    if (field_ == kShape) {
      if (entry_.rank == Tensor::kMaxRank) {
        throw Error(label(), fmt::format("a shape of more than {} extents", Tensor::kMaxRank),
                    fmt::format("a rank of at most {}", Tensor::kMaxRank));
      }
      entry_.shape[static_cast<std::size_t>(entry_.rank++)] = number;
      return true;
    }
    if (num_offsets_ == 2) throw Error(label(), "more than two data_offsets", "[begin, end]");
    (num_offsets_++ == 0 ? entry_.begin : entry_.end) = number;
    return true;
  }

  bool string(std::string& value) override {
    if (place_ == Place::kMetadata) {
      header_.metadata[key_] = std::move(value);
      return true;
    }
    if (place_ != Place::kEntry || field_ != kDtype) return reject(fmt::format("\"{}\"", printable(value)));
    entry_.dtype = dtype_from_name(value);
    if (entry_.dtype == DataType::kNone) {
      throw Error(label(), fmt::format("dtype \"{}\"", printable(value)), "one of " + dtype_names());
    }
    return true;
  }

  bool start_object(std::size_t) override {
    if (place_ == Place::kOutside) {
      place_ = Place::kTop;
    } else if (place_ == Place::kTop && name_ == kMetadataKey) {
      place_ = Place::kMetadata;
    } else if (place_ == Place::kTop) {
      place_ = Place::kEntry;
      entry_ = {};
      num_offsets_ = 0;
      for (bool& seen : seen_) seen = false;
    } else {
      return reject("an object");
    }
    return true;
  }

  bool key(std::string& value) override {
    if (place_ == Place::kTop) {
      const bool metadata = value == kMetadataKey;
      if (metadata ? std::exchange(metadata_seen_, true) : header_.tensors.contains(value)) {
        throw Error(file_, fmt::format("the name \"{}\" twice", printable(value)), "each name once");
      }
      name_ = std::move(value);
    } else if (place_ == Place::kMetadata) {
      if (header_.metadata.contains(value)) {
        throw Error(label(), fmt::format("the key \"{}\" twice", printable(value)), "each key once");
      }
      key_ = std::move(value);
    } else {
      start_field(value);
    }
    return true;
  }

  bool end_object() override {
    if (place_ == Place::kEntry) {
      for (int field = 0; field < kNumFields; ++field) {
        if (!seen_[field]) throw Error(label(), fmt::format("no {}", kFields[field]), "dtype, shape and data_offsets");
      }
      header_.tensors.emplace(std::move(name_), entry_);
    }
    place_ = place_ == Place::kTop ? Place::kOutside : Place::kTop;
    return true;
  }

  bool start_array(std::size_t) override {
    if (place_ != Place::kEntry || field_ == kDtype) return reject("an array");
    place_ = Place::kArray;
    return true;
  }

  bool end_array() override {
    if (field_ == kOffsets && num_offsets_ != 2) {
      throw Error(label(), fmt::format("{} data_offsets", num_offsets_), "[begin, end]");
    }
    place_ = Place::kEntry;
    return true;
  }

  bool parse_error(std::size_t, const std::string&, const nlohmann::detail::exception& error) override {
    const std::string_view text = error.what();  // "[json.exception.parse_error.101] parse error at line 1, ..."
    throw Error(file_, "a header that is not JSON: " + printable(text.substr(text.find("] ") + 2), 250),
                "a JSON object");
  }

 private:
  enum class Place { kOutside, kTop, kMetadata, kEntry, kArray };

  void start_field(const std::string& value) {
    int field = 0;
    while (field < kNumFields && kFields[field] != value) ++field;
    if (field == kNumFields) {
      throw Error(label(), fmt::format("the key \"{}\"", printable(value)), "dtype, shape and data_offsets");
    }
    field_ = static_cast<Field>(field);
    if (std::exchange(seen_[field], true)) throw Error(label(), fmt::format("{} twice", kFields[field]), "it once");
  }

  [[nodiscard]] std::string label() const {
    return name_ == kMetadataKey ? fmt::format("{}: {}", file_, kMetadataKey) : tensor_label(file_, name_);
  }

  [[nodiscard]] static std::string dtype_names() {
    std::string names;
    for (const auto& [name, dtype] : kDtypes) names += (names.empty() ? "" : ", ") + std::string(name);
    return names;
  }

  /// A value that has no business where it stands. Always throws; the bool suits the callers.
  bool reject(const std::string& found) const {
    switch (place_) {
      case Place::kOutside:
        throw Error(file_, "a header that is " + found, "a JSON object");
      case Place::kTop:
        throw Error(label(), found, name_ == kMetadataKey ? "an object of strings" : "an object");
      case Place::kMetadata:
        throw Error(label(), fmt::format("{} for \"{}\"", found, printable(key_)), "a string");
      case Place::kEntry:
        throw Error(label(), fmt::format("{} for {}", found, kFields[field_]),
                    field_ == kDtype ? "a string" : "an array of numbers");
      case Place::kArray:
        break;
    }
    throw Error(label(), fmt::format("{} in {}", found, kFields[field_]), "whole numbers from 0 to 2^63 - 1");
  }

  const std::string& file_;
  Header header_;
  Place place_ = Place::kOutside;
  std::string name_;  // the last key of the top level
  std::string key_;   // the last key of __metadata__
  HeaderEntry entry_;
  Field field_ = kDtype;
  int num_offsets_ = 0;
  bool seen_[kNumFields] = {};
  bool metadata_seen_ = false;
};

}  // namespace

Header parse_header(std::string_view json, const std::string& file) {
  // Two things the JSON parser would let pass: a byte-order mark is skipped, a NUL ends the text wherever it stands.
  if (json.empty() || json.front() != '{') {
    throw Error(file,
                json.empty() ? "an empty header" : fmt::format("a header that begins \"{}\"", printable(json, 16)),
                "a JSON object");
  }
  if (const std::size_t nul = json.find('\0'); nul != json.npos) {
    throw Error(file, fmt::format("a NUL at byte {} of the header", nul), "JSON text");
  }
  HeaderReader reader(file);
  Json::sax_parse(json.data(), json.data() + json.size(), &reader);
  return reader.take();
}

DataType dtype_from_name(std::string_view name) noexcept {
  for (const auto& [known, dtype] : kDtypes) {
    if (known == name) return dtype;
  }
  return DataType::kNone;
}

std::string_view dtype_name(DataType dtype) noexcept {
  for (const auto& [name, known] : kDtypes) {
    if (known == dtype) return name;
  }
  return {};
}

std::optional<std::int64_t> byte_count(std::span<const std::int64_t> shape, DataType dtype) noexcept {
  std::int64_t bytes = size_bytes(dtype);
  bool empty = false;
  for (const std::int64_t extent : shape) {
    if (extent == 0) {
      empty = true;
    } else if (__builtin_mul_overflow(bytes, extent, &bytes)) {
      return std::nullopt;
    }
  }
  return empty ? 0 : bytes;
}

std::string printable(std::string_view text, std::size_t limit) {
  std::string result;
  for (const char c : text.substr(0, limit)) {
    const auto byte = static_cast<unsigned char>(c);
    if (byte >= 0x20 && byte < 0x7F) {
      result += c;
    } else {
      result += fmt::format("\\x{:02x}", byte);
    }
  }
  return text.size() > limit ? result + "..." : result;
}

std::string tensor_label(const std::string& file, std::string_view name) {
  return fmt::format("{}: tensor \"{}\"", file, printable(name));
}

}  // namespace sparsemla::io
