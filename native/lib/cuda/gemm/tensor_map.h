// Tensor maps: how the copy engine finds boxes of an array. Encoded on the host, passed to kernels by value.
#pragma once

#include <cuda.h>

#include "octavo/types.h"

namespace octavo::cuda {

// A row-major array, innermost dimension first, and the boxes that are copied from it. Elements that lie past a
// dimension's end are zero in the box.
struct Boxes {
  const void* data;
  int element_bytes;  // 1, 2 or 4 (fp32)
  int rank;           // 2 to 4
  uint64_t dims[4];
  uint64_t strides[3];  // bytes, of dimensions 1 and up: multiples of 16 less than 2^40
  uint32_t box[4];
  bool swizzled;  // by 128 bytes: the box's rows are 128 bytes wide
};

// A context must be current in the calling thread (cudaSetDevice makes one so).
Error encode(const Boxes& boxes, CUtensorMap* map);

// Rows [row, group's end) of a ragged array, zeros behind, without a map for each group: four dimensions of which the
// second counts up to 2^30 = the group's end, and the others bring the address back to the group.
//
//   coordinates  {column, 2^30 - size + row, start + size, 2^30} for row `row` of a group of `size` rows from `start`
//   address      column + stride (2^30 - size + row) + stride (start + size) + 2^30 (2^34 - stride)
//                = column + stride (start + row) + 2^64
Boxes ragged_boxes(const void* data, int element_bytes, int64_t cols, int64_t row_stride, uint32_t box_cols,
                   uint32_t box_rows);

}  // namespace octavo::cuda
