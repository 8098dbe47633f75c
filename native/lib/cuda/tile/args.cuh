// What a quantize kernel is given, and what its parts share.
#pragma once

#include "cuda/scaling/scales.cuh"
#include "load.cuh"
#include "maxima.cuh"

namespace octavo::cuda {

template <class Source>
struct TileArgs {
  Source source;
  Tiles tiles;  // of `panels` panels; the launch counts them
  int64_t panels;
  int64_t rows, cols;
  Plane rowwise, columnwise;
  const float* encode;            // known: [G]
  const float* encode_rows;       // rows: [M]
  const float* encode_cols;       // rows: [G, C]
  const SecondLevel* row_levels;  // nvfp4: [G]
  const SecondLevel* col_levels;
  ScaleOptions options;
  bool poison_infinities;  // delayed: scales from history do not know of this step's Inf
  uint32_t* amax;          // [G] or null, zeroed before
  void* dequantized;       // bf16 [M, C] or null
  void* activated;         // [M, C] of the source's dtype or null
  float* partial_sums;     // [P, C] or null
  const uint32_t* seed;
  uint32_t group_offset;
  const uint32_t* group_offset_device;
  Operand operand;
  const int32_t* unchanged;
  bool reverse;  // last tile first: what a pass before has left in the L2 cache is read from there
};

template <Kind K>
constexpr int column_units() {  // row blocks in a panel
  return unit_size(K) ? PANEL_ROWS / unit_size(K) : 1;
}

constexpr int ENCODE_STRIDE = TILE_COLS + 4;

template <class T>
constexpr int maxima_stride() {  // words; keeps a column's partial maxima in different banks
  return TILE_COLS / Pack<T>::per_word + 4;
}

template <class T, Kind K, Format F>
struct Shared {
  // [warp][column], each warp's 16 rows
  alignas(16) uint32_t maxima[WARPS * maxima_stride<T>()];
  alignas(16) float encode[column_units<K>() * ENCODE_STRIDE];
  // column codes, [column][chunk of eight rows]; chunks are swizzled by the column, see `chunk_of`
  alignas(16) uint32_t panel[TILE_COLS * 16 * Codes<F>::bytes / 4];
};

struct Nothing {};

// Where chunk `rows8` (eight rows) of a column stands within the column: a half warp writes 16 different columns'
// chunks at once, which then fall into different banks.
__device__ __forceinline__ int chunk_of(int column, int rows8) { return rows8 ^ (column / 8 % 16); }

}  // namespace octavo::cuda
