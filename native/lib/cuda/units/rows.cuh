// What the kernels of units share: their tile, the maximum of a unit, and the stores of its rows.
#pragma once

#include "values.cuh"

namespace octavo::cuda {

// The tile of this CTA; false if it holds no rows.
template <class Args>
__device__ __forceinline__ bool locate_tile(const Args& args, bool reverse, Tile& tile) {
  const TileWalk walk(args.tiles, reverse);
  tile.end = static_cast<int>(args.cols);
  return walk.template locate<COLUMN_LANES>(tile);
}

// Words that hold the largest magnitude of the thread's half of a 16 x 16 block, in both halves.
template <class T>
__device__ __forceinline__ uint32_t unit_maximum(const Pack<T> (&values)[UNIT_ROWS]) {
  using P = Pack<T>;
  uint32_t most = 0;
#pragma unroll
  for (int i = 0; i < UNIT_ROWS; ++i)
#pragma unroll
    for (int k = 0; k < 4; ++k) most = P::maximum(most, values[i].word[k]);
  return P::across(most);
}

// Stores of the rows of a unit, as codes or, where VALUES allows it and the plane asks for it, as values.
template <bool VALUES>
class UnitRows {
 public:
  template <class S>
  __device__ UnitRows(const TileArgs<S>& args, const Tile& tile, const Unit& unit)
      : plane_(args.rowwise),
        live_(tile.col() < tile.end ? unit.live : 0),
        stride_(values() ? args.cols * 2 : args.cols / 2) {
    const int64_t along = values() ? int64_t{tile.col()} * 2 : tile.col() / 2;
    to_ = static_cast<uint8_t*>(plane_.codes) + (tile.panel.row0 + unit.row) * stride_ + along;
  }

  __device__ bool values() const { return VALUES && plane_.layout == Layout::values; }

  // `of`: the magnitudes of the block.
  template <class Stores = Put>
  __device__ void store_values(int i, uint32_t codes, const Magnitudes& of, const Stores& put = Stores{}) {
    if (i < live_) put(to_, words_of(values_of(codes, of)));
    to_ += stride_;
  }

  template <class Stores = Put>
  __device__ void store(int i, uint32_t codes, const Stores& put = Stores{}) {
    if (i < live_) put(to_, codes);
    to_ += stride_;
  }

 private:
  const Plane& plane_;
  int live_;
  int64_t stride_;
  uint8_t* to_;
};

}  // namespace octavo::cuda
