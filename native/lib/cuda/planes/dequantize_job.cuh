// What a kernel of dequantization is given, and the part of it that belongs to one panel.
#pragma once

#include "code_tile.cuh"

namespace octavo::cuda {

struct DequantizeJob {
  const uint8_t* codes;
  const void* scales;
  const float* global;
  void* out;
  Panels panels;
  ScaleMap map;
  int64_t cols;
  bool padded;       // Hadamard data: groups padded to 16 rows
  bool packed;       // rows of E2M1, two codes per byte
  bool words;        // rows are aligned to the vector size
  bool each_column;  // every column has a scale of its own
};

struct PanelSlice {
  int64_t index, col0;
  Panel panel;
  int rows;  // in this plane
  float global;
  ScaleAt scale;
};

__device__ __forceinline__ PanelSlice slice_of(const DequantizeJob& job, int64_t index, int64_t col0) {
  PanelSlice slice;
  slice.index = index;
  slice.col0 = col0;
  slice.panel = job.panels.at(index);
  slice.rows = plane_rows(job.padded, slice.panel);
  slice.global = job.global ? __ldg(job.global + slice.panel.group) : 1.0f;
  slice.scale = job.map.at(slice.panel, index);
  return slice;
}

// Zeroes rows [used, all) of a plain output, one contiguous range that `parts` rows of CTAs share.
template <DType D>
__device__ __forceinline__ void zero_tail(const DequantizeJob& job, int64_t part, int64_t parts) {
  const int64_t all = job.padded ? block_bound(job.panels.rows, job.panels.groups, 16) * 16 : job.panels.rows;
  const int64_t used = job.padded ? job.panels.blocks_in_use(16) * 16 : job.panels.rows_in_use();
  const int64_t first = used * job.cols, end = all * job.cols;
  const int64_t thread = (part * gridDim.x + blockIdx.x) * CODE_TILE_THREADS + threadIdx.x;
  const int64_t step = parts * gridDim.x * CODE_TILE_THREADS;
  if (job.words) {  // then both bounds are multiples of 4 elements
    for (int64_t i = first / 4 + thread; i < end / 4; i += step) {
      store_values<D, 4>(job.out, 4 * i, {0.0f, 0.0f, 0.0f, 0.0f});
    }
  } else {
    for (int64_t i = first + thread; i < end; i += step) store_value<D>(job.out, i, 0.0f);
  }
}

}  // namespace octavo::cuda
