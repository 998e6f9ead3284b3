// The C interface's options, pipelines, struct sizes and text buffers. Options are checked through the printed plan,
// which must be the one that the same C++ options give.
#include <gtest/gtest.h>

#include <array>
#include <cstddef>
#include <cstring>
#include <functional>
#include <string>

#include "sparsemla/capi.h"
#include "sparsemla/error.h"
#include "tests/capi_test_support.h"

namespace sparsemla {
namespace {

using capi_test::Call;
using capi_test::full_problem;
using capi_test::Views;

sparsemla_pipeline empty_pipeline() {
  sparsemla_pipeline pipeline{};
  pipeline.struct_size = sizeof pipeline;
  return pipeline;
}

sparsemla_options empty_options() {
  sparsemla_options options{};
  options.struct_size = sizeof options;
  return options;
}

class CApiOptions : public testing::Test {
 protected:
  CApiOptions() {
    forward_ = views_.to_c(call_.forward);
    backward_ = views_.to_c(call_.backward);
    no_residual_ = call_.forward;
    no_residual_.out_residual = {};
    no_residual_c_ = forward_;
    no_residual_c_.out_residual = nullptr;
  }

  std::string c_plan(const sparsemla_options* options, bool residual = true) {
    std::array<char, 4096> text{};
    std::size_t length = 0;
    const sparsemla_forward_arguments& arguments = residual ? forward_ : no_residual_c_;
    if (sparsemla_plan_forward(&arguments, options, text.data(), text.size(), &length) != SPARSEMLA_OK) {
      return std::string("error ") + sparsemla_last_error();
    }
    EXPECT_EQ(length, std::strlen(text.data()));
    return text.data();
  }

  std::string cpp_plan(const Options& options, bool residual = true) {
    try {
      return to_string(plan(residual ? call_.forward : no_residual_, options));
    } catch (const Error& error) {
      return std::string("error ") + error.what();
    }
  }

  Problem problem_ = full_problem();
  Call call_{problem_};
  Views views_;
  sparsemla_forward_arguments forward_{};
  sparsemla_backward_arguments backward_{};
  ForwardArguments no_residual_;
  sparsemla_forward_arguments no_residual_c_{};
};

TEST_F(CApiOptions, NullAndZeroAreTheDefaults) {
  const sparsemla_options zero = empty_options();
  EXPECT_EQ(c_plan(nullptr), cpp_plan({}));
  EXPECT_EQ(c_plan(&zero), cpp_plan({}));
}

TEST_F(CApiOptions, EachOptionArrives) {
  struct Row {
    const char* name;
    std::function<void(sparsemla_options&)> set_c;
    std::function<void(Options&)> set_cpp;
    bool may_be_default = false;  // one of the two numbers of threads may be what this machine takes by itself
  };
  const Row rows[] = {
      {"purpose", [](auto& o) { o.purpose = SPARSEMLA_INFERENCE; },
       [](Options& o) { o.purpose = Purpose::kInference; }},
      {"backend", [](auto& o) { o.backend = "sm90"; }, [](Options& o) { o.backend = "sm90"; }},
      {"cpu_engine", [](auto& o) { o.cpu_engine = SPARSEMLA_CPU_FP32; },
       [](Options& o) { o.cpu_engine = CpuEngine::kFp32; }},
      {"cpu_engine amx", [](auto& o) { o.cpu_engine = SPARSEMLA_CPU_AMX; },
       [](Options& o) { o.cpu_engine = CpuEngine::kAmx; }},
      {"num_threads 1", [](auto& o) { o.num_threads = 1; }, [](Options& o) { o.num_threads = 1; }, true},
      {"num_threads 2", [](auto& o) { o.num_threads = 2; }, [](Options& o) { o.num_threads = 2; }, true},
      {"stream", [](auto& o) { o.stream = &o; }, [](Options& o) { o.stream = &o; }},
      {"workspace",
       [](auto& o) {
         o.workspace = &o;
         o.workspace_bytes = -256;
       },
       [](Options& o) {
         o.workspace = &o;
         o.workspace_bytes = -256;
       }},
      {"workspace_bytes", [](auto& o) { o.workspace_bytes = 256; }, [](Options& o) { o.workspace_bytes = 256; }},
      {"num_threads below 0", [](auto& o) { o.num_threads = -1; }, [](Options& o) { o.num_threads = -1; }},
  };
  for (const Row& row : rows) {
    sparsemla_options options = empty_options();
    row.set_c(options);
    Options cpp_options;
    row.set_cpp(cpp_options);
    EXPECT_EQ(c_plan(&options), cpp_plan(cpp_options)) << row.name;
    if (row.may_be_default) continue;
    EXPECT_NE(c_plan(&options), cpp_plan({})) << row.name << " changes nothing, so this test cannot fail";
  }
  sparsemla_options deterministic = empty_options();
  deterministic.deterministic = 1;  // the CPU backend always is
  Options cpp_options;
  cpp_options.deterministic = true;
  EXPECT_EQ(c_plan(&deterministic), cpp_plan(cpp_options));
}

TEST_F(CApiOptions, EachPipelineFieldArrives) {
  struct Row {
    const char* text;  // the same pipeline in words
    std::function<void(sparsemla_pipeline&)> set;
  };
  const Row rows[] = {
      {"exact", [](auto&) {}},
      {"exact+key=96", [](auto& p) { p.key_block = 96; }},
      {"exact+first-to-last", [](auto& p) { p.walk = SPARSEMLA_FIRST_TO_LAST; }},
      {"exact+threshold=3.5", [](auto& p) { p.rescale_threshold_log2 = 3.5F; }},
      {"exact+rounded-sum", [](auto& p) { p.row_sum = SPARSEMLA_ROUNDED; }},
      {"exact+no-residual", [](auto& p) { p.no_residual = 1; }},
      {"exact+split", [](auto& p) { p.operands = SPARSEMLA_SPLIT; }},
      {"exact+canonical", [](auto& p) { p.canonical = 1; }},
  };
  for (const Row& row : rows) {
    const Pipeline wanted = parse_pipeline(row.text);
    Options cpp_options;
    cpp_options.pipeline = wanted;
    sparsemla_options options = empty_options();
    sparsemla_pipeline pipeline = empty_pipeline();
    row.set(pipeline);
    options.pipeline = &pipeline;
    EXPECT_EQ(c_plan(&options, wanted.residual), cpp_plan(cpp_options, wanted.residual)) << row.text;

    sparsemla_pipeline parsed = empty_pipeline();
    ASSERT_EQ(sparsemla_pipeline_parse(row.text, &parsed), SPARSEMLA_OK) << sparsemla_last_error();
    options.pipeline = &parsed;
    EXPECT_EQ(c_plan(&options, wanted.residual), cpp_plan(cpp_options, wanted.residual)) << row.text;
  }
}

TEST_F(CApiOptions, BadPipelinesAreRefused) {
  struct Row {
    const char* beginning;
    std::function<void(sparsemla_pipeline&)> set;
  };
  const Row rows[] = {
      {"pipeline.walk: found 2", [](auto& p) { p.walk = 2; }},
      {"pipeline.row_sum: found -1", [](auto& p) { p.row_sum = -1; }},
      {"pipeline.operands: found 256", [](auto& p) { p.operands = 256; }},  // 0 if it were cut to a byte
      {"pipeline.p_dtype: found DLPack dtype code 5",
       [](auto& p) {
         p.p_dtype = {kDLComplex, 64, 1};
       }},
      {"p_dtype: found float16",
       [](auto& p) {
         p.p_dtype = {kDLFloat, 16, 1};
       }},
      {"key_block: found -3", [](auto& p) { p.key_block = -3; }},
      {"rescale_threshold: found 128", [](auto& p) { p.rescale_threshold_log2 = 128.0F; }},
      {"pipeline.struct_size: found 0", [](auto& p) { p.struct_size = 0; }},
  };
  for (const Row& row : rows) {
    sparsemla_options options = empty_options();
    sparsemla_pipeline pipeline = empty_pipeline();
    row.set(pipeline);
    options.pipeline = &pipeline;
    EXPECT_EQ(sparsemla_forward(&forward_, &options), SPARSEMLA_INVALID_ARGUMENT);
    EXPECT_EQ(std::string(sparsemla_last_error()).rfind(row.beginning, 0), 0U) << sparsemla_last_error();
  }
  sparsemla_options options = empty_options();
  options.purpose = 2;
  EXPECT_EQ(sparsemla_forward(&forward_, &options), SPARSEMLA_INVALID_ARGUMENT);
  EXPECT_EQ(std::string(sparsemla_last_error()), "options.purpose: found 2, want 0 to 1");
  options = empty_options();
  options.cpu_engine = 3;
  EXPECT_EQ(sparsemla_forward(&forward_, &options), SPARSEMLA_INVALID_ARGUMENT);
  EXPECT_EQ(std::string(sparsemla_last_error()), "options.cpu_engine: found 3, want 0 to 2");
}

TEST_F(CApiOptions, ParseRefuses) {
  sparsemla_pipeline pipeline = empty_pipeline();
  EXPECT_EQ(sparsemla_pipeline_parse("exact+nonsense", &pipeline), SPARSEMLA_INVALID_ARGUMENT);
  EXPECT_NE(std::string(sparsemla_last_error()).find("nonsense"), std::string::npos);
  EXPECT_EQ(sparsemla_pipeline_parse(nullptr, &pipeline), SPARSEMLA_INVALID_ARGUMENT);
  EXPECT_EQ(sparsemla_pipeline_parse("exact", nullptr), SPARSEMLA_INVALID_ARGUMENT);
}

TEST_F(CApiOptions, StructsOfOtherVersions) {
  EXPECT_EQ(sparsemla_forward(nullptr, nullptr), SPARSEMLA_INVALID_ARGUMENT);
  EXPECT_EQ(std::string(sparsemla_last_error()), "arguments: found a null pointer, want a struct");
  EXPECT_EQ(sparsemla_backward(nullptr, nullptr), SPARSEMLA_INVALID_ARGUMENT);

  // What a later header's caller passes: this version's fields, then one that is not known here.
  struct Longer {
    sparsemla_forward_arguments known;
    std::uint64_t unknown;
  } longer{forward_, 0};
  longer.known.struct_size = sizeof longer;
  EXPECT_EQ(sparsemla_forward(&longer.known, nullptr), SPARSEMLA_OK) << sparsemla_last_error();
  longer.unknown = std::uint64_t{1} << 63;
  EXPECT_EQ(sparsemla_forward(&longer.known, nullptr), SPARSEMLA_INVALID_ARGUMENT);
  EXPECT_EQ(std::string(sparsemla_last_error()).rfind("arguments: found a field set", 0), 0U) << sparsemla_last_error();

  for (const std::size_t size : {std::size_t{0}, sizeof forward_ - 1, std::size_t{1} << 40}) {
    sparsemla_forward_arguments wrong = forward_;
    wrong.struct_size = size;
    EXPECT_EQ(sparsemla_forward(&wrong, nullptr), SPARSEMLA_INVALID_ARGUMENT) << size;
    EXPECT_EQ(std::string(sparsemla_last_error()).rfind("arguments.struct_size:", 0), 0U) << sparsemla_last_error();
  }
  sparsemla_options short_options = empty_options();
  short_options.struct_size = 8;
  EXPECT_EQ(sparsemla_forward(&forward_, &short_options), SPARSEMLA_INVALID_ARGUMENT);
  EXPECT_EQ(std::string(sparsemla_last_error()).rfind("options.struct_size:", 0), 0U) << sparsemla_last_error();
}

/// A caller compiled before stream and workspace were appended: what lies behind its struct is not read.
TEST_F(CApiOptions, OptionsOfTheFirstVersion) {
  sparsemla_options options = empty_options();
  options.struct_size = offsetof(sparsemla_options, stream);
  options.purpose = SPARSEMLA_INFERENCE;
  options.stream = &options;
  options.workspace_bytes = -1;
  Options inference;
  inference.purpose = Purpose::kInference;
  EXPECT_EQ(c_plan(&options), cpp_plan(inference));
  EXPECT_EQ(sparsemla_forward(&forward_, &options), SPARSEMLA_OK) << sparsemla_last_error();
  options.struct_size = sizeof options;
  EXPECT_EQ(sparsemla_forward(&forward_, &options), SPARSEMLA_INVALID_ARGUMENT);
  options.workspace_bytes = 0;
  EXPECT_EQ(sparsemla_forward(&forward_, &options), SPARSEMLA_INVALID_ARGUMENT);
  EXPECT_EQ(std::string(sparsemla_last_error()).rfind("stream: found a stream", 0), 0U) << sparsemla_last_error();
}

TEST_F(CApiOptions, PlanTextIsCutToItsBuffer) {
  const std::string whole = to_string(plan(call_.backward));
  std::size_t length = 0;
  ASSERT_EQ(sparsemla_plan_backward(&backward_, nullptr, nullptr, 0, &length), SPARSEMLA_OK) << sparsemla_last_error();
  EXPECT_EQ(length, whole.size());

  std::vector<char> text(whole.size() + 2, '#');
  ASSERT_EQ(sparsemla_plan_backward(&backward_, nullptr, text.data(), whole.size() + 1, nullptr), SPARSEMLA_OK);
  EXPECT_EQ(std::string(text.data()), whole);
  EXPECT_EQ(text.back(), '#');

  text.assign(text.size(), '#');
  ASSERT_EQ(sparsemla_plan_backward(&backward_, nullptr, text.data(), 10, &length), SPARSEMLA_OK);
  EXPECT_EQ(std::string(text.data()), whole.substr(0, 9));
  EXPECT_EQ(text[10], '#');
  EXPECT_EQ(length, whole.size());

  EXPECT_EQ(sparsemla_plan_backward(&backward_, nullptr, nullptr, 10, nullptr), SPARSEMLA_INVALID_ARGUMENT);
  EXPECT_EQ(std::string(sparsemla_last_error()).rfind("text:", 0), 0U);
}

TEST_F(CApiOptions, WorkspaceBytes) {
  std::int64_t bytes = -1;
  ASSERT_EQ(sparsemla_forward_workspace_bytes(&forward_, nullptr, &bytes), SPARSEMLA_OK);
  EXPECT_EQ(bytes, workspace_bytes(call_.forward));
  bytes = -1;
  ASSERT_EQ(sparsemla_backward_workspace_bytes(&backward_, nullptr, &bytes), SPARSEMLA_OK);
  EXPECT_EQ(bytes, workspace_bytes(call_.backward));
  EXPECT_EQ(sparsemla_forward_workspace_bytes(&forward_, nullptr, nullptr), SPARSEMLA_INVALID_ARGUMENT);
}

}  // namespace
}  // namespace sparsemla
