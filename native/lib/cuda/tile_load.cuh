// How a tile's values come to its threads, and the loop over a CTA's tiles.
#pragma once

#include "sources.cuh"
#include "tile.cuh"

namespace octavo::cuda {

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

// Straight to registers; zeros past the group's end and past the last column.
template <class T>
__device__ __forceinline__ void load(const Plain<T>& source, const Place& place, int64_t cols, Pack<T> (&values)[8]) {
  const int live = place.col() < cols ? place.live_rows() : 0;
  const char* from = source.address(0, place.first_row(), place.col());
  const int64_t stride = source.row_bytes(0);
#pragma unroll
  for (int i = 0; i < 8; ++i, from += stride) values[i] = i < live ? load_pack<T>(from) : zeros<T>();
}

// All rows' inputs are asked for before the first is used: with fewer in flight memory is not kept busy.
template <class T>
__device__ __forceinline__ void load(const Swiglu<T>& source, const Place& place, int64_t cols, Pack<T> (&values)[8]) {
  const int live = place.col() < cols ? place.live_rows() : 0;
  const char* from = source.x.address(0, place.first_row(), place.col());
  const int64_t stride = source.x.row_bytes(0), to_up = source.features * Pack<T>::bytes;
  Pack<T> up[8];
#pragma unroll
  for (int i = 0; i < 8; ++i, from += stride) {
    values[i] = i < live ? load_pack<T>(from) : zeros<T>();
    up[i] = i < live ? load_pack<T>(from + to_up) : zeros<T>();
  }
  bool all_moderate = true;
#pragma unroll
  for (int i = 0; i < 8; ++i) all_moderate &= moderate(values[i]);
  if (all_moderate) {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const float prob = source.probability(place.first_row() + i, i < live);
      values[i] = made_by<T>([&](int k) { return silu_moderate(values[i].value(k)) * up[i].value(k) * prob; });
    }
    return;
  }
  // rolled, because it is rare and long: the row is picked from the registers and put back
#pragma unroll 1
  for (int row = 0; row < 8; ++row) {
    Pack<T> gate = values[0], other = up[0];
#pragma unroll
    for (int k = 1; k < 8; ++k)
      if (row == k) gate = values[k], other = up[k];
    const float prob = source.probability(place.first_row() + row, row < live);
    const Pack<T> made = made_by<T>(
        [&](int i) { return gated_forward(Activation::swiglu, gate.value(i), other.value(i)) * prob; });
#pragma unroll
    for (int k = 0; k < 8; ++k)
      if (row == k) values[k] = made;
  }
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

// Calls `work(place, values)` on this CTA's tiles; `reverse`: the last one first.
template <int LANES, bool WIDE, class Source, class Work>
__device__ __forceinline__ void for_each_tile(const Source& source, const Tiles& tiles, bool reverse, int64_t cols,
                                              void* slots, const Work& work) {
  Pack<typename Source::Type> values[8];
  Walk walk(tiles, reverse);
  Place place;
  if constexpr (!is_persistent<Source, WIDE>) {
    if (!walk.template locate<LANES>(place)) return;
    if constexpr (WIDE) {
      load(source, place, cols, values);
    } else {
      load_unaligned(source, place, cols, values);
    }
    work(place, values);
  } else {
    const auto skip_empty = [&] {
      while (!walk.done() && !walk.template locate<LANES>(place)) walk.step();
      return !walk.done();
    };
    if (!skip_empty()) return;
    fetch(source, place, cols, slots);
    for (bool more = true; more;) {
      take(source, place, cols, slots, values);
      const Place current = place;
      walk.step();
      more = skip_empty();
      if (more) fetch(source, place, cols, slots);
      work(current, values);
    }
  }
}

}  // namespace octavo::cuda
