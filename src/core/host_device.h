// The mark of functions that host and device code share.
#pragma once

#if defined(__CUDACC__)
#define SPARSEMLA_HOST_DEVICE __host__ __device__
#else
#define SPARSEMLA_HOST_DEVICE
#endif
