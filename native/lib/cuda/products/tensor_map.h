// Tensor maps for TMA, encoded on the host and passed to kernels by value.
#pragma once

#include <cuda.h>

#include "octavo/types.h"

namespace octavo::cuda {

// A row-major array, innermost dimension first, and the TMA tiles that are copied from it. Elements past a dimension's
// end are zero in the tile.
struct TensorMapSpec {
  const void* data;
  int element_bytes;  // 1, 2 or 4 (fp32)
  int rank;           // 2 to 5
  uint64_t dims[5];
  uint64_t strides[4];  // bytes, of dimensions 1 and up: multiples of 16 less than 2^40
  uint32_t box[5];      // boxDim of cuTensorMapEncodeTiled: the TMA tile, in elements
  bool swizzled;        // 128-byte swizzle: the tile's rows are 128 bytes wide
};

// A context must be current in the calling thread; cudaSetDevice makes one current.
Error encode(const TensorMapSpec& spec, CUtensorMap* map);

// One map for all groups of a ragged array: rows [row, group's end), zeros after that. Of its four dimensions the
// second counts rows so that 2^30 is the group's end, and the other two bring the address back to the group.
//
//   coordinates  {column, 2^30 - size + row, start + size, 2^30} for row `row` of a group of `size` rows from `start`
//   address      column + stride (2^30 - size + row) + stride (start + size) + 2^30 (2^34 - stride)
//                = column + stride (start + row) + 2^64
TensorMapSpec ragged_map(const void* data, int element_bytes, int64_t cols, int64_t row_stride, uint32_t box_cols,
                         uint32_t box_rows);

}  // namespace octavo::cuda
