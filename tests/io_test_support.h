// What the tests of the safetensors reader and writer share.
#pragma once

#include <gtest/gtest.h>

#include <cstdint>
#include <cstring>
#include <span>
#include <string>
#include <string_view>

#include "io/safetensors.h"
#include "sparsemla/error.h"

namespace sparsemla::io {

inline std::string length_prefix(std::uint64_t length) {
  std::string bytes(sizeof(length), '\0');
  std::memcpy(bytes.data(), &length, sizeof(length));
  return bytes;
}

inline std::string file_bytes(const std::string& header, const std::string& data = "") {
  return length_prefix(header.size()) + header + data;
}

inline SafetensorsFile parse(const std::string& bytes) {
  return SafetensorsFile::parse(std::as_bytes(std::span(bytes)), "mem");
}

inline std::string tensor_bytes(const Tensor& tensor) {
  const auto size = static_cast<std::size_t>(tensor.num_elements() * size_bytes(tensor.dtype));
  return size == 0 ? "" : std::string(static_cast<const char*>(tensor.data), size);
}

/// The message of the Error that `call` throws, or a text that says it threw none.
template <typename Call>
std::string error_of(const Call& call) {
  try {
    call();
  } catch (const Error& error) {
    return error.what();
  }
  return "(no error)";
}

inline testing::AssertionResult contains(const std::string& text, std::string_view part) {
  if (text.find(part) != text.npos) return testing::AssertionSuccess();
  return testing::AssertionFailure() << '"' << text << "\" does not contain \"" << part << '"';
}

}  // namespace sparsemla::io
