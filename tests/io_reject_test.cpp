// What is not the safetensors format is refused, and the message says what is wrong where.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

#include "io_test_support.h"

namespace sparsemla::io {
namespace {

struct Rejection {
  std::string bytes;
  std::string message;  // part of it
};

std::string entry(const std::string& fields, const std::string& data = "") {
  return file_bytes("{\"x\":{" + fields + "}}", data);
}

/// A tensor x of 4 bytes of U8 with one field replaced.
std::string with_shape(const std::string& shape) {
  return entry(R"("dtype":"U8","data_offsets":[0,4],"shape":)" + shape, "abcd");
}
std::string with_offsets(const std::string& offsets, const std::string& data = "abcd") {
  return entry(R"("dtype":"U8","shape":[4],"data_offsets":)" + offsets, data);
}
std::string with_dtype(const std::string& dtype) {
  return entry(R"("shape":[4],"data_offsets":[0,4],"dtype":)" + dtype, "abcd");
}
/// Two U8 tensors, x and y, at the given offsets.
std::string pair_at(const std::string& x, const std::string& x_shape, const std::string& y,
                    const std::string& y_shape) {
  return file_bytes(R"({"x":{"dtype":"U8","shape":[)" + x_shape + R"(],"data_offsets":[)" + x +
                        R"(]},"y":{"dtype":"U8","shape":[)" + y_shape + R"(],"data_offsets":[)" + y + "]}}",
                    "abcdefgh");
}

std::vector<Rejection> frame_rejections() {
  const std::string big(200, '[');
  return {
      {"", "mem: found 0 bytes, want at least 8"},
      {"1234567", "mem: found 7 bytes, want at least 8"},
      {length_prefix(0), "mem: found an empty header, want a JSON object"},
      {length_prefix(1), "a header length of 1, want at most the 0 bytes there"},
      {length_prefix(3) + "{}", "a header length of 3, want at most the 2 bytes there"},
      {length_prefix(100'000'001) + "{}", "a header length of 100000001, want at most 100000000"},
      {length_prefix(std::uint64_t{1} << 63) + "{}", "a header length of 9223372036854775808, want at most 100000000"},
      {length_prefix(~std::uint64_t{0}) + "{}", "a header length of 18446744073709551615"},
      {length_prefix(~std::uint64_t{0} - 7) + "{}", "a header length of 18446744073709551608"},
      {file_bytes("[]"), "a header that begins \"[]\", want a JSON object"},
      {file_bytes("17"), "a header that begins \"17\""},
      {file_bytes(" {}"), "a header that begins \" {}\""},
      {file_bytes("\xEF\xBB\xBF{}"), "a header that begins \"\\xef\\xbb\\xbf{}\""},
      {file_bytes(big), "a header that begins \"" + big.substr(0, 16) + "...\""},
      {file_bytes("{"), "not JSON"},
      {file_bytes("{}x"), "not JSON"},
      {file_bytes("{}{}"), "not JSON"},
      {file_bytes(std::string("{}\0x", 4)), "a NUL at byte 2 of the header"},
      {file_bytes(R"({"x":})"), "not JSON"},
      {file_bytes("{\"\xFF\":{}}"), "ill-formed UTF-8"},
      {file_bytes("{\"\xC0\x80\":{}}"), "ill-formed UTF-8"},
      {file_bytes("{\"\n\":{}}"), "not JSON"},
      {file_bytes(R"({"\ud800":{}})"), "not JSON"},
      {file_bytes(R"({"x":1e999})"), "not JSON"},
      {file_bytes("{}", "a"), "mem: found 1 bytes of data, want the 0 that the tensors have"},
  };
}

std::vector<Rejection> structure_rejections() {
  const std::string deep = std::string(5000, '[') + std::string(5000, ']');
  const std::string u8 = R"({"dtype":"U8","shape":[0],"data_offsets":[0,0]})";
  return {
      {file_bytes(R"({"x":null})"), "mem: tensor \"x\": found null, want an object"},
      {file_bytes(R"({"x":true})"), "tensor \"x\": found true, want an object"},
      {file_bytes(R"({"x":5})"), "tensor \"x\": found 5, want an object"},
      {file_bytes(R"({"x":-5})"), "tensor \"x\": found -5, want an object"},
      {file_bytes(R"({"x":0.5})"), "tensor \"x\": found 0.5, want an object"},
      {file_bytes(R"({"x":"F32"})"), "tensor \"x\": found \"F32\", want an object"},
      {file_bytes(R"({"x":[]})"), "tensor \"x\": found an array, want an object"},
      {file_bytes(R"({"x":)" + deep + "}"), "tensor \"x\": found an array, want an object"},
      {file_bytes(R"({"a\u001b[31m\u0000\u00e9":1})"), R"(tensor "a\x1b[31m\x00\xc3\xa9": found 1)"},
      {file_bytes("{\"" + std::string(500, 'n') + "\":1}"), "tensor \"" + std::string(100, 'n') + "...\": found 1"},
      {file_bytes("{\"x\":" + u8 + ",\"x\":" + u8 + "}"), "mem: found the name \"x\" twice, want each name once"},
      {file_bytes("{\"x\":" + u8 + ",\"\\u0078\":" + u8 + "}"), "mem: found the name \"x\" twice"},
      {file_bytes(R"({"__metadata__":{},"__metadata__":{}})"), "found the name \"__metadata__\" twice"},
      {file_bytes(R"({"__metadata__":[]})"), "mem: __metadata__: found an array, want an object of strings"},
      {file_bytes(R"({"__metadata__":null})"), "__metadata__: found null, want an object of strings"},
      {file_bytes(R"({"__metadata__":{"k":1}})"), "__metadata__: found 1 for \"k\", want a string"},
      {file_bytes(R"({"__metadata__":{"k":null}})"), "__metadata__: found null for \"k\", want a string"},
      {file_bytes(R"({"__metadata__":{"k":{}}})"), "__metadata__: found an object for \"k\", want a string"},
      {file_bytes(R"({"__metadata__":{"k":["v"]}})"), "__metadata__: found an array for \"k\", want a string"},
      {file_bytes(R"({"__metadata__":{"k":"a","k":"a"}})"), "__metadata__: found the key \"k\" twice"},
      {entry(""), "tensor \"x\": found no dtype, want dtype, shape and data_offsets"},
      {entry(R"("dtype":"U8","data_offsets":[0,0])"), "tensor \"x\": found no shape"},
      {entry(R"("dtype":"U8","shape":[0])"), "tensor \"x\": found no data_offsets"},
      {entry(R"("dtype":"U8","shape":[0],"data_offsets":[0,0],"strides":[1])"),
       "tensor \"x\": found the key \"strides\""},
      {entry(R"("dtype":"U8","dtype":"U8","shape":[0],"data_offsets":[0,0])"), "tensor \"x\": found dtype twice"},
      {entry(R"("dtype":"U8","shape":[0],"shape":[0],"data_offsets":[0,0])"), "tensor \"x\": found shape twice"},
      {entry(R"("shape":[0],"data_offsets":[0,0],"data_offsets":[0,0])"), "tensor \"x\": found data_offsets twice"},
  };
}

std::vector<Rejection> field_rejections() {
  return {
      {with_dtype("\"F4\""), "tensor \"x\": found dtype \"F4\", want one of BF16, F16, F32"},
      {with_dtype("\"U16\""), "tensor \"x\": found dtype \"U16\""},
      {with_dtype("\"u8\""), "tensor \"x\": found dtype \"u8\""},
      {with_dtype("\"\""), "tensor \"x\": found dtype \"\""},
      {with_dtype("5"), "tensor \"x\": found 5 for dtype, want a string"},
      {with_dtype("null"), "tensor \"x\": found null for dtype, want a string"},
      {with_dtype("[\"U8\"]"), "tensor \"x\": found an array for dtype, want a string"},
      {with_dtype("{}"), "tensor \"x\": found an object for dtype, want a string"},
      {with_shape("4"), "tensor \"x\": found 4 for shape, want an array of numbers"},
      {with_shape("\"4\""), "tensor \"x\": found \"4\" for shape, want an array of numbers"},
      {with_shape("{}"), "tensor \"x\": found an object for shape, want an array of numbers"},
      {with_shape("[[4]]"), "tensor \"x\": found an array in shape, want whole numbers"},
      {with_shape("[{}]"), "tensor \"x\": found an object in shape, want whole numbers"},
      {with_shape("[\"4\"]"), "tensor \"x\": found \"4\" in shape, want whole numbers"},
      {with_shape("[null]"), "tensor \"x\": found null in shape, want whole numbers"},
      {with_shape("[true]"), "tensor \"x\": found true in shape, want whole numbers"},
      {with_shape("[-4]"), "tensor \"x\": found -4 in shape, want whole numbers"},
      {with_shape("[-0]"), "tensor \"x\": found 0 in shape, want whole numbers"},
      {with_shape("[4.0]"), "tensor \"x\": found 4.0 in shape, want whole numbers"},
      {with_shape("[4e0]"), "tensor \"x\": found 4e0 in shape, want whole numbers"},
      {with_shape("[9223372036854775808]"), "tensor \"x\": found 9223372036854775808 in shape"},
      {with_shape("[18446744073709551620]"), "tensor \"x\": found 18446744073709551620 in shape"},
      {with_shape("[04]"), "not JSON"},
      {with_shape("[1,1,1,1,1,4]"), "tensor \"x\": found a shape of more than 5 extents, want a rank of at most 5"},
      {with_shape("[3]"), "tensor \"x\": found data_offsets [0, 4], want the 3 bytes of U8 [3]"},
      {with_shape("[]"), "tensor \"x\": found data_offsets [0, 4], want the 1 bytes of U8 []"},
      {with_shape("[4,0]"), "tensor \"x\": found data_offsets [0, 4], want the 0 bytes of U8 [4, 0]"},
      // 2^32 * 2^32 = 0 and 2^62 * 4 + 4 = 4 in 64 bits
      {with_shape("[4294967296,4294967296]"), "found U8 [4294967296, 4294967296], want extents whose product is below"},
      {with_shape("[4611686018427387904,4]"), "found U8 [4611686018427387904, 4], want extents whose product is below"},
      {with_shape("[0,4294967296,4294967296]"), "want extents whose product is below"},
      {entry(R"("dtype":"F64","shape":[2305843009213693952],"data_offsets":[0,0])"), "found F64 [2305843009213693952]"},
      {with_offsets("[]"), "tensor \"x\": found 0 data_offsets, want [begin, end]"},
      {with_offsets("[4]"), "tensor \"x\": found 1 data_offsets, want [begin, end]"},
      {with_offsets("[0,4,4]"), "tensor \"x\": found more than two data_offsets, want [begin, end]"},
      {with_offsets("[0,-4]"), "tensor \"x\": found -4 in data_offsets, want whole numbers"},
      {with_offsets("[0,4.5]"), "tensor \"x\": found 4.5 in data_offsets, want whole numbers"},
      {with_offsets("[0,18446744073709551615]"), "tensor \"x\": found 18446744073709551615 in data_offsets"},
      {with_offsets("[4,0]"), "tensor \"x\": found data_offsets [4, 0], want begin <= end"},
      {with_offsets("[0,4]", "abc"),
       "tensor \"x\": found data_offsets [0, 4], want offsets within the 3 bytes of data"},
      {with_offsets("[9223372036854775803,9223372036854775807]"), "want offsets within the 4 bytes of data"},
      {with_offsets("[0,4]", "abcde"), "mem: found 5 bytes of data, want the 4 that the tensors have"},
      {with_offsets("[1,5]", "abcde"), "tensor \"x\": found data_offsets [1, 5], want begin 0"},
      {pair_at("0,4", "4", "5,8", "3"),
       "tensor \"y\": found data_offsets [5, 8], want begin 4, where the tensors before it"},
      {pair_at("0,5", "5", "4,8", "4"),
       "tensor \"y\": found data_offsets [4, 8], want begin 5, where the tensors before it"},
      {pair_at("0,8", "8", "0,8", "8"), "want begin 8, where the tensors before it end (ranges must not overlap)"},
      {pair_at("0,8", "8", "2,2", "0"), "tensor \"y\": found data_offsets [2, 2], want begin 8"},
      {pair_at("2,8", "6", "0,1", "1"),
       "tensor \"x\": found data_offsets [2, 8], want begin 1, where the tensors before it"},
  };
}

void expect_rejections(const std::vector<Rejection>& rejections) {
  for (const Rejection& rejection : rejections) {
    SCOPED_TRACE(rejection.bytes.substr(0, 200));
    const std::string message = error_of([&] { parse(rejection.bytes); });
    EXPECT_TRUE(contains(message, rejection.message));
    EXPECT_TRUE(std::all_of(message.begin(), message.end(), [](char c) { return c >= 0x20 && c < 0x7F; })) << message;
    EXPECT_LT(message.size(), 500u);
  }
}

TEST(SafetensorsRejects, Frame) { expect_rejections(frame_rejections()); }
TEST(SafetensorsRejects, Structure) { expect_rejections(structure_rejections()); }
TEST(SafetensorsRejects, Fields) { expect_rejections(field_rejections()); }

TEST(SafetensorsRejects, TheUnspoiltFormsOfTheTableAreAccepted) {
  EXPECT_EQ(to_string(parse(with_shape("[2,2]")).find("x")), "uint8 [2, 2] on cpu");
  EXPECT_EQ(to_string(parse(with_offsets("[0,4]")).find("x")), "uint8 [4] on cpu");
  EXPECT_EQ(to_string(parse(with_dtype("\"F8_E4M3\"")).find("x")), "float8_e4m3 [4] on cpu");
  EXPECT_EQ(parse(pair_at("0,4", "4", "4,8", "4")).tensors().size(), 2u);
  EXPECT_EQ(parse(file_bytes(R"({"__metadata__":{"k":"v"}})")).metadata().at("k"), "v");
}

TEST(SafetensorsRejects, EveryTruncation) {
  const std::string bytes = pair_at("0,4", "4", "4,8", "4");
  ASSERT_NO_THROW(parse(bytes));
  for (std::size_t size = 0; size < bytes.size(); ++size) {
    EXPECT_THROW(parse(bytes.substr(0, size)), Error) << size;
  }
}

TEST(SafetensorsRejects, NestingOfTheLongestHeaderNeedsNoStack) {
  std::string header = R"({"x":{"dtype":"U8","shape":)";
  header.append(100'000'000 - header.size(), '[');
  EXPECT_TRUE(contains(error_of([&] { parse(file_bytes(header)); }), "found an array in shape"));
  std::string objects;
  for (int i = 0; i < 1'000'000; ++i) objects += "{\"x\":";
  EXPECT_TRUE(contains(error_of([&] { parse(file_bytes(objects)); }), "found the key \"x\""));
}

}  // namespace
}  // namespace sparsemla::io
