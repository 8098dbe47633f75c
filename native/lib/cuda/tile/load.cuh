// How a tile's values come to its threads, and the loop over a CTA's tiles.
#pragma once

#include "slots.cuh"
#include "sources.cuh"
#include "tile.cuh"
#include "swiglu.cuh"

namespace octavo::cuda {

// Asks for all of a tile's inputs; zeros past the group's end and past the last column.
template <class Source>
__device__ __forceinline__ void fetch(const Source& source, const Place& place, void* slots) {
  const int live = place.col() < place.end ? place.live_rows() : 0;
#pragma unroll
  for (int input = 0; input < Source::inputs; ++input)
    Slots<typename Source::Type>::fetch(slots, input, source.address(input, place.first_row(), place.col()),
                                        source.row_bytes(input), live);
  asm volatile("cp.async.commit_group;" ::: "memory");
}

// What was fetched, through the prologue.
template <class Source>
__device__ __forceinline__ void take(const Source& source, const Place& place, void* slots,
                                     Pack<typename Source::Type> (&values)[8]) {
  using T = typename Source::Type;
  wait_for_slots();
  // rolled: unrolled eight times, the prologue's code would not fit the instruction cache
  const bool inside = place.col() < place.end;
#pragma unroll 1
  for (int i = 0; i < 8; ++i) {
    Pack<T> inputs[Source::inputs];
#pragma unroll
    for (int input = 0; input < Source::inputs; ++input) inputs[input] = Slots<T>::load(slots, input, i);
    Slots<T>::store(slots, 0, i, inside && i < place.live_rows()
                                     ? source.make(inputs, place.first_row() + i, place.col())
                                     : zeros<T>());
  }
#pragma unroll
  for (int i = 0; i < 8; ++i) values[i] = Slots<T>::load(slots, 0, i);
  // the slots are written again only after these loads have returned
#pragma unroll
  for (int i = 0; i < 8; ++i)
#pragma unroll
    for (uint32_t& word : values[i].word) in_turn(word);
}

// Straight to registers, all rows before the first is used: with fewer in flight memory is not kept busy. Zeros past the
// group's end and past the last column.
template <class Source>
__device__ __forceinline__ void read(const Source& source, const Place& place,
                                     Pack<typename Source::Type> (&values)[8]) {
  using T = typename Source::Type;
  const int live = place.col() < place.end ? place.live_rows() : 0;
  const char* from = source.address(0, place.first_row(), place.col());
  const int64_t stride = source.row_bytes(0);
#pragma unroll
  for (int i = 0; i < 8; ++i, from += stride) values[i] = i < live ? load_pack<T>(from) : zeros<T>();
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

// True where a CTA stays for more than one tile.
template <class Source, bool WIDE>
constexpr bool is_persistent = WIDE && Source::computes;

// Arrays that a thread keeps in its slots.
template <class Source, bool WIDE>
constexpr int arrays_kept() {
  if constexpr (!WIDE) return 0;
  else if constexpr (Source::computes) return Source::inputs;
  else return Source::kept;
}

// Calls `work(place, values)` and then `finish(place)` on this CTA's tiles; `reverse`: the last one first.
template <int LANES, bool WIDE, class Source, class Work, class Finish>
__device__ __forceinline__ void for_each_tile(const Source& source, const Tiles& tiles, bool reverse, int64_t cols,
                                              void* slots, const Work& work, const Finish& finish) {
  using T = typename Source::Type;
  Pack<T> values[8];
  Walk walk(tiles, reverse);
  Place place;
  place.end = static_cast<int>(makes_halves<Source> ? cols / 2 : cols);
  if constexpr (is_persistent<Source, WIDE>) {
    const auto skip_empty = [&] {
      while (!walk.done() && !walk.template locate<LANES>(place)) walk.step();
      return !walk.done();
    };
    if (!skip_empty()) return;
    fetch(source, place, slots);
    for (bool more = true; more;) {
      take(source, place, slots, values);
      const Place current = place;
      walk.step();
      more = skip_empty();
      if (more) fetch(source, place, slots);
      work(current, values);
      finish(current);
    }
  } else {
    if (!walk.template locate<LANES>(place)) return;
    if constexpr (!WIDE) {
      load_unaligned(source, place, cols, values);
    } else {
      if constexpr (keeps_slots<Source>) {
        source.fetch_kept(place, slots);
        const float own = own_probability(source, place);
        read(source, place, values);
        // a branch between asking and waiting: in straight code the compiler waits for the slots before it has asked for
        // all rows
        if (is_live(place)) {
          make(source, place, own, values, slots);
        } else {
          wait_for_slots();
        }
      } else {
        read(source, place, values);
      }
    }
    if constexpr (makes_halves<Source>) {
      // rolled: twice the code would not fit the instruction cache
#pragma unroll 1
      for (int half = 0; half < 2; ++half) {
        // what both halves' addresses have in common is worked out twice: for it there are no registers
        asm volatile("" : "+r"(place.panel_index), "+r"(place.first), "+r"(place.panel.row0));
#pragma unroll
        for (int i = 0; i < 8; ++i) values[i] = Slots<T>::load(slots, half, i);
        work(place, values);
        finish(place);
        place.col0 += static_cast<int>(cols / 2);
        place.end = static_cast<int>(cols);
      }
    } else {
      work(place, values);
      finish(place);
    }
  }
}

}  // namespace octavo::cuda
