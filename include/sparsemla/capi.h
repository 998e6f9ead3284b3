/* Sparse MLA attention in C: the calls of attention.h over DLPack tensors. C99 and later.
 *
 * - A tensor is a `const DLTensor *`; NULL means "not given". Shapes, dtypes and contracts are those of attention.h.
 *   Outputs too are `const DLTensor *`: the view is only read, the memory it points at is written. Managed tensors pass
 *   &managed->dl_tensor and keep their deleter.
 * - Every struct begins with `struct_size`, which the caller sets to sizeof of the struct, and everything not set is
 *   zero: `sparsemla_forward_arguments a = {.struct_size = sizeof a};`. Zero means "not given" or "default" in every
 *   field, now and in fields that later versions append; a struct longer than the library knows is taken if the rest of
 *   it is zero.
 * - No call throws, aborts or prints. All return a status; sparsemla_last_error() then has the sentence, which begins
 *   with the name of the argument at fault.
 * - Calls may run at the same time on different threads.
 */
#ifndef SPARSEMLA_CAPI_H_
#define SPARSEMLA_CAPI_H_

#include <dlpack/dlpack.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef enum sparsemla_status {
  SPARSEMLA_OK = 0,
  SPARSEMLA_INVALID_ARGUMENT = 1, /* rejected before anything was written */
  SPARSEMLA_INTERNAL = 2          /* out of memory, no threads; outputs may be half written */
} sparsemla_status;

typedef enum sparsemla_walk { SPARSEMLA_LAST_TO_FIRST = 0, SPARSEMLA_FIRST_TO_LAST = 1 } sparsemla_walk;
typedef enum sparsemla_row_sum { SPARSEMLA_UNROUNDED = 0, SPARSEMLA_ROUNDED = 1 } sparsemla_row_sum;
typedef enum sparsemla_operands { SPARSEMLA_BF16 = 0, SPARSEMLA_SPLIT = 1 } sparsemla_operands;
typedef enum sparsemla_purpose { SPARSEMLA_TRAINING = 0, SPARSEMLA_INFERENCE = 1 } sparsemla_purpose;
typedef enum sparsemla_cpu_engine {
  SPARSEMLA_CPU_AUTO = 0,
  SPARSEMLA_CPU_FP32 = 1,
  SPARSEMLA_CPU_AMX = 2
} sparsemla_cpu_engine;

/* pipeline.h's Pipeline. Zero throughout is the training pipeline. Fields without an enum are booleans. */
typedef struct sparsemla_pipeline {
  size_t struct_size;
  int32_t key_block;            /* slots per key block; 0 = 64 */
  int32_t walk;                 /* sparsemla_walk */
  float rescale_threshold_log2; /* 0 = exact running max */
  DLDataType p_dtype;           /* all zero = bfloat16 */
  int32_t row_sum;              /* sparsemla_row_sum */
  int32_t no_residual;
  int32_t operands; /* sparsemla_operands */
  int32_t canonical;
} sparsemla_pipeline;

typedef struct sparsemla_options {
  size_t struct_size;
  const sparsemla_pipeline* pipeline; /* NULL = chosen by purpose and backend */
  const char* backend;                /* NULL or "" = the backend of the tensors' device */
  int32_t purpose;                    /* sparsemla_purpose */
  int32_t cpu_engine;                 /* sparsemla_cpu_engine */
  int32_t num_threads;                /* 0 = all cores this process may use */
  int32_t deterministic;
  void* stream;            /* a cudaStream_t of the tensors' device; NULL = its default stream */
  void* workspace;         /* device memory, aligned to 256 bytes, of at least what sparsemla_*_workspace_bytes says */
  int64_t workspace_bytes; /* how much is there */
} sparsemla_options;

typedef struct sparsemla_forward_arguments {
  size_t struct_size;
  const DLTensor* q_latent;     /* [T, H, 512] bf16 */
  const DLTensor* q_rope;       /* [T, H, 64]  bf16, optional; given iff k_rope is */
  const DLTensor* kv_latent;    /* [S, 512]    bf16 */
  const DLTensor* k_rope;       /* [S, 64]     bf16, optional */
  const DLTensor* indices;      /* [T, W]      int32 */
  const DLTensor* topk_length;  /* [T]         int32, optional */
  const DLTensor* sink;         /* [H]         fp32, optional */
  const DLTensor* cu_seqlens_q; /* [B+1]       int32, optional; both or none */
  const DLTensor* cu_seqlens_k; /* [B+1]       int32 */
  int32_t causal;
  const double* softmax_scale; /* NULL = 1/sqrt(576), or 1/sqrt(512) without rope */

  const DLTensor* out;          /* [T, H, 512] bf16, written */
  const DLTensor* lse;          /* [T, H]      fp32, optional, written */
  const DLTensor* max_logits;   /* [T, H]      fp32, optional, written */
  const DLTensor* out_residual; /* [T, H, 512] bf16, written; given iff the pipeline has a residual */
} sparsemla_forward_arguments;

typedef struct sparsemla_backward_arguments {
  size_t struct_size;
  const DLTensor* q_latent; /* as in the forward, down to softmax_scale */
  const DLTensor* q_rope;
  const DLTensor* kv_latent;
  const DLTensor* k_rope;
  const DLTensor* indices;
  const DLTensor* topk_length;
  const DLTensor* sink;
  const DLTensor* cu_seqlens_q;
  const DLTensor* cu_seqlens_k;
  int32_t causal;
  int32_t accumulate_dkv; /* add into dkv_latent and dk_rope instead of overwriting them */
  const double* softmax_scale;

  const DLTensor* out;          /* [T, H, 512] bf16, from the forward */
  const DLTensor* out_residual; /* [T, H, 512] bf16, from the forward; given iff the pipeline has a residual */
  const DLTensor* lse;          /* [T, H]      fp32, from the forward */
  const DLTensor* dout;         /* [T, H, 512] bf16 */
  const DLTensor* dlse;         /* [T, H]      fp32, optional */

  const DLTensor* dq_latent;  /* [T, H, 512] bf16 or fp32, written, as all below; each optional, at least one given */
  const DLTensor* dq_rope;    /* [T, H, 64]  bf16 or fp32 */
  const DLTensor* dkv_latent; /* [S, 512]    fp32 */
  const DLTensor* dk_rope;    /* [S, 64]     fp32 */
  const DLTensor* dsink;      /* [H]         fp32; needs sink */
} sparsemla_backward_arguments;

/* "0.1.0". */
const char* sparsemla_version(void);

/* The sentence of this thread's last call that did not return SPARSEMLA_OK; "" if there was none. Never NULL; valid
 * until the thread's next failing call. Cut at 1023 bytes. */
const char* sparsemla_last_error(void);

/* Fills `pipeline` (whose struct_size must be set) from the text that the command line and Pipeline use: "exact",
 * "lazy+key=128", "canonical+split". */
sparsemla_status sparsemla_pipeline_parse(const char* text, sparsemla_pipeline* pipeline);

/* `options` may be NULL in all calls below: all defaults. */
sparsemla_status sparsemla_forward(const sparsemla_forward_arguments* arguments, const sparsemla_options* options);
sparsemla_status sparsemla_backward(const sparsemla_backward_arguments* arguments, const sparsemla_options* options);

/* What the call would do, as text. Writes at most `capacity` bytes with the final zero, cutting what does not fit, and
 * to *length (if not NULL) the length of the whole text without the zero. `text` may be NULL if `capacity` is 0. */
sparsemla_status sparsemla_plan_forward(const sparsemla_forward_arguments* arguments, const sparsemla_options* options,
                                        char* text, size_t capacity, size_t* length);
sparsemla_status sparsemla_plan_backward(const sparsemla_backward_arguments* arguments,
                                         const sparsemla_options* options, char* text, size_t capacity, size_t* length);

/* Bytes that the options' workspace must hold for the call; 0 on the CPU. */
sparsemla_status sparsemla_forward_workspace_bytes(const sparsemla_forward_arguments* arguments,
                                                   const sparsemla_options* options, int64_t* bytes);
sparsemla_status sparsemla_backward_workspace_bytes(const sparsemla_backward_arguments* arguments,
                                                    const sparsemla_options* options, int64_t* bytes);

#ifdef __cplusplus
}
#endif

#endif /* SPARSEMLA_CAPI_H_ */
