// Tensor from and to DLPack's DLTensor. The only header here, with capi.h, that needs <dlpack/dlpack.h>.
#pragma once

#include <dlpack/dlpack.h>

#include <string_view>

#include "sparsemla/tensor.h"

namespace sparsemla {

/// The same memory as a Tensor; nothing is copied or owned. Null strides mean row-major and packed; `byte_offset` is
/// added to the data pointer. Pinned host memory counts as CPU, managed memory as CUDA. `argument` names the tensor in
/// errors.
/// Errors: a rank outside 0..Tensor::kMaxRank, a null shape, a negative extent or more elements than 64 bits count, a
/// dtype without a DataType (lanes other than 1 included), another kind of device, an address that is not a multiple
/// of the element size.
[[nodiscard]] Tensor from_dlpack(const DLTensor& tensor, std::string_view argument = "tensor");

/// The same memory as a DLTensor. It points at the shape and strides inside `tensor`, so it is valid while `tensor`
/// lives and stays where it is. Errors: a tensor that is not given, dtype kOther, device kOther.
[[nodiscard]] DLTensor to_dlpack(Tensor& tensor);

/// Errors: lanes other than 1, a code and width without a DataType.
[[nodiscard]] DataType dtype_from_dlpack(DLDataType dtype, std::string_view argument = "dtype");

}  // namespace sparsemla
