/* The C interface from C99: compiles without an extension, runs, and gives what a hand calculation gives. With q = 0
 * every selected key weighs the same: out is the mean of the selected rows, lse the log of their number, and
 * dkv_latent[i] = count(i) / n * sum of dout over the heads. */
#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include "sparsemla/capi.h"

enum { kTokens = 1, kKeys = 3, kHeads = 2, kTopk = 4, kLatent = 512 };

static uint16_t q[kTokens * kHeads * kLatent]; /* zeros */
static uint16_t kv[kKeys * kLatent];
static int32_t indices[kTokens * kTopk] = {0, 2, -1, 7};
static uint16_t out[kTokens * kHeads * kLatent];
static uint16_t residual[kTokens * kHeads * kLatent];
static float lse[kTokens * kHeads];
static uint16_t dout[kTokens * kHeads * kLatent];
static float dkv[kKeys * kLatent];

static int64_t shape_q[3] = {kTokens, kHeads, kLatent};
static int64_t shape_kv[2] = {kKeys, kLatent};
static int64_t shape_indices[2] = {kTokens, kTopk};
static int64_t shape_lse[2] = {kTokens, kHeads};

static DLTensor make(void* data, uint8_t code, uint8_t bits, int rank, int64_t* shape) {
  DLTensor tensor;
  memset(&tensor, 0, sizeof tensor);
  tensor.data = data;
  tensor.device.device_type = kDLCPU;
  tensor.ndim = rank;
  tensor.dtype.code = code;
  tensor.dtype.bits = bits;
  tensor.dtype.lanes = 1;
  tensor.shape = shape;
  return tensor;
}

/* Exact for the small powers of two used here. */
static uint16_t bf16(float value) {
  uint32_t bits;
  memcpy(&bits, &value, sizeof bits);
  return (uint16_t)(bits >> 16);
}

static int failures = 0;

static void expect(int holds, const char* what) {
  if (!holds) {
    printf("FAILED: %s (last error: %s)\n", what, sparsemla_last_error());
    ++failures;
  }
}

int main(void) {
  DLTensor t_q = make(q, kDLBfloat, 16, 3, shape_q);
  DLTensor t_kv = make(kv, kDLBfloat, 16, 2, shape_kv);
  DLTensor t_indices = make(indices, kDLInt, 32, 2, shape_indices);
  DLTensor t_out = make(out, kDLBfloat, 16, 3, shape_q);
  DLTensor t_residual = make(residual, kDLBfloat, 16, 3, shape_q);
  DLTensor t_lse = make(lse, kDLFloat, 32, 2, shape_lse);
  DLTensor t_dout = make(dout, kDLBfloat, 16, 3, shape_q);
  DLTensor t_dkv = make(dkv, kDLFloat, 32, 2, shape_kv);
  sparsemla_forward_arguments forward = {.struct_size = sizeof(sparsemla_forward_arguments)};
  sparsemla_backward_arguments backward = {.struct_size = sizeof(sparsemla_backward_arguments)};
  char text[2048];
  size_t length = 0;
  int i;

  for (i = 0; i < kKeys * kLatent; ++i) kv[i] = bf16((float)(1 << (i / kLatent))); /* rows of 1, 2, 4 */
  for (i = 0; i < kTokens * kHeads * kLatent; ++i) dout[i] = bf16(i < kLatent ? 1.0F : 2.0F);

  forward.q_latent = &t_q;
  forward.kv_latent = &t_kv;
  forward.indices = &t_indices;
  forward.out = &t_out;
  forward.out_residual = &t_residual;
  forward.lse = &t_lse;
  expect(sparsemla_forward(&forward, NULL) == SPARSEMLA_OK, "forward");
  for (i = 0; i < kTokens * kHeads * kLatent; ++i) {
    if (out[i] != bf16(2.5F)) break;
  }
  expect(i == kTokens * kHeads * kLatent, "out is (1 + 4) / 2");
  for (i = 0; i < kTokens * kHeads; ++i) expect(fabs(lse[i] - log(2.0)) < 1e-6, "lse is ln 2");

  expect(sparsemla_plan_forward(&forward, NULL, text, sizeof text, &length) == SPARSEMLA_OK, "plan");
  expect(length > 0 && strlen(text) == length && strstr(text, "cpu") != NULL, "the plan names the backend");

  backward.q_latent = &t_q;
  backward.kv_latent = &t_kv;
  backward.indices = &t_indices;
  backward.out = &t_out;
  backward.out_residual = &t_residual;
  backward.lse = &t_lse;
  backward.dout = &t_dout;
  backward.dkv_latent = &t_dkv;
  expect(sparsemla_backward(&backward, NULL) == SPARSEMLA_OK, "backward");
  for (i = 0; i < kKeys * kLatent; ++i) {
    if (dkv[i] != (i / kLatent == 1 ? 0.0F : 1.5F)) break; /* (1 + 2) / 2 for keys 0 and 2 */
  }
  expect(i == kKeys * kLatent, "dkv_latent is the mean of dout over the list, summed over heads");

  t_indices.dtype.bits = 64;
  expect(sparsemla_forward(&forward, NULL) == SPARSEMLA_INVALID_ARGUMENT, "int64 indices are refused");
  expect(strncmp(sparsemla_last_error(), "indices:", 8) == 0, "the error names indices");

  if (failures == 0) printf("C interface of sparsemla %s: as expected\n", sparsemla_version());
  return failures == 0 ? 0 : 1;
}
