// The parameters of a quantize kernel and of the amax pass before it, and the smem that a quantize kernel's parts
// share.
#pragma once

#include "cuda/scaling/scales.cuh"
#include "load.cuh"
#include "maxima.cuh"

namespace octavo::cuda {

template <class Source>
struct TileArgs {
  Source source;
  Tiles tiles;  // of `panels` panels; the launch fills in the counts
  int64_t panels;
  int64_t rows, cols;
  Plane rowwise, columnwise;
  const float* encode;            // known: [G]
  const float* encode_rows;       // rows: [M]
  const float* encode_cols;       // rows: [G, C]
  const SecondLevel* row_levels;  // nvfp4: [G]
  const SecondLevel* col_levels;
  ScaleOptions options;
  bool poison_infinities;  // delayed: a scale from history would let an Inf saturate
  uint32_t* amax;          // [G] or null, zeroed before
  void* dequantized;       // bf16 [M, C] or null
  void* activated;         // [M, C] of the source's dtype or null
  float* partial_sums;     // [P, C] or null
  const uint32_t* seed;
  uint32_t group_offset;
  const uint32_t* group_offset_device;
  Operand operand;
  const int32_t* unchanged;
  bool square_columns;  // columnwise blocks are 128 x 128: QuantizerSpec::square_columns
  bool reverse;         // last tile first, so as to hit what an earlier pass left in L2
};

// Those of the amax pass. All arrays hold fp32 bits and are zeroed before the launch: an integer maximum orders
// magnitudes, NaN wins, and the order of atomics does not matter.
template <class Source>
struct AmaxArgs {
  Source source;
  Tiles tiles;
  int64_t panels;
  int64_t cols;
  uint32_t* group;     // [G]
  uint32_t* hadamard;  // [G]
  uint32_t* rows;      // [M] or null
  uint32_t* columns;   // [G, C] or null
  void* activated;     // rows_and_columns: [M, C] of the source's dtype or null, its values
  const int32_t* unchanged;
};

// Whether planes of this kind may be of values.
template <Kind K>
constexpr bool makes_values = K == Kind::mxfp8 || K == Kind::nvfp4;

// Where rowwise values go, beside codes or in their place, and whether there are codes.
template <Kind K, class Source>
__device__ __forceinline__ void* row_values(const TileArgs<Source>& args) {
  if constexpr (is_rounded<Source>) return nullptr;  // planes of codes alone
  return makes_values<K> && args.rowwise.layout == Layout::values ? args.rowwise.codes : args.dequantized;
}
template <Kind K, class Source>
__device__ __forceinline__ bool has_row_codes(const TileArgs<Source>& args) {
  return args.rowwise.codes && !(makes_values<K> && args.rowwise.layout == Layout::values);
}

template <Kind K>
constexpr int column_units() {  // row blocks per panel
  return unit_size(K) ? PANEL_ROWS / unit_size(K) : 1;
}

// Floats from one unit's encode scales to the next. Where panels are stored, neighbouring lanes write the units of one
// column, which four floats more than there are columns put into different banks.
constexpr int ENCODE_STRIDE = TILE_COLS + 4;

template <class T>
constexpr int maxima_stride() {  // words; puts a column's partial maxima into different banks
  return TILE_COLS / Pack<T>::per_word + 4;
}

template <class T, Kind K, Format F>
struct TileSmem {
  static constexpr Kind kind = K;
  // [warp][column], over each warp's 16 rows
  alignas(16) uint32_t maxima[WARPS * maxima_stride<T>()];
  alignas(16) float encode[column_units<K>() * ENCODE_STRIDE];
  // column codes, [column][chunk of eight rows]; chunks are swizzled by the column, see `chunk_of`
  alignas(16) uint32_t panel[TILE_COLS * 16 * Codes<F>::bytes / 4];
};

struct Nothing {};

// Position of chunk `rows8` (eight rows) within its column. A half warp writes chunks of 16 different columns at once,
// and this swizzle puts them into different banks.
__device__ __forceinline__ int chunk_of(int column, int rows8) { return rows8 ^ (column / 8 % 16); }

}  // namespace octavo::cuda
