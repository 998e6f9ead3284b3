// The CPU forward: the same tile walk and roundings as a GPU kernel, one token at a time.
#pragma once

#include "sparsemla/attention.h"

namespace sparsemla::cpu {

/// Runs a validated call exactly as `plan` says.
template <typename Engine>
void forward(const ForwardArguments& arguments, const Plan& plan);
template <typename Engine>
void backward(const BackwardArguments& arguments, const Plan& plan);

/// Host bytes that one worker thread holds.
[[nodiscard]] std::int64_t forward_scratch_bytes(const AttentionInputs& inputs, const Pipeline& pipeline,
                                                 std::int64_t element_bytes);
[[nodiscard]] std::int64_t backward_scratch_bytes(const AttentionInputs& inputs, std::int64_t element_bytes);

/// Keys that are gathered and multiplied at a time.
inline constexpr std::int64_t kKeyTile = 64;

}  // namespace sparsemla::cpu
