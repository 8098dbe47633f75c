// A tile is the work of a CTA of 256 threads at a time: 8 x 8 values a thread, so that eight elements along either axis
// are one thread's: half a Philox block, a store of eight codes, three quarters of a Hadamard butterfly. Where columns
// are wanted a tile is one panel (128 rows of one group) by 128 columns; where rows alone are, 16 rows of a panel by
// 1024 columns, which reads and writes longer runs.
//
// CTAs are persistent, and the next tile's input is on its way (cp.async) while one is worked on. Each thread fetches
// what it will read itself, so that the fetch needs no barrier.
#pragma once

#include "octavo/quantize.h"
#include "packs.cuh"

namespace octavo::cuda {

constexpr int TILE_COLS = 128;
constexpr int THREADS = 256;
constexpr int WARPS = THREADS / 32;

// Threads side by side along a row of a tile.
constexpr int COLUMN_LANES = 16;
constexpr int ROW_LANES = 128;

template <int LANES>
constexpr int tile_cols() {
  return LANES * 8;
}

template <int LANES>
constexpr int tile_rows() {
  return THREADS / LANES * 8;
}

// Where groups begin: what of Input and plan a tile needs.
struct Groups {
  const Panel* panels;         // ragged
  int64_t matrix_rows;         // stacked
  const int64_t* rows_in_use;  // neither: panels of the first rows, whatever their groups
};

// The tiles of an operand, in the order in which they are worked on: columns first, then down.
struct Tiles {
  Groups groups;
  uint32_t col_blocks;
  uint32_t down;                    // tiles below each other
  uint32_t step_down, step_across;  // the grid's size in whole rows of tiles, and what is left
};

// 32 bits hold every row (M is at most 2^30), column and panel; what is made of them for an address has 64.
struct Rows {
  int group;
  int rows;
  int row0;
  int local;
  int first16;
  int first32;
};

// Few numbers, because the next tile's are kept while one is worked on; a thread's own follow from them.
struct Place {
  Rows panel;
  int panel_index;
  int first;  // first row of the tile in its panel
  int col0;   // first column of the tile
  int lanes;  // threads along a row: a constant wherever this is used

  // This thread's first row in the panel, that row's number in the operand, and the thread's first column.
  __device__ int row() const { return first + static_cast<int>(threadIdx.x) / lanes * 8; }
  __device__ int64_t first_row() const { return panel.row0 + row(); }
  __device__ int col() const { return col0 + static_cast<int>(threadIdx.x) % lanes * 8; }
  // Of its eight rows, those within the group.
  __device__ int live_rows() const { return min(max(panel.rows - row(), 0), 8); }
};

__device__ __forceinline__ Rows panel_at(const Groups& groups, int index) {
  if (groups.rows_in_use) {
    const int left = static_cast<int>(__ldg(groups.rows_in_use)) - index * PANEL_ROWS;
    return {0, min(max(left, 0), PANEL_ROWS), index * PANEL_ROWS, 0, 0, 0};
  }
  if (!groups.panels) {
    const Panel panel = stacked_panel(index, groups.matrix_rows);
    return {panel.group, panel.rows, static_cast<int>(panel.row0), panel.local, panel.first16, panel.first32};
  }
  const int4* words = reinterpret_cast<const int4*>(groups.panels + index);
  const int4 first = __ldg(words), second = __ldg(words + 1);
  return {first.x, first.y, first.z, second.x, second.z, second.w};
}

// A CTA's walk over its tiles, every gridDim.x-th one, without a division a step.
class Walk {
 public:
  __device__ Walk(const Tiles& tiles, bool reverse)
      : tiles_(tiles), reverse_(reverse), down_(blockIdx.x / tiles.col_blocks), across_(blockIdx.x % tiles.col_blocks) {}

  __device__ bool done() const { return down_ >= tiles_.down; }

  __device__ void step() {
    down_ += tiles_.step_down;
    across_ += tiles_.step_across;
    if (across_ >= tiles_.col_blocks) {
      across_ -= tiles_.col_blocks;
      ++down_;
    }
  }

  // False where the tile holds no rows.
  template <int LANES>
  __device__ bool locate(Place& place) const {
    constexpr uint32_t parts = PANEL_ROWS / tile_rows<LANES>();
    const uint32_t down = reverse_ ? tiles_.down - 1 - down_ : down_;
    const uint32_t across = reverse_ ? tiles_.col_blocks - 1 - across_ : across_;
    place.first = static_cast<int>(down % parts) * tile_rows<LANES>();
    place.panel_index = static_cast<int>(down / parts);
    place.col0 = static_cast<int>(across) * tile_cols<LANES>();
    place.lanes = LANES;
    place.panel = panel_at(tiles_.groups, place.panel_index);
    return place.first < place.panel.rows;
  }

 private:
  const Tiles& tiles_;
  bool reverse_;
  uint32_t down_, across_;
};

// ---- the next tile's input, on its way

// A thread's own 16-byte slots: [input][row][part], threads side by side.
template <class Source>
struct Slots {
  static constexpr int parts = Pack<typename Source::Type>::words / 4;
  static constexpr int bytes = Source::inputs * 8 * parts * THREADS * 16;

  static __device__ uint4* at(void* base, int input, int row, int part) {
    return static_cast<uint4*>(base) + ((input * 8 + row) * parts + part) * THREADS + threadIdx.x;
  }
};

// Zeros past the group's end and past the last column.
template <class Source>
__device__ __forceinline__ void fetch(const Source& source, const Place& place, int64_t cols, void* slots) {
  const int live = place.col() < cols ? place.live_rows() : 0;
#pragma unroll
  for (int input = 0; input < Source::inputs; ++input) {
    const char* from = source.address(input, place.first_row(), place.col());
    const int64_t stride = source.row_bytes(input);
#pragma unroll
    for (int i = 0; i < 8; ++i, from += stride) {
      // an address of which 0 bytes are read may be any
      const int bytes = i < live ? 16 : 0;
#pragma unroll
      for (int part = 0; part < Slots<Source>::parts; ++part) {
        const uint32_t to = static_cast<uint32_t>(__cvta_generic_to_shared(Slots<Source>::at(slots, input, i, part)));
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from + part * 16), "r"(bytes)
                     : "memory");
      }
    }
  }
  asm volatile("cp.async.commit_group;" ::: "memory");
}

template <class Source>
__device__ __forceinline__ Pack<typename Source::Type> fetched(void* slots, int input, int row) {
  Pack<typename Source::Type> pack;
#pragma unroll
  for (int part = 0; part < Slots<Source>::parts; ++part) {
    const uint4 four = *Slots<Source>::at(slots, input, row, part);
    pack.word[4 * part] = four.x, pack.word[4 * part + 1] = four.y;
    pack.word[4 * part + 2] = four.z, pack.word[4 * part + 3] = four.w;
  }
  return pack;
}

// What was fetched, through the prologue if there is one.
template <class Source>
__device__ __forceinline__ void take(const Source& source, const Place& place, int64_t cols, void* slots,
                                     Pack<typename Source::Type> (&values)[8]) {
  using T = typename Source::Type;
  asm volatile("cp.async.wait_group 0;" ::: "memory");
  if constexpr (Source::computes) {
    // rolled: unrolled eight times, the prologue's code would not fit the instruction cache
    const bool inside = place.col() < cols;
#pragma unroll 1
    for (int i = 0; i < 8; ++i) {
      Pack<T> inputs[Source::inputs];
#pragma unroll
      for (int input = 0; input < Source::inputs; ++input) inputs[input] = fetched<Source>(slots, input, i);
      const Pack<T> made =
          inside && i < place.live_rows() ? source.make(inputs, place.first_row() + i, place.col()) : zeros<T>();
#pragma unroll
      for (int part = 0; part < Slots<Source>::parts; ++part)
        *Slots<Source>::at(slots, 0, i, part) = {made.word[4 * part], made.word[4 * part + 1], made.word[4 * part + 2],
                                                 made.word[4 * part + 3]};
    }
  }
#pragma unroll
  for (int i = 0; i < 8; ++i) values[i] = fetched<Source>(slots, 0, i);
  // the slots are written again only after these loads have returned
#pragma unroll
  for (int i = 0; i < 8; ++i)
#pragma unroll
    for (uint32_t& word : values[i].word) asm volatile("" : "+r"(word)::"memory");
}

// One value after the other, where rows are not aligned.
template <class Source>
__device__ __forceinline__ void load_unaligned(const Source& source, const Place& place, int64_t cols,
                                               Pack<typename Source::Type> (&values)[8]) {
#pragma unroll
  for (int i = 0; i < 8; ++i) {
#pragma unroll
    for (int pair = 0; pair < 4; ++pair) {
      const int64_t row = place.first_row() + i, col = place.col() + 2 * pair;
      const bool live = i < place.live_rows();
      values[i].set(pair, live && col < cols ? source.value(row, col) : 0.0f,
                    live && col + 1 < cols ? source.value(row, col + 1) : 0.0f);
    }
  }
}

// Calls `work(place, values)` on this CTA's tiles; `reverse`: the last one first.
template <int LANES, bool WIDE, class Source, class Work>
__device__ __forceinline__ void for_each_tile(const Source& source, const Tiles& tiles, bool reverse, int64_t cols,
                                              void* slots, const Work& work) {
  Pack<typename Source::Type> values[8];
  Walk walk(tiles, reverse);
  Place place;
  const auto skip_empty = [&] {
    while (!walk.done() && !walk.template locate<LANES>(place)) walk.step();
    return !walk.done();
  };
  if (!skip_empty()) return;
  if constexpr (WIDE) {
    fetch(source, place, cols, slots);
    for (bool more = true; more;) {
      take(source, place, cols, slots, values);
      const Place current = place;
      walk.step();
      more = skip_empty();
      if (more) fetch(source, place, cols, slots);
      work(current, values);
    }
  } else {
    do {
      load_unaligned(source, place, cols, values);
      work(place, values);
      walk.step();
    } while (skip_empty());
  }
}

// ---- maxima

// Largest magnitudes of the eight rows among neighbouring threads, two rows a word where values have 16 bits.
template <class T>
struct RowMaxima {
  uint32_t word[8 / Pack<T>::per_word];

  __device__ uint32_t fp32_bits(int row) const {
    return Pack<T>::fp32_bits(word[row / Pack<T>::per_word], row % Pack<T>::per_word);
  }
};

// Among `Lanes` threads (16: the tile's 128 columns), which all get the result.
template <int Lanes, class T>
__device__ __forceinline__ RowMaxima<T> row_maxima(const Pack<T> (&values)[8]) {
  using P = Pack<T>;
  uint32_t rows[8];
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    uint32_t most = P::magnitudes(values[i].word[0]);
#pragma unroll
    for (int k = 1; k < P::words; ++k) most = P::maximum(most, P::magnitudes(values[i].word[k]));
    rows[i] = P::across(most);
  }
  RowMaxima<T> result;
#pragma unroll
  for (int k = 0; k < 8 / P::per_word; ++k) {
    uint32_t most = P::per_word == 2 ? __byte_perm(rows[2 * k % 8], rows[(2 * k + 1) % 8], 0x5410) : rows[k];
#pragma unroll
    for (int step = 1; step < Lanes; step *= 2) most = P::maximum(most, __shfl_xor_sync(~0u, most, step));
    result.word[k] = most;
  }
  return result;
}

// Largest magnitudes of the thread's columns over the warp's 16 rows, as words.
template <class T>
__device__ __forceinline__ void column_maxima(const Pack<T> (&values)[8], uint32_t (&words)[Pack<T>::words]) {
  using P = Pack<T>;
#pragma unroll
  for (int k = 0; k < P::words; ++k) {
    uint32_t most = P::magnitudes(values[0].word[k]);
#pragma unroll
    for (int i = 1; i < 8; ++i) most = P::maximum(most, P::magnitudes(values[i].word[k]));
    words[k] = P::maximum(most, __shfl_xor_sync(~0u, most, 16));
  }
}

// fp32 bits of the warp's largest magnitude, NaN as NAN_BITS.
template <class T>
__device__ __forceinline__ uint32_t warp_maximum(const Pack<T> (&values)[8]) {
  using P = Pack<T>;
  uint32_t most = 0;
#pragma unroll
  for (int i = 0; i < 8; ++i)
#pragma unroll
    for (int k = 0; k < P::words; ++k) most = P::maximum(most, P::magnitudes(values[i].word[k]));
  const uint32_t bits = __reduce_max_sync(~0u, P::fp32_bits(P::across(most), 0));
  return bits > INF_BITS ? NAN_BITS : bits;
}

// An atomic only where it would change something: after the first tiles of a group almost none does.
__device__ __forceinline__ void raise(uint32_t* most, uint32_t bits) {
  if (bits > *static_cast<volatile uint32_t*>(most)) atomicMax(most, bits);
}

// The Hadamard transform along rows: runs of 16 rows are the two half warps' eight each. The result holds bf16 values.
template <class T>
__device__ __forceinline__ void hadamard_rows(const Pack<T> (&values)[8], Pack<BF16> (&out)[8]) {
  const bool second_half = threadIdx.x & 16;
#pragma unroll
  for (int pair = 0; pair < 4; ++pair) {
    float column[2][8];
#pragma unroll
    for (int which = 0; which < 2; ++which) {
      float(&x)[8] = column[which];
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const float value = rounded<BF16>(values[i].value(2 * pair + which));
        const uint32_t negate = HADAMARD_SIGNS >> (second_half ? 8 + i : i) & 1u;
        x[i] = float_of(bits_of(value) ^ negate << 31);
      }
#pragma unroll
      for (int step = 1; step < 8; step *= 2)
#pragma unroll
        for (int i = 0; i < 8; ++i)
          if (!(i & step)) {
            const float a = x[i], b = x[i + step];
            x[i] = a + b;
            x[i + step] = a - b;
          }
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const float other = __shfl_xor_sync(~0u, x[i], 16);
        x[i] = (second_half ? other - x[i] : x[i] + other) * 0.25f;
      }
    }
#pragma unroll
    for (int i = 0; i < 8; ++i) out[i].set(pair, column[0][i], column[1][i]);
  }
}

}  // namespace octavo::cuda
