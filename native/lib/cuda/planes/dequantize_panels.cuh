// From panels or to panels. Where the order changes, codes pass through smem as bytes, a quarter or half of what the
// values would take.
#pragma once

#include "dequantize_job.cuh"

namespace octavo::cuda {

constexpr int EIGHTS = PANEL_ROWS / 8;

// Eight rows of a column to a panel. Scales past the group's end are not read.
template <Format F, Stored S, DType D>
__device__ __forceinline__ void emit_column8(const DequantizeJob& job, const PanelSlice& slice, int col, int row,
                                             uint2 codes) {
  float values[8] = {};
  if (row < slice.rows) {
    const float scale = scale_value<S>(job.scales, slice.scale(row, slice.col0 + col), slice.global);
    decode4<F>(codes.x, values);
    decode4<F>(codes.y, values + 4);
#pragma unroll
    for (int i = 0; i < 8; ++i) values[i] = row + i < slice.rows ? values[i] * scale : 0.0f;
  }
  store_values<D, 8>(job.out, (slice.index * job.cols + slice.col0 + col) * PANEL_ROWS + row, values);
}

template <Format F, Stored S, DType D>
__global__ void __launch_bounds__(CODE_TILE_THREADS) panels_to_panels(const __grid_constant__ DequantizeJob job) {
  constexpr int rounds = CODE_TILE_COLS * EIGHTS / CODE_TILE_THREADS;
  const int64_t used = job.panels.used();
  const int row = threadIdx.x % EIGHTS * 8, first = threadIdx.x / EIGHTS;
  for (int64_t index = blockIdx.y; index < used; index += gridDim.y) {
    const PanelSlice slice = slice_of(job, index, int64_t{blockIdx.x} * CODE_TILE_COLS);
    const int64_t base = slice.index * job.cols + slice.col0;
    uint2 codes[rounds];
#pragma unroll
    for (int i = 0; i < rounds; ++i) {
      const int col = first + CODE_TILE_COLS / rounds * i;
      if (slice.col0 + col >= job.cols) break;
      const int64_t at = (base + col) * PANEL_ROWS + row;
      if constexpr (F == Format::e2m1) {
        const uint32_t word = __ldg(reinterpret_cast<const uint32_t*>(job.codes + at / 2));
        codes[i] = {spread_nibbles(word & 0xFFFFu), spread_nibbles(word >> 16)};
      } else {
        codes[i] = __ldg(reinterpret_cast<const uint2*>(job.codes + at));
      }
    }
#pragma unroll
    for (int i = 0; i < rounds; ++i) {
      const int col = first + CODE_TILE_COLS / rounds * i;
      if (slice.col0 + col >= job.cols) break;
      emit_column8<F, S, D>(job, slice, col, row, codes[i]);
    }
  }
}

template <Format F, Stored S, DType D>
__global__ void __launch_bounds__(CODE_TILE_THREADS) rows_to_panels(const __grid_constant__ DequantizeJob job) {
  __shared__ CodeTile tile;
  const int64_t used = job.panels.used();
  for (int64_t index = blockIdx.y; index < used; index += gridDim.y) {
    const PanelSlice slice = slice_of(job, index, int64_t{blockIdx.x} * CODE_TILE_COLS);
    load_rows(tile, job.codes, plane_row0(job.padded, slice.panel), slice.rows, slice.col0, job.cols, job.words);
    __syncthreads();
    for (int i = threadIdx.x; i < CODE_TILE_COLS * EIGHTS; i += CODE_TILE_THREADS) {
      const int col = i / EIGHTS, row = i % EIGHTS * 8;
      if (slice.col0 + col >= job.cols) break;
      const uint32_t* word = tile.word + col * COLUMN_PITCH + row / 4;
      emit_column8<F, S, D>(job, slice, col, row, {word[0], word[1]});
    }
    __syncthreads();
  }
}

// 4 x 4 codes, the i-th of the tile, to rows.
template <Format F, Stored S, DType D>
__device__ __forceinline__ void emit_rows4(const DequantizeJob& job, const PanelSlice& slice, const CodeTile& tile,
                                           int i) {
  const Block4 block = block4(i);
  const int row = 4 * block.row4;
  const int64_t col = slice.col0 + 4 * block.col4;
  if (row >= slice.rows || col >= job.cols) return;
  const int count = job.cols - col < 4 ? static_cast<int>(job.cols - col) : 4;
  float scale[4];
#pragma unroll
  for (int c = 0; c < 4; ++c) {
    // A scaling unit's height is a multiple of 4 rows.
    scale[c] = c < count ? scale_value<S>(job.scales, slice.scale(row, col + c), slice.global) : 0.0f;
  }
  uint32_t words[4];
  get_rows(tile, block, words);
#pragma unroll
  for (int r = 0; r < 4; ++r) {
    if (row + r >= slice.rows) break;
    float values[4];
    decode4<F>(words[r], values);
#pragma unroll
    for (int c = 0; c < 4; ++c) values[c] *= scale[c];
    const int64_t at = (plane_row0(job.padded, slice.panel) + row + r) * job.cols + col;
    if (job.words) {
      store_values<D, 4>(job.out, at, values);
    } else {
      for (int c = 0; c < 4; ++c) {
        if (c < count) store_value<D>(job.out, at + c, values[c]);
      }
    }
  }
}

template <Format F, Stored S, DType D>
__global__ void __launch_bounds__(CODE_TILE_THREADS, 4) panels_to_rows(const __grid_constant__ DequantizeJob job) {
  __shared__ CodeTile tile;
  const int64_t used = job.panels.used(), bound = job.panels.bound();
  for (int64_t index = blockIdx.y; index < bound + 1; index += gridDim.y) {
    if (index >= used) {
      zero_tail<D>(job, index - used, bound + 1 - used);
      continue;
    }
    const PanelSlice slice = slice_of(job, index, int64_t{blockIdx.x} * CODE_TILE_COLS);
    constexpr bool packed = F == Format::e2m1;
    load_panel<packed>(tile, job.codes + index * job.cols * (packed ? PANEL_ROWS / 2 : PANEL_ROWS), slice.col0,
                       job.cols);
    __syncthreads();
#pragma unroll
    for (int i = threadIdx.x; i < CODE_TILE_COLS * COLUMN_WORDS / 4; i += CODE_TILE_THREADS) {
      emit_rows4<F, S, D>(job, slice, tile, i);
    }
    __syncthreads();
  }
}

}  // namespace octavo::cuda
