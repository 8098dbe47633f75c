// A unit is what a thread of NVFP4's kernels holds of a tile: 16 rows of eight columns, which are eight whole
// columnwise blocks. A thread then finds their maxima and transforms them by itself, and two lanes share a rowwise
// block.
#pragma once

#include "cuda/device/memory.cuh"
#include "cuda/device/ptx.cuh"
#include "cuda/tile/args.cuh"

namespace octavo::cuda {

constexpr int UNIT_ROWS = unit_size(Kind::nvfp4);
constexpr int UNITS = PANEL_ROWS / UNIT_ROWS;
constexpr int UNIT_THREADS = COLUMN_LANES * UNITS;  // of a tile of 128 x 128
constexpr int UNIT_WARPS = UNIT_THREADS / 32;
constexpr int BLOCKS_ACROSS = TILE_COLS / UNIT_ROWS;

// This thread's unit of a tile.
struct Unit {
  int number;  // from the top of the panel
  int row;     // its first row in the panel
  int live;    // rows within the group

  __device__ static Unit of(const Tile& tile) {
    const int number = static_cast<int>(threadIdx.x / COLUMN_LANES), row = number * UNIT_ROWS;
    return {number, row, min(max(tile.panel.rows - row, 0), UNIT_ROWS)};
  }
};

// The place of one of the unit's rows in the source's array; each of its lanes looks one up.
template <class T>
__device__ __forceinline__ int row_of_lane(const Plain<T>& source, const Unit& unit, int64_t first) {
  const int own = static_cast<int>(threadIdx.x % UNIT_ROWS);
  return own < unit.live ? source.rows_at(first + own) : -1;
}

// All rows before the first is used. Zeros past the group's end, past the last column and where an index names no row.
template <class T>
__device__ __forceinline__ void read_unit(const Plain<T>& source, const Tile& tile, const Unit& unit,
                                          Pack<T> (&values)[UNIT_ROWS]) {
  const int live = tile.col() < tile.end ? unit.live : 0;
  const int64_t first = tile.panel.row0 + unit.row;
  if (source.rows_at.of_rows) {
    const int place = row_of_lane(source, unit, first);
#pragma unroll
    for (int i = 0; i < UNIT_ROWS; ++i) {
      const int row = __shfl_sync(~0u, place, i, UNIT_ROWS);
      values[i] = row >= 0 && tile.col() < tile.end ? source.load(row, tile.col()) : zeros<T>();
    }
    return;
  }
  const char* from = source.address(0, first, tile.col());
  const int64_t stride = source.row_bytes(0);
  if (live == UNIT_ROWS) {
#pragma unroll
    for (int i = 0; i < UNIT_ROWS; ++i, from += stride) values[i] = load_pack<T>(from);
    return;
  }
#pragma unroll
  for (int i = 0; i < UNIT_ROWS; ++i, from += stride) values[i] = i < live ? load_pack<T>(from) : zeros<T>();
}

// A thread's own slots in smem, one for each row of its unit: values that come by cp.async need no registers, and loops
// over them need no copies of their code, which would not fit the instruction cache.
template <class T>
class UnitSlots {
 public:
  static constexpr int words = UNIT_ROWS * UNIT_THREADS * 4;

  __device__ explicit UnitSlots(uint32_t* slots) : slots_(reinterpret_cast<uint4*>(slots) + threadIdx.x) {}

  // Zeros past the group's end, past the last column and where an index names no row.
  __device__ void fetch(const Plain<T>& source, const Tile& tile, const Unit& unit) {
    const int live = tile.col() < tile.end ? unit.live : 0;
    const int64_t first = tile.panel.row0 + unit.row;
    if (source.rows_at.of_rows) {
      const int place = row_of_lane(source, unit, first);
#pragma unroll 4
      for (int i = 0; i < UNIT_ROWS; ++i) {
        const int row = __shfl_sync(~0u, place, i, UNIT_ROWS);
        copy(i, source.address(0, max(row, 0), tile.col()), row >= 0 && i < live);
      }
    } else {
      const char* from = source.address(0, first, tile.col());
      const int64_t stride = source.row_bytes(0);
#pragma unroll
      for (int i = 0; i < UNIT_ROWS; ++i, from += stride) copy(i, from, i < live);
    }
  }

  __device__ Pack<T> row(int i) const {
    const uint4 four = slots_[i * UNIT_THREADS];
    return {{four.x, four.y, four.z, four.w}};
  }

  // Two columns of a row.
  __device__ uint32_t word(int i, int k) const {
    return reinterpret_cast<const uint32_t*>(slots_ + i * UNIT_THREADS)[k];
  }

 private:
  __device__ void copy(int i, const char* from, bool live) {
    cp_async_or_zeros(smem_address(slots_ + i * UNIT_THREADS), from, live);
  }

  uint4* slots_;
};

}  // namespace octavo::cuda
