#include "tensor_map.h"

#include <cuda_runtime.h>

namespace octavo::cuda {

namespace {

using Encode = decltype(&cuTensorMapEncodeTiled);

// Looked up in the driver of the process, so that the library does not link to libcuda.
Encode driver_encode() {
  void* function = nullptr;
  cudaDriverEntryPointQueryResult found;
  const cudaError_t error =
      cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000, cudaEnableDefault, &found);
  return error == cudaSuccess && found == cudaDriverEntryPointSuccess ? reinterpret_cast<Encode>(function) : nullptr;
}

CUtensorMapDataType type_of(int element_bytes) {
  return element_bytes == 1   ? CU_TENSOR_MAP_DATA_TYPE_UINT8
         : element_bytes == 2 ? CU_TENSOR_MAP_DATA_TYPE_UINT16
                              : CU_TENSOR_MAP_DATA_TYPE_FLOAT32;
}

}  // namespace

Error encode(const TensorMapSpec& spec, CUtensorMap* map) {
  static const Encode encode_tiled = driver_encode();
  if (encode_tiled == nullptr) {
    return {ErrorCode::cuda, "the CUDA driver has no cuTensorMapEncodeTiled; install a driver of CUDA 12.0 or newer"};
  }
  const cuuint32_t steps[5] = {1, 1, 1, 1, 1};
  const CUresult result =
      encode_tiled(map, type_of(spec.element_bytes), static_cast<cuuint32_t>(spec.rank), const_cast<void*>(spec.data),
                   spec.dims, spec.strides, spec.box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
                   spec.swizzled ? CU_TENSOR_MAP_SWIZZLE_128B : CU_TENSOR_MAP_SWIZZLE_NONE,
                   CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (result == CUDA_SUCCESS) return {};
  return {ErrorCode::cuda,
          "the CUDA driver refused a tensor map of a GEMM's operand or result; its address, strides or sizes are out "
          "of range"};
}

TensorMapSpec ragged_map(const void* data, int element_bytes, int64_t cols, int64_t row_stride, uint32_t box_cols,
                         uint32_t box_rows) {
  constexpr uint64_t rows = uint64_t{1} << 30, most = 0x7FFF0000, wrap = uint64_t{1} << 34;
  const uint64_t stride = static_cast<uint64_t>(row_stride) * element_bytes;
  return {data,
          element_bytes,
          4,
          {static_cast<uint64_t>(cols), rows, most, most},
          {stride, stride, wrap - stride},
          {box_cols, box_rows, 1, 1},
          true};
}

}  // namespace octavo::cuda
