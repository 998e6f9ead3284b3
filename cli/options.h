// Command-line options that several subcommands share, and what they mean to the library.
#pragma once

#include <CLI/CLI.hpp>
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include "sparsemla/attention.h"

namespace sparsemla::cli {

/// --device, --engine, --threads.
struct EngineOptions {
  std::string device = "cpu";  // cpu, cuda or cuda:N
  std::string engine = "auto";
  int threads = 0;
};
void add_engine_options(CLI::App& app, EngineOptions& options);
/// Where the calls run. Errors: a device that is not there, or whose backend is not available, and why.
[[nodiscard]] Device to_device(const EngineOptions& options);
/// Errors: as to_device().
[[nodiscard]] Options to_options(const EngineOptions& options);

/// --tokens, --keys, --topk, --heads; each unset unless given.
struct SizeOptions {
  std::optional<std::int64_t> tokens;
  std::optional<std::int64_t> keys;
  std::optional<std::int64_t> topk;
  std::optional<std::int64_t> heads;

  [[nodiscard]] bool any() const noexcept { return tokens || keys || topk || heads; }
};
/// What the help names as defaults; 0 = none of its own.
struct SizeDefaults {
  std::int64_t tokens = 0;
  std::int64_t keys = 0;
  std::int64_t topk = 0;
  std::int64_t heads = 0;
};
void add_size_options(CLI::App& app, SizeOptions& options, const SizeDefaults& defaults = {}, bool with_keys = true);

/// --causal, --softmax-scale.
struct ProblemOptions {
  bool causal = false;
  std::optional<double> softmax_scale;
};
void add_problem_options(CLI::App& app, ProblemOptions& options);
/// The command line wins over what the file said. Errors: a scale that is not finite.
void apply(const ProblemOptions& options, AttentionInputs& inputs);

/// --rescale-threshold, --key-block, --walk, --row-sum, --residual, --operands, --canonical.
struct PipelineOptions {
  std::optional<double> rescale_threshold;
  std::optional<int> key_block;
  std::optional<std::string> walk;
  std::optional<std::string> row_sum;
  std::optional<std::string> residual;
  std::optional<std::string> operands;
  bool canonical = false;

  [[nodiscard]] bool any() const noexcept {
    return rescale_threshold || key_block || walk || row_sum || residual || operands || canonical;
  }
};
void add_pipeline_options(CLI::App& app, PipelineOptions& options);

/// What the given options leave of the pipeline that plan() would choose for a call on `where`, or unset when none is
/// given.
[[nodiscard]] std::optional<Pipeline> choose_pipeline(const PipelineOptions& options, const ForwardArguments& arguments,
                                                      const Options& library_options, Device where);

/// The words between commas. Errors: an empty one, or one that stands there twice.
[[nodiscard]] std::vector<std::string> split_list(const std::string& text, const char* option);

/// --grad-dtype: "bf16" (if not given) or "fp32".
void add_grad_dtype(CLI::App& app, std::optional<std::string>& text);
[[nodiscard]] DataType grad_dtype(const std::optional<std::string>& text);

/// Errors: the folder that `path` would be written into does not exist or is not writable, or `path` is a folder. Asked
/// before long work, so that it is not lost.
void require_writable(const std::filesystem::path& path, const char* option);
/// Writes `text` whole or not at all. Errors: it cannot be written.
void write_text(const std::filesystem::path& path, const std::string& text);

}  // namespace sparsemla::cli
