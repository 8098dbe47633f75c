// From rows to rows: eight columns per thread, 256 per warp.
#pragma once

#include "dequantize_job.cuh"

namespace octavo::cuda {

constexpr int ROW_COLS = 256;      // of a warp
constexpr int ROWS_IN_FLIGHT = 4;  // per thread

template <Format F>
__device__ __forceinline__ uint2 load_row8(const DequantizeJob& job, int64_t row, int64_t col) {
  if (F == Format::e2m1 && job.packed) {
    const uint32_t word = __ldg(reinterpret_cast<const uint32_t*>(job.codes + (row * job.cols + col) / 2));
    return {spread_nibbles(word & 0xFFFFu), spread_nibbles(word >> 16)};
  }
  return __ldg(reinterpret_cast<const uint2*>(job.codes + row * job.cols + col));
}

// Fast path: rows aligned to eight elements, and one scale for all eight columns.
template <Format F, Stored S, DType D>
__device__ __forceinline__ void dequantize_rows(const DequantizeJob& job, const PanelSlice& slice) {
  const int64_t col = slice.col0 + threadIdx.x % 32 * 8;
  if (col >= job.cols) return;
  const int64_t row0 = plane_row0(job.padded, slice.panel);
  for (int first = threadIdx.x / 32; first < slice.rows; first += CODE_TILE_WARPS * ROWS_IN_FLIGHT) {
    uint2 codes[ROWS_IN_FLIGHT];
    float scale[ROWS_IN_FLIGHT];
#pragma unroll
    for (int b = 0; b < ROWS_IN_FLIGHT; ++b) {
      const int row = first + CODE_TILE_WARPS * b;
      if (row >= slice.rows) break;
      codes[b] = load_row8<F>(job, row0 + row, col);
      scale[b] = scale_value<S>(job.scales, slice.scale(row, col), slice.global);
    }
#pragma unroll
    for (int b = 0; b < ROWS_IN_FLIGHT; ++b) {
      const int row = first + CODE_TILE_WARPS * b;
      if (row >= slice.rows) break;
      float values[8];
      decode4<F>(codes[b].x, values);
      decode4<F>(codes[b].y, values + 4);
#pragma unroll
      for (int i = 0; i < 8; ++i) values[i] *= scale[b];
      store_values<D, 8>(job.out, (row0 + row) * job.cols + col, values);
    }
  }
}

// General path, element by element: any columns, any scales.
template <Format F, Stored S, DType D>
__device__ __forceinline__ void dequantize_elements(const DequantizeJob& job, const PanelSlice& slice) {
  const int64_t row0 = plane_row0(job.padded, slice.panel);
  for (int row = threadIdx.x / 32; row < slice.rows; row += CODE_TILE_WARPS) {
    for (int step = 0; step < ROW_COLS; step += 32) {
      const int64_t col = slice.col0 + step + threadIdx.x % 32, at = (row0 + row) * job.cols + col;
      if (col >= job.cols) break;
      uint32_t code;
      if (F == Format::e2m1 && job.packed) {
        code = __ldg(job.codes + (row0 + row) * ((job.cols + 1) / 2) + col / 2) >> (4 * (col & 1)) & 0xFu;
      } else {
        code = __ldg(job.codes + at);
      }
      float values[4];
      decode4<F>(code, values);
      const float scale = scale_value<S>(job.scales, slice.scale(row, col), slice.global);
      store_value<D>(job.out, at, values[0] * scale);
    }
  }
}

template <Format F, Stored S, DType D>
__global__ void __launch_bounds__(CODE_TILE_THREADS) rows_to_rows(const __grid_constant__ DequantizeJob job) {
  const int64_t used = job.panels.used(), bound = job.panels.bound();
  for (int64_t index = blockIdx.y; index < bound + 1; index += gridDim.y) {
    if (index >= used) {
      zero_tail<D>(job, index - used, bound + 1 - used);
      continue;
    }
    const PanelSlice slice = slice_of(job, index, int64_t{blockIdx.x} * ROW_COLS);
    if (job.words && !job.each_column) {
      dequantize_rows<F, S, D>(job, slice);
    } else {
      dequantize_elements<F, S, D>(job, slice);
    }
  }
}

}  // namespace octavo::cuda
