#include "sparsemla/pipeline.h"

#include <fmt/format.h>

#include <charconv>
#include <cmath>

#include "sparsemla/error.h"

namespace sparsemla {
namespace {

template <typename Number>
Number parse_number(std::string_view word, std::string_view digits) {
  Number value{};
  const auto [end, status] = std::from_chars(digits.data(), digits.data() + digits.size(), value);
  if (status != std::errc{} || end != digits.data() + digits.size()) {
    throw Error("pipeline", fmt::format("\"{}\"", word), "a number after '='");
  }
  return value;
}

void apply_word(Pipeline& pipeline, std::string_view word) {
  if (word == "exact") {
    pipeline.rescale_threshold_log2 = 0.0F;
  } else if (word == "lazy") {
    pipeline.rescale_threshold_log2 = 8.0F;
  } else if (word.starts_with("threshold=")) {
    pipeline.rescale_threshold_log2 = parse_number<float>(word, word.substr(10));
  } else if (word.starts_with("key=")) {
    pipeline.key_block = parse_number<int>(word, word.substr(4));
  } else if (word == "first-to-last") {
    pipeline.walk = WalkDirection::kFirstToLast;
  } else if (word == "last-to-first") {
    pipeline.walk = WalkDirection::kLastToFirst;
  } else if (word == "rounded-sum") {
    pipeline.row_sum = RowSum::kRounded;
  } else if (word == "unrounded-sum") {
    pipeline.row_sum = RowSum::kUnrounded;
  } else if (word == "residual" || word == "no-residual") {
    pipeline.residual = word == "residual";
  } else if (word == "split" || word == "bf16") {
    pipeline.operands = word == "split" ? Operands::kSplit : Operands::kBf16;
  } else if (word == "canonical") {
    pipeline.canonical = true;
  } else {
    throw Error("pipeline", fmt::format("\"{}\"", word),
                "exact, lazy, canonical, threshold=X, key=N, first-to-last, last-to-first, rounded-sum, unrounded-sum, "
                "residual, no-residual, split or bf16, joined by '+'");
  }
}

}  // namespace

Pipeline Pipeline::lazy_inference() {
  Pipeline pipeline;
  pipeline.rescale_threshold_log2 = 8.0F;
  pipeline.residual = false;
  return pipeline;
}

double rescale_threshold_bound_log2(DataType p_dtype, double max_offset_log2) {
  double max_finite = 0;
  switch (p_dtype) {
    case DataType::kBFloat16:
      max_finite = 0x1.FEp127;
      break;
    case DataType::kFloat16:
      max_finite = 65504.0;
      break;
    case DataType::kFloat8E4M3:
      max_finite = 448.0;
      break;
    default:
      throw Error("p_dtype", to_string(p_dtype), "bfloat16, float16 or float8_e4m3");
  }
  return std::log2(max_finite) - max_offset_log2;
}

Pipeline parse_pipeline(std::string_view text) {
  Pipeline pipeline;
  for (std::size_t begin = 0; begin <= text.size();) {
    const std::size_t end = std::min(text.find('+', begin), text.size());
    apply_word(pipeline, text.substr(begin, end - begin));
    begin = end + 1;
  }
  return pipeline;
}

std::string to_string(const Pipeline& pipeline) {
  std::string text;
  if (pipeline.rescale_threshold_log2 == 0.0F) {
    text = "exact";
  } else if (pipeline.rescale_threshold_log2 == 8.0F) {
    text = "lazy";
  } else {
    text = fmt::format("threshold={}", pipeline.rescale_threshold_log2);
  }
  if (pipeline.key_block != 64) text += fmt::format("+key={}", pipeline.key_block);
  if (pipeline.walk == WalkDirection::kFirstToLast) text += "+first-to-last";
  if (pipeline.row_sum == RowSum::kRounded) text += "+rounded-sum";
  if (!pipeline.residual) text += "+no-residual";
  if (pipeline.operands == Operands::kSplit) text += "+split";
  if (pipeline.canonical) text += "+canonical";
  return text;
}

}  // namespace sparsemla
