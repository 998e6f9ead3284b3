#include "cli/options.h"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstdio>
#include <set>
#include <system_error>

#include "device/call.h"
#include "device/device.h"
#include "sparsemla/backend.h"
#include "sparsemla/error.h"

namespace sparsemla::cli {

namespace {

/// "cuda:12" -> 12; "cuda" -> 0; nothing for any other text.
std::optional<int> device_index(const std::string& text) {
  constexpr std::string_view kCuda = "cuda";
  if (text == kCuda) return 0;
  if (!text.starts_with("cuda:")) return std::nullopt;
  int index = -1;
  const char* const end = text.data() + text.size();
  const auto [last, error] = std::from_chars(text.data() + kCuda.size() + 1, end, index);
  const bool good = error == std::errc{} && last == end && index >= 0;
  return good ? std::optional(index) : std::nullopt;
}

}  // namespace

void add_engine_options(CLI::App& app, EngineOptions& options) {
  app.add_option("--device", options.device, "Where it runs: cpu, cuda or cuda:N")
      ->check([](const std::string& text) {
        const bool good = text == "cpu" || device_index(text);
        return good ? std::string() : fmt::format("\"{}\": want cpu, cuda or cuda:N", text);
      })
      ->capture_default_str();
  app.add_option("--engine", options.engine, "How the CPU backend multiplies: auto, fp32 or amx")
      ->check(CLI::IsMember({"auto", "fp32", "amx"}))
      ->capture_default_str();
  app.add_option("--threads", options.threads, "CPU threads; 0 = all cores. No result depends on it")
      ->check(CLI::Range(0, 4096))
      ->capture_default_str();
}

Device to_device(const EngineOptions& options) {
  const std::optional<int> index = device_index(options.device);
  const Device where{index ? DeviceType::kCuda : DeviceType::kCpu, index.value_or(0)};
  for (const BackendInfo& backend : backends()) {
    if (backend.device == where.type && !backend.available) {
      throw Error("--device", fmt::format("{} ({})", options.device, backend.detail),
                  "one that `sparsemla info` lists as available");
    }
  }
  if (index && *index >= device::count()) {
    throw Error("--device", options.device, fmt::format("one of cuda:0 to cuda:{}", device::count() - 1));
  }
  return where;
}

Options to_options(const EngineOptions& options) {
  Options result;
  result.backend = to_device(options).type == DeviceType::kCuda ? "sm90" : "cpu";
  result.num_threads = options.threads;
  if (options.engine == "fp32") result.cpu_engine = CpuEngine::kFp32;
  if (options.engine == "amx") result.cpu_engine = CpuEngine::kAmx;
  return result;
}

void add_size_options(CLI::App& app, SizeOptions& options, const SizeDefaults& defaults, bool with_keys) {
  const auto with_default = [&](const char* text, std::int64_t SizeDefaults::*value) {
    return defaults.*value > 0 ? fmt::format("{}; {} unless given", text, defaults.*value) : text;
  };
  app.add_option("--tokens", options.tokens, with_default("Query tokens T", &SizeDefaults::tokens));
  const bool own_default = defaults.keys > 0;
  if (with_keys) {
    app.add_option(
        "--keys", options.keys,
        with_default(own_default ? "Keys S" : "Keys S; as many as tokens unless given", &SizeDefaults::keys));
  }
  app.add_option("--topk", options.topk, with_default("List slots a token, W", &SizeDefaults::topk));
  app.add_option("--heads", options.heads, with_default("Query heads H", &SizeDefaults::heads));
}

void add_problem_options(CLI::App& app, ProblemOptions& options) {
  app.add_flag("--causal", options.causal, "Keys after the token count as empty slots (bottom-right aligned)");
  app.add_option("--softmax-scale", options.softmax_scale,
                 "Default: the file's metadata softmax_scale if it has one, else 1/sqrt(latent + rope width)");
}

void apply(const ProblemOptions& options, AttentionInputs& inputs) {
  if (options.softmax_scale && !std::isfinite(*options.softmax_scale)) {
    throw Error("--softmax-scale", fmt::format("{}", *options.softmax_scale), "a finite number");
  }
  inputs.causal = options.causal;
  if (options.softmax_scale) inputs.softmax_scale = options.softmax_scale;
}

void add_pipeline_options(CLI::App& app, PipelineOptions& options) {
  app.add_option("--rescale-threshold", options.rescale_threshold,
                 "Keep a stale row max while the new one exceeds it by at most this many log2 units; 0 = exact");
  app.add_option("--key-block", options.key_block, "Slots in a key block");
  app.add_option("--walk", options.walk, "Order in which key blocks are visited")
      ->check(CLI::IsMember({"first-to-last", "last-to-first"}));
  app.add_option("--row-sum", options.row_sum, "What the softmax denominator adds up")
      ->check(CLI::IsMember({"unrounded", "rounded"}));
  app.add_option("--residual", options.residual, "Carry what rounding took from out to the backward")
      ->check(CLI::IsMember({"on", "off"}));
  app.add_option("--operands", options.operands, "How P and dS enter their products")
      ->check(CLI::IsMember({"bf16", "split"}));
  app.add_flag("--canonical", options.canonical,
               "Sort each list first: results are bitwise the same for any order of it");
}

std::optional<Pipeline> choose_pipeline(const PipelineOptions& options, const ForwardArguments& arguments,
                                        const Options& library_options, Device where) {
  if (!options.any()) return std::nullopt;
  Pipeline pipeline = Pipeline::training();
  if (library_options.purpose == Purpose::kInference) {
    ForwardArguments without_residual = arguments;
    without_residual.out_residual = {};
    pipeline = device::plan_on(where, without_residual, library_options).pipeline;
  }
  if (options.rescale_threshold) pipeline.rescale_threshold_log2 = static_cast<float>(*options.rescale_threshold);
  if (options.key_block) pipeline.key_block = *options.key_block;
  if (options.walk) {
    pipeline.walk = *options.walk == "first-to-last" ? WalkDirection::kFirstToLast : WalkDirection::kLastToFirst;
  }
  if (options.row_sum) pipeline.row_sum = *options.row_sum == "rounded" ? RowSum::kRounded : RowSum::kUnrounded;
  if (options.residual) pipeline.residual = *options.residual == "on";
  if (options.operands) pipeline.operands = *options.operands == "split" ? Operands::kSplit : Operands::kBf16;
  pipeline.canonical = pipeline.canonical || options.canonical;
  return pipeline;
}

std::vector<std::string> split_list(const std::string& text, const char* option) {
  std::vector<std::string> words;
  for (std::size_t begin = 0; begin <= text.size();) {
    const std::size_t end = std::min(text.find(',', begin), text.size());
    words.push_back(text.substr(begin, end - begin));
    begin = end + 1;
  }
  std::set<std::string> seen;
  for (const std::string& word : words) {
    if (word.empty() || !seen.insert(word).second) {
      throw Error(option, "\"" + text + "\"", "words between commas, each of them once");
    }
  }
  return words;
}

void add_grad_dtype(CLI::App& app, std::optional<std::string>& text) {
  app.add_option("--grad-dtype", text, "Type of dq: bf16 (default) or fp32")->check(CLI::IsMember({"bf16", "fp32"}));
}

DataType grad_dtype(const std::optional<std::string>& text) {
  return text == "fp32" ? DataType::kFloat32 : DataType::kBFloat16;
}

void require_writable(const std::filesystem::path& path, const char* option) {
  std::error_code ignored;
  if (std::filesystem::is_directory(path, ignored)) {
    throw Error(option, "the folder " + path.string(), "a file name");
  }
  const std::filesystem::path folder = path.has_parent_path() ? path.parent_path() : ".";
  if (!std::filesystem::is_directory(folder, ignored)) {
    throw Error(option, path.string(), "a file in a folder that exists");
  }
  if (::access(folder.c_str(), W_OK) != 0) {
    throw Error(option, path.string(), "a file in a folder that can be written");
  }
}

void write_text(const std::filesystem::path& path, const std::string& text) {
  std::filesystem::path partial = path;
  partial += fmt::format(".partial-{}", ::getpid());
  std::FILE* file = std::fopen(partial.c_str(), "wb");
  bool written = file != nullptr && std::fwrite(text.data(), 1, text.size(), file) == text.size();
  if (file != nullptr) written = std::fclose(file) == 0 && written;
  std::error_code error;
  if (written) std::filesystem::rename(partial, path, error);
  if (!written || error) {
    std::error_code ignored;
    std::filesystem::remove(partial, ignored);
    throw Error(path.string(), "a write that failed", "a place that can be written");
  }
}

}  // namespace sparsemla::cli
