// Loading a tile's values, and the loop over a CTA's tiles.
#pragma once

#include "cuda/device/memory.cuh"
#include "mxfp4.cuh"
#include "slots.cuh"
#include "sources.cuh"
#include "swiglu.cuh"
#include "tile.cuh"

namespace octavo::cuda {

// Issues cp.async for all of a tile's inputs; zeros past the group's end and past the last column.
template <class Source>
__device__ __forceinline__ void fetch(const Source& source, const Tile& tile, void* slots) {
  const int live = tile.col() < tile.end ? tile.live_rows() : 0;
#pragma unroll
  for (int input = 0; input < Source::inputs; ++input)
    Slots<typename Source::Type>::fetch(slots, input, source.address(input, tile.first_row(), tile.col()),
                                        source.row_bytes(input), live);
  cp_async_commit_group();
}

// Waits for what `fetch` has issued and applies the prologue.
template <class Source>
__device__ __forceinline__ void take(const Source& source, const Tile& tile, void* slots,
                                     Pack<typename Source::Type> (&values)[8]) {
  using T = typename Source::Type;
  wait_for_slots();
  // Not unrolled: eight copies of the prologue would not fit the instruction cache.
  const bool inside = tile.col() < tile.end;
#pragma unroll 1
  for (int i = 0; i < 8; ++i) {
    Pack<T> inputs[Source::inputs];
#pragma unroll
    for (int input = 0; input < Source::inputs; ++input) inputs[input] = Slots<T>::load(slots, input, i);
    Slots<T>::store(
        slots, 0, i,
        inside && i < tile.live_rows() ? source.make(inputs, tile.first_row() + i, tile.col()) : zeros<T>());
  }
#pragma unroll
  for (int i = 0; i < 8; ++i) values[i] = Slots<T>::load(slots, 0, i);
  // The slots must not be overwritten before these loads have returned.
#pragma unroll
  for (int i = 0; i < 8; ++i)
#pragma unroll
    for (uint32_t& word : values[i].word) order_barrier(word);
}

// The row of the source's array where a row of the operand stands; -1: nowhere, it is zeros.
template <class Source>
__device__ __forceinline__ int64_t row_in(const Source& source, int64_t row) {
  if constexpr (is_plain<Source>) {
    if (source.rows_at.of_rows) return source.rows_at(row);
  }
  return row;
}

// Of eight pairs of 16-bit values, the first or the second ones.
template <class T>
__device__ __forceinline__ Pack<T> of_pairs(const Pack<T>& low, const Pack<T>& high, bool second) {
  const uint32_t halves = second ? 0x7632 : 0x5410;
  return {{__byte_perm(low.word[0], low.word[1], halves), __byte_perm(low.word[2], low.word[3], halves),
           __byte_perm(high.word[0], high.word[1], halves), __byte_perm(high.word[2], high.word[3], halves)}};
}

// Loads straight to registers, all rows before the first is used: fewer loads in flight would not saturate memory.
// Zeros past the group's end and past the last column.
template <class Source>
__device__ __forceinline__ void read(const Source& source, const Tile& tile, Pack<typename Source::Type> (&values)[8]) {
  using T = typename Source::Type;
  const int live = tile.col() < tile.end ? tile.live_rows() : 0;
  if constexpr (is_packed<Source>) {
    uint32_t codes[8];
    uint8_t scales[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      codes[i] = i < live ? source.codes_at(tile.first_row() + i, tile.col()) : 0;
      scales[i] = i < live ? source.scale_at(tile.first_row() + i, tile.col()) : 0;
    }
#pragma unroll
    for (int i = 0; i < 8; ++i) values[i] = Source::make(codes[i], scales[i]);
    return;
  } else if constexpr (is_plain<Source>) {
    if (source.rows_at.of_rows) {
      int row[8];
#pragma unroll
      for (int i = 0; i < 8; ++i) row[i] = i < live ? source.rows_at(tile.first_row() + i) : -1;
#pragma unroll
      for (int i = 0; i < 8; ++i) values[i] = row[i] >= 0 ? source.load(row[i], tile.col()) : zeros<T>();
      return;
    }
  }
  if constexpr (is_interleaved<Source>) {
    if (source.in_pairs()) {
      const bool second = tile.col() >= source.half;
      const char* from = source.address(0, tile.first_row(), tile.col());
      const int64_t stride = source.row_bytes(0);
      Pack<T> high[8];
#pragma unroll
      for (int i = 0; i < 8; ++i, from += stride) {
        values[i] = i < live ? load_pack<T>(from) : zeros<T>();
        high[i] = i < live ? load_pack<T>(from + sizeof(Pack<T>)) : zeros<T>();
      }
      // Without it the compiler would wait for the first rows before it asks for the others.
#pragma unroll
      for (int i = 0; i < 8; ++i)
#pragma unroll
        for (int k = 0; k < Pack<T>::words; ++k) asm volatile("" : "+r"(values[i].word[k]), "+r"(high[i].word[k]));
#pragma unroll
      for (int i = 0; i < 8; ++i) values[i] = of_pairs(values[i], high[i], second);
      return;
    }
  }
  if constexpr (!is_packed<Source>) {
    const char* from = source.address(0, tile.first_row(), tile.col());
    const int64_t stride = source.row_bytes(0);
#pragma unroll
    for (int i = 0; i < 8; ++i, from += stride) values[i] = i < live ? load_pack<T>(from) : zeros<T>();
  }
}

// Value by value, for rows that are not aligned.
template <class Source>
__device__ __forceinline__ void load_unaligned(const Source& source, const Tile& tile, int64_t cols,
                                               Pack<typename Source::Type> (&values)[8]) {
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const int64_t row = i < tile.live_rows() ? row_in(source, tile.first_row() + i) : -1;
    const bool live = row >= 0;
#pragma unroll
    for (int pair = 0; pair < 4; ++pair) {
      const int64_t col = tile.col() + 2 * pair;
      values[i].set(pair, live && col < cols ? source.value(row, col) : 0.0f,
                    live && col + 1 < cols ? source.value(row, col + 1) : 0.0f);
    }
  }
}

// True if a CTA processes more than one tile.
template <class Source, bool WIDE>
constexpr bool is_persistent = WIDE && Source::computes;

// The number of arrays that a thread keeps in its slots.
template <class Source, bool WIDE>
constexpr int arrays_kept() {
  if constexpr (!WIDE)
    return 0;
  else if constexpr (Source::computes)
    return Source::inputs;
  else
    return Source::kept;
}

// Calls `work(tile, values)` and then `finish(tile)` for each of this CTA's tiles; `reverse`: last tile first.
template <int LANES, bool WIDE, class Source, class Work, class Finish>
__device__ __forceinline__ void for_each_tile(const Source& source, const Tiles& tiles, bool reverse, int64_t cols,
                                              void* slots, const Work& work, const Finish& finish) {
  using T = typename Source::Type;
  Pack<T> values[8];
  TileWalk walk(tiles, reverse);
  Tile tile;
  tile.end = static_cast<int>(makes_halves<Source> ? cols / 2 : cols);
  if constexpr (is_persistent<Source, WIDE>) {
    const auto skip_empty = [&] {
      while (!walk.done() && !walk.template locate<LANES>(tile)) walk.step();
      return !walk.done();
    };
    if (!skip_empty()) return;
    fetch(source, tile, slots);
    for (bool more = true; more;) {
      take(source, tile, slots, values);
      const Tile current = tile;
      walk.step();
      more = skip_empty();
      if (more) fetch(source, tile, slots);
      work(current, values);
      finish(current);
    }
  } else {
    if (!walk.template locate<LANES>(tile)) return;
    if constexpr (!WIDE) {
      load_unaligned(source, tile, cols, values);
    } else {
      if constexpr (keeps_slots<Source>) {
        source.fetch_kept(tile, slots);
        const float own = own_probability(source, tile);
        read(source, tile, values);
        // The branch separates issuing from waiting: in straight-line code the compiler would wait for the slots before
        // it has issued the loads of all rows.
        if (is_live(tile)) {
          make(source, tile, own, values, slots);
        } else {
          wait_for_slots();
        }
      } else {
        read(source, tile, values);
      }
    }
    if constexpr (rounds_columns<Source>)
      round_columns_to_mxfp4(values);
    else if constexpr (is_rounded<Source>)
      round_rows_to_mxfp4(values);
    if constexpr (makes_halves<Source>) {
      // Not unrolled: two copies would not fit the instruction cache.
#pragma unroll 1
      for (int half = 0; half < 2; ++half) {
        // Makes the compiler recompute what both halves' addresses share: there are no registers to keep it in.
        asm volatile("" : "+r"(tile.panel_index), "+r"(tile.first), "+r"(tile.panel.row0));
#pragma unroll
        for (int i = 0; i < 8; ++i) values[i] = Slots<T>::load(slots, half, i);
        work(tile, values);
        finish(tile);
        tile.col0 += static_cast<int>(cols / 2);
        tile.end = static_cast<int>(cols);
      }
    } else {
      work(tile, values);
      finish(tile);
    }
  }
}

}  // namespace octavo::cuda
