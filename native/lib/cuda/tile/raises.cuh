// A tile's share in amaxes that cover more than it: of groups, of rows, and of columns of a group. All of them hold
// fp32 bits and start from zero.
#pragma once

#include "maxima.cuh"

namespace octavo::cuda {

// `bits`: the warp's maximum. One atomic per CTA, by its first thread: those on one address are serialised.
template <int COUNT>
__device__ __forceinline__ void raise_by_cta(uint32_t* most, uint32_t bits, uint32_t (&partial)[COUNT]) {
  static_assert(COUNT >= WARPS);
  if (threadIdx.x % 32 == 0) partial[threadIdx.x / 32] = bits;
  __syncthreads();
  if (threadIdx.x < WARPS) {
    bits = __reduce_max_sync((1u << WARPS) - 1u, partial[threadIdx.x]);
    if (threadIdx.x == 0) raise(most, bits);
  }
}

// Of a tile of whole panels; `rows`: [M].
template <class T>
__device__ __forceinline__ void raise_rows(uint32_t* rows, const Tile& tile, const Pack<T> (&values)[8]) {
  const int mine = static_cast<int>(threadIdx.x % COLUMN_LANES);
  const uint32_t bits = row_maxima<COLUMN_LANES>(values).fp32_bits(0);
  if (mine < tile.live_rows()) raise(rows + tile.first_row() + mine, bits);
}

// Likewise; `columns`: [G, C].
template <class T>
__device__ __forceinline__ void raise_columns(uint32_t* columns, int64_t cols, const Tile& tile,
                                              const Pack<T> (&values)[8], uint32_t (&partial)[TILE_COLS]) {
  if (threadIdx.x < TILE_COLS) partial[threadIdx.x] = 0;
  __syncthreads();
  uint32_t words[Pack<T>::words];
  column_maxima(values, words);
  if (threadIdx.x % 32 < 16) {
    uint32_t* const mine = partial + threadIdx.x % 16 * 8;
#pragma unroll
    for (int k = 0; k < Pack<T>::words; ++k)
#pragma unroll
      for (int half = 0; half < Pack<T>::per_word; ++half)
        atomicMax(mine + k * Pack<T>::per_word + half, Pack<T>::fp32_bits(words[k], half));
  }
  __syncthreads();
  const int64_t col = tile.col0 + threadIdx.x;
  if (threadIdx.x < TILE_COLS && col < cols) raise(columns + tile.panel.group * cols + col, partial[threadIdx.x]);
}

}  // namespace octavo::cuda
