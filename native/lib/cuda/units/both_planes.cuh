// NVFP4 in blocks of 16 along rows and down columns: the codes and scales of both planes.
#pragma once

#include "cuda/tile/draws.cuh"
#include "cuda/tile/e2m1_rows.cuh"
#include "hadamard.cuh"
#include "rows.cuh"
#include "scales.cuh"

namespace octavo::cuda {

// CTAs that share a multiprocessor, and with it registers per thread: as many as fit without spilling, and as many as
// fit with their slots.
constexpr int UNIT_CTAS = 5;

struct UnitSmem {
  alignas(16) uint32_t slots[UnitSlots<BF16>::words];
  alignas(16) uint32_t panel[TILE_COLS * PANEL_ROWS / 8];
  alignas(16) float row_encode[SCALE_CODES];
  alignas(16) float col_encode[SCALE_CODES];
  alignas(16) uint8_t row_scales[BLOCKS_ACROSS][PANEL_ROWS];
  alignas(16) uint8_t col_scales[UNITS][TILE_COLS];
};

template <bool STOCHASTIC, class S>
__device__ __forceinline__ void quantize_unit_rows(const TileArgs<S>& args, const Tile& tile, const Unit& unit,
                                                   const UnitSlots<typename S::Type>& slots, const SecondLevel& level,
                                                   const Draws& draws, const Multipliers& by, UnitSmem& smem) {
  using P = Pack<typename S::Type>;
  const uint32_t places = sign_places(level);
  UnitRows<true> rows(args, tile, unit);
  const int odd = static_cast<int>(threadIdx.x % 2);  // the row of a pair whose scale this lane stores
  uint8_t* const scales = &smem.row_scales[threadIdx.x % COLUMN_LANES / 2][unit.row + odd];
#pragma unroll(STOCHASTIC ? 1 : 2)
  for (int i = 0; i < UNIT_ROWS; i += 2) {
    const P pair[2] = {slots.row(i), slots.row(i + 1)};
    const auto across = [&](const P& row) {
      return P::maximum(P::maximum(row.word[0], row.word[1]), P::maximum(row.word[2], row.word[3]));
    };
    const uint32_t first = across(pair[0]), second = across(pair[1]);
    uint32_t most = P::maximum(low_pairs(first, second), high_pairs(first, second));
    most = P::maximum(most, __shfl_xor_sync(~0u, most, 1));  // the other lane of the block
    const uint32_t codes = scale_codes(P::fp32_bits(most, 0), P::fp32_bits(most, 1), level.sixth);
    scales[i] = static_cast<uint8_t>(codes >> 8 * odd);
#pragma unroll
    for (int k = 0; k < 2; ++k) {
      Words words{};
      if constexpr (STOCHASTIC) {
        const uint32_t row = static_cast<uint32_t>(tile.panel.local * PANEL_ROWS + unit.row + i + k);
        const uint32_t col = static_cast<uint32_t>(tile.col());
        words = draws(row, col / 16, Direction::rowwise, static_cast<int>(col / 8 % 2));
      }
      const uint32_t code = k ? codes >> 8 : codes & 0xFFu;
      const uint32_t made = row_codes<STOCHASTIC>(pair[k], smem.row_encode[code], places, words, by);
      if (rows.values()) {
        rows.store_values(i + k, made, magnitudes_of(code));
      } else {
        rows.store(i + k, made);
      }
    }
  }
}

// What codes of columns need of their group: its second level, and the encode scale of each decode code.
struct ColumnLevel {
  const SecondLevel& second;
  const float* encode;
};

// Codes of two columns of the tile, from `column` on. `values`: what is quantized, a row of both columns in each word.
// Returns the codes of their scales.
template <bool STOCHASTIC, bool HADAMARD, class T>
__device__ __forceinline__ uint32_t quantize_unit_pair(const Tile& tile, const Unit& unit, int column,
                                                       const uint32_t (&values)[UNIT_ROWS], const ColumnLevel& level,
                                                       const Draws& draws, const Multipliers& by, uint32_t* panel) {
  using P = Pack<T>;
  uint32_t most = P::maximum(values[0], values[1]);
#pragma unroll
  for (int i = 2; i < UNIT_ROWS; ++i) most = P::maximum(most, values[i]);
  const uint32_t scales = scale_codes(P::fp32_bits(most, 0), P::fp32_bits(most, 1), level.second.sixth);
  const float both[2] = {level.encode[scales & 0xFFu], level.encode[scales >> 8]};
  const uint32_t places = sign_places(level.second);
  uint32_t codes[2][2];  // by column and half of the rows
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const auto bytes = [&](int i) { return upper_bytes(values[8 * half + i], values[8 * half + i + 2]); };
    const uint32_t e0 = bytes(0), e4 = bytes(4), o1 = bytes(1), o5 = bytes(5);
#pragma unroll
    for (int which = 0; which < 2; ++which) {
      const auto magnitude = [&](int i) { return fabsf(half_of<T>(values[8 * half + i], which, by)) * both[which]; };
      uint32_t made;
      if constexpr (STOCHASTIC) {
        const uint32_t block = static_cast<uint32_t>(tile.panel.local * UNITS + unit.number);
        made = stochastic_codes(
            magnitude, draws(static_cast<uint32_t>(tile.col0 + column + which), block, Direction::columnwise, half),
            by.sixteen);
      } else {
        made = e2m1_codes(magnitude, by.sixteen);
      }
      codes[which][half] = signed_codes(made, which ? high_pairs(e0, e4) : low_pairs(e0, e4),
                                        which ? high_pairs(o1, o5) : low_pairs(o1, o5), places);
    }
  }
  // A NaN scale poisons its unit, but not rows past the group's end; a unit of the transform reaches past it.
  const int kept = HADAMARD ? (unit.live ? UNIT_ROWS : 0) : unit.live;
  const uint32_t low = first_codes<Format::e2m1>(kept).low, high = first_codes<Format::e2m1>(max(kept - 8, 0)).low;
#pragma unroll
  for (int which = 0; which < 2; ++which)
    StagedUnits::store(panel, static_cast<uint32_t>(column + which), unit.number, codes[which][0] & low,
                       codes[which][1] & high);
  return scales;
}

template <class T, bool STOCHASTIC, bool HADAMARD>
__global__ void __launch_bounds__(UNIT_THREADS, UNIT_CTAS)
    quantize_units(const __grid_constant__ TileArgs<Plain<T>> args) {
  __shared__ UnitSmem smem;
  __shared__ std::conditional_t<STOCHASTIC, DrawKeys, Nothing> keys;
  if (args.unchanged && *args.unchanged) return;
  Tile tile;
  if (!locate_tile(args, args.reverse, tile)) return;
  const Unit unit = Unit::of(tile);
  const Multipliers by = Multipliers::unknown(UNIT_THREADS);
  UnitSlots<T> slots(smem.slots);
  slots.fetch(args.source, tile, unit);
  const SecondLevel row_level = args.row_levels[tile.panel.group];
  const SecondLevel col_level = HADAMARD ? args.col_levels[tile.panel.group] : row_level;
  smem.row_encode[threadIdx.x] = encode_scale_of(threadIdx.x, row_level.factor);
  if constexpr (HADAMARD) smem.col_encode[threadIdx.x] = encode_scale_of(threadIdx.x, col_level.factor);
  if constexpr (STOCHASTIC) make_keys(args, keys);
  wait_for_slots();
  __syncthreads();
  const Draws draws = draws_of<STOCHASTIC>(args, tile, keys);
  // Whole warps: lanes share blocks.
  if (args.rowwise.codes && __any_sync(~0u, unit.live > 0))
    quantize_unit_rows<STOCHASTIC>(args, tile, unit, slots, row_level, draws, by, smem);
  using V = std::conditional_t<HADAMARD, BF16, T>;
#pragma unroll 1
  for (int step = 0; step < 4; ++step) {
    // Lanes begin at different words: a warp that reads all first words would find them in a quarter of the banks.
    const int k = static_cast<int>(step + threadIdx.x / 8) % 4;
    const int column = static_cast<int>(threadIdx.x % COLUMN_LANES) * 8 + 2 * k;
    uint32_t words[UNIT_ROWS];
#pragma unroll
    for (int i = 0; i < UNIT_ROWS; ++i) words[i] = slots.word(i, k);
    if constexpr (HADAMARD) hadamard_pair<T>(words, by);
    const uint32_t scales = quantize_unit_pair<STOCHASTIC, HADAMARD, V>(
        tile, unit, column, words, {col_level, HADAMARD ? smem.col_encode : smem.row_encode}, draws, by, smem.panel);
    *reinterpret_cast<uint16_t*>(&smem.col_scales[unit.number][column]) = static_cast<uint16_t>(scales);
  }
  __syncthreads();
  const int thread = static_cast<int>(threadIdx.x);
  if (args.columnwise.layout == Layout::values) {
    static_assert(sizeof(smem.slots) >= SCALE_CODES * sizeof(Magnitudes), "the table stands where values waited");
    Magnitudes* const table = reinterpret_cast<Magnitudes*>(smem.slots);
    table[thread] = magnitudes_of(threadIdx.x);
    __syncthreads();
    store_staged_values(args.columnwise, tile, args.cols, smem.panel, table,
                        [&](uint32_t column, uint32_t of) { return smem.col_scales[of][column]; });
  } else {
    store_staged_units(args.columnwise, tile, args.cols, smem.panel);
  }
  if (args.columnwise.scales && tile.col0 + thread < tile.end) {
    const int64_t column = static_cast<int64_t>(tile.panel_index) * args.cols + tile.col0 + thread;
    store_staged_scales(&smem.col_scales[0][thread], static_cast<uint8_t*>(args.columnwise.scales) + column * UNITS, 8);
  }
  if (args.rowwise.scales && thread < tile.panel.rows) {
    const int64_t blocks = ceil_div(args.cols, UNIT_ROWS), first = tile.col0 / UNIT_ROWS;
    store_staged_scales(&smem.row_scales[0][thread],
                        static_cast<uint8_t*>(args.rowwise.scales) + (tile.panel.row0 + thread) * blocks + first,
                        static_cast<int>(min(blocks - first, int64_t{BLOCKS_ACROSS})));
  }
}

}  // namespace octavo::cuda
