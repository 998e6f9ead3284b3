#include "sparsemla/capi.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <exception>
#include <string>
#include <string_view>

#include "sparsemla/attention.h"
#include "sparsemla/backend.h"
#include "sparsemla/dlpack.h"
#include "sparsemla/error.h"

namespace {

using sparsemla::Error;
using sparsemla::Tensor;

// A plain array: storing a message can neither throw nor need a destructor at thread exit.
thread_local char last_error[1024] = "";

void set_last_error(const char* message) noexcept {
  const std::size_t length = std::min(std::strlen(message), sizeof last_error - 1);
  std::memcpy(last_error, message, length);
  last_error[length] = '\0';
}

/// Runs `call`; no exception leaves.
template <typename Call>
sparsemla_status guarded(const Call& call) noexcept {
  try {
    call();
    return SPARSEMLA_OK;
  } catch (const Error& error) {
    set_last_error(error.what());
    return SPARSEMLA_INVALID_ARGUMENT;
  } catch (const std::exception& error) {
    set_last_error(error.what());
  } catch (...) {
    set_last_error("an exception of an unknown type");
  }
  return SPARSEMLA_INTERNAL;
}

/// Size of each struct in 0.1.0, the least that a caller can have. When a field is appended, this stays at the field
/// that was last then. A struct must not end in padding: a later field there would read what its callers never set.
template <typename Struct>
constexpr std::size_t kFirstBytes = 0;
template <>
constexpr std::size_t kFirstBytes<sparsemla_pipeline> = offsetof(sparsemla_pipeline, canonical) + sizeof(int32_t);
template <>
constexpr std::size_t kFirstBytes<sparsemla_options> = offsetof(sparsemla_options, deterministic) + sizeof(int32_t);
template <>
constexpr std::size_t kFirstBytes<sparsemla_forward_arguments> = offsetof(sparsemla_forward_arguments, out_residual) +
                                                                 sizeof(const DLTensor*);
template <>
constexpr std::size_t kFirstBytes<sparsemla_backward_arguments> = offsetof(sparsemla_backward_arguments, dsink) +
                                                                  sizeof(const DLTensor*);
static_assert(kFirstBytes<sparsemla_pipeline> == sizeof(sparsemla_pipeline));
// Appended since: stream, workspace, workspace_bytes.
static_assert(offsetof(sparsemla_options, stream) == kFirstBytes<sparsemla_options>);
static_assert(offsetof(sparsemla_options, workspace_bytes) + sizeof(int64_t) == sizeof(sparsemla_options));
static_assert(kFirstBytes<sparsemla_forward_arguments> == sizeof(sparsemla_forward_arguments));
static_assert(kFirstBytes<sparsemla_backward_arguments> == sizeof(sparsemla_backward_arguments));

/// More than any version will have: a struct_size that was never set is refused instead of walked.
constexpr std::size_t kMostBytes = 4096;

/// The caller's struct, whichever version of the header it was compiled with, as this version's.
template <typename Struct>
Struct read_struct(const Struct* given, std::string_view name) {
  if (given == nullptr) throw Error(name, "a null pointer", "a struct");
  const std::size_t size = given->struct_size;
  if (size < kFirstBytes<Struct> || size > kMostBytes) {
    throw Error(fmt::format("{}.struct_size", name), fmt::format("{}", size),
                fmt::format("sizeof of the struct ({} here)", sizeof(Struct)));
  }
  const auto* bytes = reinterpret_cast<const unsigned char*>(given);
  if (size > sizeof(Struct) &&
      std::any_of(bytes + sizeof(Struct), bytes + size, [](unsigned char b) { return b != 0; })) {
    throw Error(name, "a field set that this version does not have", "zeros there");
  }
  Struct copy{};
  std::memcpy(&copy, given, std::min(size, sizeof(Struct)));
  return copy;
}

template <typename Enum>
Enum read_enum(std::int32_t value, std::int32_t count, std::string_view name) {
  if (value < 0 || value >= count) throw Error(name, fmt::format("{}", value), fmt::format("0 to {}", count - 1));
  return static_cast<Enum>(value);
}

Tensor read_tensor(const DLTensor* given, std::string_view name) {
  return given == nullptr ? Tensor{} : sparsemla::from_dlpack(*given, name);
}

sparsemla::Pipeline read_pipeline(const sparsemla_pipeline* given) {
  const sparsemla_pipeline c = read_struct(given, "pipeline");
  sparsemla::Pipeline pipeline;
  if (c.key_block != 0) pipeline.key_block = c.key_block;
  pipeline.walk = read_enum<sparsemla::WalkDirection>(c.walk, 2, "pipeline.walk");
  pipeline.rescale_threshold_log2 = c.rescale_threshold_log2;
  if (c.p_dtype.code != 0 || c.p_dtype.bits != 0 || c.p_dtype.lanes != 0) {
    pipeline.p_dtype = sparsemla::dtype_from_dlpack(c.p_dtype, "pipeline.p_dtype");
  }
  pipeline.row_sum = read_enum<sparsemla::RowSum>(c.row_sum, 2, "pipeline.row_sum");
  pipeline.residual = c.no_residual == 0;
  pipeline.operands = read_enum<sparsemla::Operands>(c.operands, 2, "pipeline.operands");
  pipeline.canonical = c.canonical != 0;
  return pipeline;
}

sparsemla::Options read_options(const sparsemla_options* given) {
  sparsemla::Options options;
  if (given == nullptr) return options;
  const sparsemla_options c = read_struct(given, "options");
  if (c.pipeline != nullptr) options.pipeline = read_pipeline(c.pipeline);
  if (c.backend != nullptr) options.backend = c.backend;
  options.purpose = read_enum<sparsemla::Purpose>(c.purpose, 2, "options.purpose");
  options.cpu_engine = read_enum<sparsemla::CpuEngine>(c.cpu_engine, 3, "options.cpu_engine");
  options.num_threads = c.num_threads;
  options.deterministic = c.deterministic != 0;
  options.stream = c.stream;
  options.workspace = c.workspace;
  options.workspace_bytes = c.workspace_bytes;
  return options;
}

/// The fields that both argument structs share.
template <typename Struct>
void read_inputs(const Struct& c, sparsemla::AttentionInputs& inputs) {
  inputs.q_latent = read_tensor(c.q_latent, "q_latent");
  inputs.q_rope = read_tensor(c.q_rope, "q_rope");
  inputs.kv_latent = read_tensor(c.kv_latent, "kv_latent");
  inputs.k_rope = read_tensor(c.k_rope, "k_rope");
  inputs.indices = read_tensor(c.indices, "indices");
  inputs.topk_length = read_tensor(c.topk_length, "topk_length");
  inputs.sink = read_tensor(c.sink, "sink");
  inputs.cu_seqlens_q = read_tensor(c.cu_seqlens_q, "cu_seqlens_q");
  inputs.cu_seqlens_k = read_tensor(c.cu_seqlens_k, "cu_seqlens_k");
  inputs.causal = c.causal != 0;
  if (c.softmax_scale != nullptr) inputs.softmax_scale = *c.softmax_scale;
}

sparsemla::ForwardArguments read_arguments(const sparsemla_forward_arguments* given) {
  const sparsemla_forward_arguments c = read_struct(given, "arguments");
  sparsemla::ForwardArguments arguments;
  read_inputs(c, arguments);
  arguments.out = read_tensor(c.out, "out");
  arguments.lse = read_tensor(c.lse, "lse");
  arguments.max_logits = read_tensor(c.max_logits, "max_logits");
  arguments.out_residual = read_tensor(c.out_residual, "out_residual");
  return arguments;
}

sparsemla::BackwardArguments read_arguments(const sparsemla_backward_arguments* given) {
  const sparsemla_backward_arguments c = read_struct(given, "arguments");
  sparsemla::BackwardArguments arguments;
  read_inputs(c, arguments);
  arguments.out = read_tensor(c.out, "out");
  arguments.out_residual = read_tensor(c.out_residual, "out_residual");
  arguments.lse = read_tensor(c.lse, "lse");
  arguments.dout = read_tensor(c.dout, "dout");
  arguments.dlse = read_tensor(c.dlse, "dlse");
  arguments.dq_latent = read_tensor(c.dq_latent, "dq_latent");
  arguments.dq_rope = read_tensor(c.dq_rope, "dq_rope");
  arguments.dkv_latent = read_tensor(c.dkv_latent, "dkv_latent");
  arguments.dk_rope = read_tensor(c.dk_rope, "dk_rope");
  arguments.dsink = read_tensor(c.dsink, "dsink");
  arguments.accumulate_dkv = c.accumulate_dkv != 0;
  return arguments;
}

void write_text(const std::string& whole, char* text, std::size_t capacity, std::size_t* length) {
  if (text == nullptr && capacity != 0) throw Error("text", "a null pointer", "room for `capacity` bytes");
  if (capacity != 0) {
    const std::size_t count = std::min(whole.size(), capacity - 1);
    std::memcpy(text, whole.data(), count);
    text[count] = '\0';
  }
  if (length != nullptr) *length = whole.size();
}

template <typename Struct>
sparsemla_status plan_text(const Struct* arguments, const sparsemla_options* options, char* text, std::size_t capacity,
                           std::size_t* length) noexcept {
  return guarded([&] {
    const sparsemla::Plan plan = sparsemla::plan(read_arguments(arguments), read_options(options));
    write_text(to_string(plan), text, capacity, length);
  });
}

template <typename Struct>
sparsemla_status workspace(const Struct* arguments, const sparsemla_options* options, std::int64_t* bytes) noexcept {
  return guarded([&] {
    if (bytes == nullptr) throw Error("bytes", "a null pointer", "where the answer goes");
    *bytes = sparsemla::workspace_bytes(read_arguments(arguments), read_options(options));
  });
}

}  // namespace

const char* sparsemla_version(void) { return sparsemla::version(); }

const char* sparsemla_last_error(void) { return last_error; }

sparsemla_status sparsemla_pipeline_parse(const char* text, sparsemla_pipeline* pipeline) {
  return guarded([&] {
    if (text == nullptr) throw Error("text", "a null pointer", "the pipeline in words, such as \"exact\"");
    sparsemla_pipeline c = read_struct(pipeline, "pipeline");
    const sparsemla::Pipeline parsed = sparsemla::parse_pipeline(text);
    c.key_block = parsed.key_block;
    c.walk = static_cast<std::int32_t>(parsed.walk);
    c.rescale_threshold_log2 = parsed.rescale_threshold_log2;
    c.p_dtype = {kDLBfloat, 16, 1};
    c.row_sum = static_cast<std::int32_t>(parsed.row_sum);
    c.no_residual = parsed.residual ? 0 : 1;
    c.operands = static_cast<std::int32_t>(parsed.operands);
    c.canonical = parsed.canonical ? 1 : 0;
    std::memcpy(pipeline, &c, std::min(c.struct_size, sizeof c));
  });
}

sparsemla_status sparsemla_forward(const sparsemla_forward_arguments* arguments, const sparsemla_options* options) {
  return guarded([&] { sparsemla::forward(read_arguments(arguments), read_options(options)); });
}

sparsemla_status sparsemla_backward(const sparsemla_backward_arguments* arguments, const sparsemla_options* options) {
  return guarded([&] { sparsemla::backward(read_arguments(arguments), read_options(options)); });
}

sparsemla_status sparsemla_plan_forward(const sparsemla_forward_arguments* arguments, const sparsemla_options* options,
                                        char* text, size_t capacity, size_t* length) {
  return plan_text(arguments, options, text, capacity, length);
}

sparsemla_status sparsemla_plan_backward(const sparsemla_backward_arguments* arguments,
                                         const sparsemla_options* options, char* text, size_t capacity,
                                         size_t* length) {
  return plan_text(arguments, options, text, capacity, length);
}

sparsemla_status sparsemla_forward_workspace_bytes(const sparsemla_forward_arguments* arguments,
                                                   const sparsemla_options* options, int64_t* bytes) {
  return workspace(arguments, options, bytes);
}

sparsemla_status sparsemla_backward_workspace_bytes(const sparsemla_backward_arguments* arguments,
                                                    const sparsemla_options* options, int64_t* bytes) {
  return workspace(arguments, options, bytes);
}
