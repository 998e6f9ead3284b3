// The safetensors reader and writer on files: what goes out comes back, whole or not at all.
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <csignal>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <limits>
#include <map>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "io_test_support.h"

namespace sparsemla::io {
namespace {

namespace fs = std::filesystem;
using Named = std::vector<std::pair<std::string, Tensor>>;

constexpr DataType kAllDtypes[] = {DataType::kBFloat16, DataType::kFloat16,    DataType::kFloat32,
                                   DataType::kFloat64,  DataType::kInt8,       DataType::kUInt8,
                                   DataType::kInt16,    DataType::kInt32,      DataType::kInt64,
                                   DataType::kBool,     DataType::kFloat8E4M3, DataType::kFloat8E5M2};

/// An empty folder for each test.
class SafetensorsFiles : public testing::Test {
 protected:
  void SetUp() override {
    std::string pattern = (fs::temp_directory_path() / "sparsemla_io_XXXXXX").string();
    ASSERT_NE(::mkdtemp(pattern.data()), nullptr);
    folder_ = pattern;
  }
  void TearDown() override { fs::remove_all(folder_); }

  void put(const fs::path& path, const std::string& bytes) { std::ofstream(path, std::ios::binary) << bytes; }
  std::string get(const fs::path& path) {
    std::ifstream stream(path, std::ios::binary);
    return {std::istreambuf_iterator<char>(stream), {}};
  }
  std::size_t files_in_folder() {
    return static_cast<std::size_t>(std::distance(fs::directory_iterator(folder_), fs::directory_iterator{}));
  }
  std::string open_error(const fs::path& path) {
    return error_of([&] { SafetensorsFile::open(path); });
  }

  fs::path folder_;
};

/// A soft limit on the size of files, as a stand-in for a full disk.
class FileSizeLimit {
 public:
  explicit FileSizeLimit(rlim_t bytes) : handler_(std::signal(SIGXFSZ, SIG_IGN)) {
    ::getrlimit(RLIMIT_FSIZE, &before_);
    const rlimit limit{bytes, before_.rlim_max};
    ::setrlimit(RLIMIT_FSIZE, &limit);
  }
  ~FileSizeLimit() {
    ::setrlimit(RLIMIT_FSIZE, &before_);
    std::signal(SIGXFSZ, handler_);
  }

 private:
  void (*handler_)(int);
  rlimit before_{};
};

TEST_F(SafetensorsFiles, EveryDtypeComesBack) {
  std::vector<std::vector<std::uint64_t>> storage;
  const std::uint8_t one = 1;  // puts everything behind it off its alignment
  Named written = {{"one", Tensor::contiguous(&one, DataType::kUInt8, {1, 1})}};
  int seed = 1;
  for (const DataType dtype : kAllDtypes) {
    storage.emplace_back(7 * static_cast<std::size_t>(size_bytes(dtype)));
    for (auto& word : storage.back()) word = static_cast<std::uint64_t>(seed++) * 0x9E3779B97F4A7C15u;
    written.emplace_back(std::string(to_string(dtype)), Tensor::contiguous(storage.back().data(), dtype, {7, 1}));
  }
  const fs::path path = folder_ / "all.safetensors";
  write_safetensors(path, written, {{"made by", "a \"test\"\n"}, {"é", ""}});

  const SafetensorsFile file = SafetensorsFile::open(path);
  EXPECT_EQ(file.metadata(), (std::map<std::string, std::string>{{"made by", "a \"test\"\n"}, {"é", ""}}));
  ASSERT_EQ(file.tensors().size(), std::size(kAllDtypes) + 1);
  for (const auto& [name, tensor] : written) {
    SCOPED_TRACE(name);
    const Tensor read = file.find(name);
    EXPECT_EQ(read.dtype, tensor.dtype);
    EXPECT_EQ(shape_string(read), shape_string(tensor));
    EXPECT_TRUE(read.is_contiguous());
    EXPECT_EQ(read.device, Device{});
    EXPECT_EQ(tensor_bytes(read), tensor_bytes(tensor));
    EXPECT_EQ(reinterpret_cast<std::uintptr_t>(read.data) % static_cast<std::uintptr_t>(size_bytes(read.dtype)), 0u);
  }
  EXPECT_FALSE(file.find("absent").defined());
}

TEST_F(SafetensorsFiles, ScalarsEmptyTensorsAndRanks) {
  const float values[4] = {1, 2, 3, 4};
  const Named written = {{"scalar", Tensor::contiguous(values, DataType::kFloat32, {})},
                         {"empty", Tensor::contiguous(nullptr, DataType::kFloat64, {3, 0, 2})},
                         {"rank5", Tensor::contiguous(values, DataType::kFloat32, {1, 2, 1, 2, 1})},
                         {"last empty", Tensor::contiguous(nullptr, DataType::kInt8, {0})}};
  write_safetensors(folder_ / "f", written);
  const SafetensorsFile file = SafetensorsFile::open(folder_ / "f");
  ASSERT_EQ(file.tensors().size(), 4u);
  EXPECT_EQ(file.find("empty").data, nullptr);
  for (const auto& [name, tensor] : written) {
    SCOPED_TRACE(name);
    EXPECT_EQ(to_string(file.find(name)), to_string(tensor));
    EXPECT_EQ(file.find(name).strides, tensor.strides);
    EXPECT_EQ(tensor_bytes(file.find(name)), tensor_bytes(tensor));
  }
}

TEST_F(SafetensorsFiles, HeaderIsExactlyThis) {
  const std::uint8_t bytes[3] = {1, 2, 3};
  const std::uint16_t halves[2] = {0x3F80, 0x4000};
  write_safetensors(folder_ / "f",
                    {{"z", Tensor::contiguous(bytes, DataType::kUInt8, {3})},
                     {"a", Tensor::contiguous(halves, DataType::kBFloat16, {2, 1})}},
                    {{"k", "v"}});
  std::string header = R"({"__metadata__":{"k":"v"},"z":{"dtype":"U8","shape":[3],"data_offsets":[0,3]},)"
                       R"("a":{"dtype":"BF16","shape":[2,1],"data_offsets":[3,7]}})";
  ASSERT_EQ(header.size(), 134u);
  header += "  ";
  EXPECT_EQ(get(folder_ / "f"), file_bytes(header, std::string("\1\2\3\x80\x3F\0\x40", 7)));

  write_safetensors(folder_ / "nothing", {});
  EXPECT_EQ(get(folder_ / "nothing"), file_bytes("{}      "));
}

TEST(SafetensorsParse, HandWrittenFile) {
  // Keys in any order, spaces, escapes, offsets out of the order of the names, an empty tensor between two others.
  const std::string header =
      "{ \"b\\u0041\" : {\"data_offsets\":[0,2],\"shape\":[ 2 ],\"dtype\":\"I8\"},\n"
      "\"none\":{\"dtype\":\"F32\",\"shape\":[0,4],\"data_offsets\":[2,2]},"
      "\"a\":{\"dtype\":\"I16\",\"shape\":[],\"data_offsets\":[2,4]}} \n";
  const std::string bytes = file_bytes(header, "\x05\x06\x01\x02");
  const SafetensorsFile file = parse(bytes);
  ASSERT_EQ(file.tensors().size(), 3u);
  EXPECT_EQ(to_string(file.find("bA")), "int8 [2] on cpu");
  EXPECT_EQ(tensor_bytes(file.find("bA")), "\x05\x06");
  EXPECT_EQ(file.find("bA").data, bytes.data() + 8 + header.size());  // a view, not a copy
  EXPECT_EQ(to_string(file.find("none")), "float32 [0, 4] on cpu");
  EXPECT_EQ(to_string(file.find("a")), "int16 [] on cpu");
  EXPECT_EQ(tensor_bytes(file.find("a")), "\x01\x02");
  EXPECT_TRUE(parse(file_bytes("{}")).tensors().empty());
}

TEST(SafetensorsParse, MisalignedTensorsAreCopiedToAlignedStorage) {
  const double values[2] = {1.5, -2.5};
  std::string data(17, '\1');
  std::memcpy(data.data() + 1, values, sizeof(values));
  int views = 0;
  // Every header length modulo 8, so that x starts at every residue.
  for (std::size_t padding = 0; padding < 8; ++padding) {
    const std::string header =
        R"({"x":{"dtype":"F64","shape":[2],"data_offsets":[1,17]},"b":{"dtype":"BOOL","shape":[1],"data_offsets":[0,1]}})" +
        std::string(padding, ' ');
    const std::string bytes = file_bytes(header, data);
    SafetensorsFile copy;
    {
      const SafetensorsFile file = parse(bytes);
      copy = file;
    }
    const Tensor x = copy.find("x");  // in storage that both shared
    ASSERT_EQ(reinterpret_cast<std::uintptr_t>(x.data) % alignof(double), 0u) << padding;
    EXPECT_EQ(static_cast<const double*>(x.data)[0], 1.5);
    EXPECT_EQ(static_cast<const double*>(x.data)[1], -2.5);
    views += x.data == bytes.data() + bytes.size() - sizeof(values);
  }
  EXPECT_EQ(views, 1);
}

TEST_F(SafetensorsFiles, OpenSaysWhyItCannot) {
  ::alarm(60);  // a wait for the writer of the FIFO must not hang the suite
  EXPECT_TRUE(contains(open_error(folder_ / "absent"), (folder_ / "absent").string() + ": found No such file"));
  EXPECT_TRUE(contains(open_error(folder_), "found a directory, want a regular file"));
  put(folder_ / "empty", "");
  EXPECT_TRUE(contains(open_error(folder_ / "empty"), "found 0 bytes, want at least 8"));
  ASSERT_EQ(::mkfifo((folder_ / "fifo").c_str(), 0600), 0);
  EXPECT_TRUE(contains(open_error(folder_ / "fifo"), "found a pipe or device, want a regular file"));
  EXPECT_TRUE(contains(open_error("/dev/zero"), "found a pipe or device, want a regular file"));
  EXPECT_TRUE(contains(open_error(std::string(10'000, 'a')), "File name too long"));
  put(folder_ / "broken", file_bytes("[]"));
  EXPECT_TRUE(contains(open_error(folder_ / "broken"), (folder_ / "broken").string() + ": found a header that begins"));
  ::alarm(0);
}

TEST_F(SafetensorsFiles, OpenSaysThatItMayNot) {
  put(folder_ / "closed", file_bytes("{}"));
  fs::permissions(folder_ / "closed", fs::perms::none);
  constexpr uid_t kNobody = 65534;
  const bool root = ::geteuid() == 0;  // who may read everything
  ASSERT_EQ(root ? ::seteuid(kNobody) : 0, 0);
  const std::string message = open_error(folder_ / "closed");
  ASSERT_EQ(root ? ::seteuid(0) : 0, 0);
  EXPECT_TRUE(contains(message, "found Permission denied, want a file that can be read"));
}

TEST_F(SafetensorsFiles, OffsetsBeyond32Bits) {
  constexpr std::uint64_t kBytes = (std::uint64_t{5} << 30) + 3;
  const std::string header = R"({"x":{"dtype":"U8","shape":[5368709121],"data_offsets":[0,5368709121]},)"
                             R"("y":{"dtype":"U8","shape":[2],"data_offsets":[5368709121,5368709123]}})";
  put(folder_ / "f", file_bytes(header));
  fs::resize_file(folder_ / "f", 8 + header.size() + kBytes - 1);  // a hole, which takes no space; one byte short
  std::ofstream(folder_ / "f", std::ios::binary | std::ios::app) << 'e';
  const SafetensorsFile file = SafetensorsFile::open(folder_ / "f");
  EXPECT_EQ(tensor_bytes(file.find("y")), std::string("\0e", 2));
  fs::resize_file(folder_ / "f", 8 + header.size() + kBytes - 1);
  EXPECT_TRUE(contains(open_error(folder_ / "f"), "tensor \"y\": found data_offsets [5368709121, 5368709123]"));
}

TEST_F(SafetensorsFiles, ViewsOutliveTheFileOnDiskAndTheFirstHandle) {
  const std::int32_t values[3] = {7, 8, 9};
  const fs::path path = folder_ / "f";
  write_safetensors(path, {{"x", Tensor::contiguous(values, DataType::kInt32, {3})}});
  SafetensorsFile second;
  {
    const SafetensorsFile first = SafetensorsFile::open(path);
    second = first;
  }
  // Written over from its own views: the rename leaves the mapped file alone.
  write_safetensors(path, {{"y", second.find("x")}, {"z", second.find("x")}});
  fs::remove(path);
  EXPECT_EQ(tensor_bytes(second.find("x")), std::string(reinterpret_cast<const char*>(values), sizeof(values)));
}

TEST_F(SafetensorsFiles, WriterRejectsWhatTheFormatCannotHold) {
  const float values[6] = {};
  const Tensor good = Tensor::contiguous(values, DataType::kFloat32, {2, 3});
  Tensor on_gpu = good, other = good, null = good, negative = good, rank = good, huge = good;
  on_gpu.device = {DeviceType::kCuda, 1};
  other.dtype = DataType::kOther;
  null.data = nullptr;
  negative.shape[0] = -2;
  rank.rank = 6;
  huge.shape[0] = std::numeric_limits<std::int64_t>::max() / 4;
  const std::pair<Named, std::string> cases[] = {
      {{{"x", good.columns(0, 2)}}, "tensor \"x\": found [2, 2] with strides [3, 1], want a contiguous tensor"},
      {{{"x", Tensor{}}}, "tensor \"x\": found nothing, want a dtype that safetensors has"},
      {{{"x", other}}, "tensor \"x\": found other [2, 3] on cpu, want a dtype that safetensors has"},
      {{{"x", on_gpu}}, "tensor \"x\": found data on cuda:1, want data on cpu"},
      {{{"x", null}}, "tensor \"x\": found null data"},
      {{{"x", negative}}, "tensor \"x\": found [-2, 3], want extents of 0 or more"},
      {{{"x", rank}}, "tensor \"x\": found rank 6"},
      {{{"x", huge}}, "want extents whose product is below 2^63 bytes"},
      {{{"x", good}, {"x", good}}, "tensor \"x\": found the name twice"},
      {{{"__metadata__", good}}, "found the name that the format keeps for metadata"},
      {{{"\xFF", good}}, R"(found the text "\xff", want names and metadata in UTF-8)"},
  };
  for (const auto& test : cases) {
    EXPECT_TRUE(contains(error_of([&] { write_safetensors(folder_ / "f", test.first); }), test.second));
  }
  const std::map<std::string, std::string> bad_metadata = {{"k", "\x80"}};
  EXPECT_TRUE(contains(error_of([&] { write_safetensors(folder_ / "f", {}, bad_metadata); }), "in UTF-8"));
  const std::map<std::string, std::string> long_metadata = {{"k", std::string(100'000'000, 'v')}};
  EXPECT_TRUE(
      contains(error_of([&] { write_safetensors(folder_ / "f", {}, long_metadata); }), "want at most 100000000"));
  EXPECT_EQ(files_in_folder(), 0u);
}

TEST_F(SafetensorsFiles, WriterRefusesPlacesThatAreNoFile) {
  const auto write_error = [](const fs::path& path) { return error_of([&] { write_safetensors(path, {}); }); };
  EXPECT_TRUE(contains(write_error(folder_ / "absent" / "f"), "found No such file or directory, want a file that can"));
  EXPECT_TRUE(contains(write_error(folder_), "found a directory, want a regular file"));
  ASSERT_EQ(::mkfifo((folder_ / "fifo").c_str(), 0600), 0);
  EXPECT_TRUE(contains(write_error(folder_ / "fifo"), "found a pipe or device, want a regular file"));
  EXPECT_TRUE(fs::is_fifo(folder_ / "fifo"));
  fs::create_symlink("fifo", folder_ / "link");
  EXPECT_TRUE(contains(write_error(folder_ / "link"), "found a pipe or device, want a regular file"));
  // Too long for the rename, not for the temporary file.
  EXPECT_TRUE(contains(write_error(folder_ / std::string(300, 'n')), "File name too long"));
  EXPECT_EQ(files_in_folder(), 2u);
}

TEST_F(SafetensorsFiles, AWriteThatFailsLeavesWhatWasThere) {
  const std::vector<float> values(1 << 16);
  const Named tensors = {{"x", Tensor::contiguous(values.data(), DataType::kFloat32, {1 << 16})}};
  put(folder_ / "f", "before");
  {
    const FileSizeLimit limit(100'000);
    const std::string message = error_of([&] { write_safetensors(folder_ / "f", tensors); });
    EXPECT_TRUE(
        contains(message, (folder_ / "f").string() + ": found File too large, want a file that can be written"));
  }
  EXPECT_EQ(get(folder_ / "f"), "before");
  EXPECT_EQ(files_in_folder(), 1u);
  write_safetensors(folder_ / "f", tensors);  // and without the limit it is replaced
  EXPECT_EQ(SafetensorsFile::open(folder_ / "f").find("x").num_elements(), 1 << 16);
  EXPECT_EQ(files_in_folder(), 1u);
}

TEST_F(SafetensorsFiles, AFileHasThePermissionsOfTheUmask) {
  const mode_t before = ::umask(027);
  write_safetensors(folder_ / "f", {});
  ::umask(before);
  EXPECT_EQ(fs::status(folder_ / "f").permissions(), fs::perms(0640));
}

TEST_F(SafetensorsFiles, AReaderNeverSeesHalfAFile) {
  std::vector<std::vector<std::int32_t>> values;
  for (const int size : {50'000, 20'000}) values.emplace_back(size, size);
  const auto write = [&](const std::vector<std::int32_t>& v) {
    write_safetensors(folder_ / "f", {{"x", Tensor::contiguous(v.data(), DataType::kInt32, {std::ssize(v)})}});
  };
  write(values[0]);
  std::atomic<bool> stop = false;
  std::thread writer([&] {
    for (int i = 0; !stop; ++i) write(values[i % 2]);
  });
  bool whole = true;
  for (int i = 0; i < 300; ++i) {
    try {
      const SafetensorsFile file = SafetensorsFile::open(folder_ / "f");
      const Tensor x = file.find("x");
      const auto* const data = static_cast<const std::int32_t*>(x.data);
      whole = whole && std::all_of(data, data + x.num_elements(), [&](auto v) { return v == x.num_elements(); });
    } catch (const Error& error) {
      ADD_FAILURE() << error.what();
      break;
    }
  }
  stop = true;
  writer.join();
  EXPECT_TRUE(whole);
  EXPECT_EQ(files_in_folder(), 1u);
}

}  // namespace
}  // namespace sparsemla::io
