// Sparse MLA attention: forward, backward, plan.
//
// Axes: T query tokens, S keys, H query heads, W list slots a token, 512 latent columns, 64 rope columns.
//
//   score[t,h,j] = q_rope[t,h,:].k_rope[i,:] + q_latent[t,h,:].kv_latent[i,:]      i = indices[t,j]
//   p            = softmax_j(softmax_scale * score)
//   out[t,h,:]   = sum_j p[t,h,j] * kv_latent[i,:]
//   lse[t,h]     = log sum_j exp(softmax_scale * score)                            natural log, keys only
//
// The formulas and edge cases are those of docs/numerics.md. In short:
// - A slot j of token t is valid iff j < topk_length[t] and 0 <= indices[t,j] < limit, where limit is S, or under
//   `causal` t + 1 + S - T (both counted inside the token's document when cu_seqlens are given). Any other value is an
//   empty slot: its row is never read and never scattered to.
// - A key listed twice counts twice, forward and backward.
// - A row without a valid slot: out 0, out_residual 0, lse -inf, max_logits -inf, all its gradients 0.
// - The sink is one more logit per head in natural-log units, not multiplied by the scale. It enters the denominator of
//   `out` only. +inf gives out 0 and dsink 0; -inf is bitwise the same as no sink.
// - NaN and Inf in a selected key or a query reach exactly the rows that use them. Where all scores of a row are
//   -inf, its out and lse are NaN.
// - Subnormal bf16 inputs may count as zero, and subnormal results as zero (AMX tiles do that).
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "sparsemla/pipeline.h"
#include "sparsemla/tensor.h"

namespace sparsemla {

inline constexpr std::int64_t kLatentDim = 512;
inline constexpr std::int64_t kRopeDim = 64;
inline constexpr std::int64_t kMaxHeads = 256;
inline constexpr std::int64_t kWorkspaceAlignment = 256;  // bytes, of Options::workspace

/// What both directions read. Tensors marked "optional" may be left default-constructed. Any strides.
struct AttentionInputs {
  Tensor q_latent;      // [T, H, 512] bf16
  Tensor q_rope;        // [T, H, 64]  bf16, optional; present iff k_rope is
  Tensor kv_latent;     // [S, 512]    bf16, key and value
  Tensor k_rope;        // [S, 64]     bf16, optional
  Tensor indices;       // [T, W]      int32; local to the token's document when cu_seqlens are given
  Tensor topk_length;   // [T]         int32, optional; slots at or past it are empty; clamped to [0, W]
  Tensor sink;          // [H]         fp32, optional, natural-log units
  Tensor cu_seqlens_q;  // [B+1]       int32, optional, both or none: 0 = c[0] <= c[1] <= ... <= c[B] <= T
  Tensor cu_seqlens_k;  // [B+1]       int32; c[B] <= S. Tokens at or past cu_seqlens_q[B] are rows without valid slots
  bool causal = false;  // bottom-right aligned, per document
  /// Multiplies the score. Default 1/sqrt(576), or 1/sqrt(512) without rope. Any value of which
  /// fp32 holds log2(e) times.
  std::optional<double> softmax_scale;
};

struct ForwardArguments : AttentionInputs {
  Tensor out;           // [T, H, 512] bf16, written
  Tensor lse;           // [T, H] fp32, optional, written: natural log, keys only
  Tensor max_logits;    // [T, H] fp32, optional, written: max of softmax_scale * score, natural units
  Tensor out_residual;  // [T, H, 512] bf16, written: bf16(O32 - float(out)); given iff the pipeline has `residual`
};

struct BackwardArguments : AttentionInputs {
  Tensor out;           // [T, H, 512] bf16, from the forward
  Tensor out_residual;  // [T, H, 512] bf16, from the forward; given iff the pipeline has `residual`
  Tensor lse;           // [T, H] fp32, from the forward: natural log, keys only (the sink is folded in here)
  Tensor dout;          // [T, H, 512] bf16
  Tensor dlse;          // [T, H] fp32, optional: gradient into lse

  // Gradients, each optional: one that is not given is not computed. At least one must be given.
  Tensor dq_latent;   // [T, H, 512] bf16 or fp32
  Tensor dq_rope;     // [T, H, 64]  bf16 or fp32
  Tensor dkv_latent;  // [S, 512] fp32
  Tensor dk_rope;     // [S, 64]  fp32
  Tensor dsink;       // [H] fp32; needs sink
  /// false: dkv_latent and dk_rope are overwritten (rows no list selects become 0). true: added into.
  bool accumulate_dkv = false;
};

/// Training asks for the exact running max and the residual; inference for whatever is fastest within its bounds.
enum class Purpose : std::uint8_t { kTraining, kInference };

/// How the CPU backend multiplies. kAuto takes the fastest the processor has.
enum class CpuEngine : std::uint8_t {
  kAuto,
  kFp32,  // Eigen products of fp32 copies of the bf16 operands
  kAmx,   // AMX bf16 tiles with fp32 accumulation
};

struct Options {
  Purpose purpose = Purpose::kTraining;
  /// Unset: plan() chooses by purpose and backend. Set: runs exactly so, or is refused.
  std::optional<Pipeline> pipeline = {};
  /// Unset: the backend of the tensors' device. Set: that one, or an Error that says why not. Never a silent fallback.
  std::string backend = {};
  CpuEngine cpu_engine = CpuEngine::kAuto;
  /// CPU threads; 0 = all cores this process may use. Results are bitwise the same for any value.
  int num_threads = 0;
  /// Ask for dkv_latent and dk_rope that are bitwise the same from run to run. (The CPU backend always gives that.)
  bool deterministic = false;
  /// A cudaStream_t of the tensors' device, into which the call is enqueued; null: that device's default stream. The
  /// call neither waits for the device nor allocates there, so a stream that is being captured takes it too. The CPU
  /// backend has no streams and refuses one.
  void* stream = nullptr;
  /// Memory on the tensors' device for the call to work in, aligned to kWorkspaceAlignment, in use until the stream has
  /// passed the call. Needed where workspace_bytes() of the call is above 0; more than that is fine.
  void* workspace = nullptr;
  std::int64_t workspace_bytes = 0;
};

/// What a call will do. A value: computing it touches no tensor data, and printing it is how one asks what runs.
struct Plan {
  bool backward = false;
  std::string backend;  // "cpu"
  std::string variant;  // "amx-bf16", "eigen-fp32"
  Pipeline pipeline;
  bool deterministic = false;
  /// Whether training and inference forwards of this backend give bitwise equal `out`.
  bool training_matches_inference = false;
  int num_threads = 1;
  std::int64_t key_tile = 0;         // keys multiplied at a time
  std::int64_t head_tile = 0;        // heads multiplied at a time, padding included
  std::int64_t token_chunk = 0;      // tokens whose partial gradients are in flight together
  std::int64_t workspace_bytes = 0;  // what Options::workspace must hold (0 on the CPU)
  std::int64_t internal_bytes = 0;   // host memory that the CPU backend allocates for the time of the call
  double flops = 0;                  // if every slot is valid: 2*T*H*W*1088 forward, 2*T*H*W*2752 backward (less rope)
  std::vector<std::string> reasons;  // why this backend, engine and threshold
};

[[nodiscard]] std::string to_string(const Plan& plan);

/// Checks the arguments and says what forward() would do. Errors: as forward().
[[nodiscard]] Plan plan(const ForwardArguments& arguments, const Options& options = {});
[[nodiscard]] Plan plan(const BackwardArguments& arguments, const Options& options = {});

/// Bytes that Options::workspace must hold for the call. 0 on the CPU.
[[nodiscard]] std::int64_t workspace_bytes(const ForwardArguments& arguments, const Options& options = {});
[[nodiscard]] std::int64_t workspace_bytes(const BackwardArguments& arguments, const Options& options = {});

/// Errors (sparsemla::Error, before anything is written): a tensor of the wrong rank, shape, dtype or device, a null
/// pointer where there are elements, an output that overlaps itself, half a rope pair, half a cu_seqlens pair,
/// cu_seqlens that decrease or run past the end (where they are on the CPU: device data is never read, and offsets
/// there that break the rule select nothing outside the tensors), heads outside 1..256, a threshold outside its bound,
/// a workspace that is missing, too small or misaligned, a layout or option that the backend does not have. A failure
/// to enqueue on a device throws too; outputs are then untouched unless work before it had been enqueued.
void forward(const ForwardArguments& arguments, const Options& options = {});
void backward(const BackwardArguments& arguments, const Options& options = {});

}  // namespace sparsemla
