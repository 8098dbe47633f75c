// A tile is what a CTA of 256 threads processes at a time: 8 x 8 values per thread, so that one thread owns eight
// elements along either axis: half a Philox block, one store of eight codes, three quarters of a Hadamard butterfly. If
// columnwise data are produced, a tile is one panel (128 rows of one group) by 128 columns; if only rowwise data are,
// 16 rows of a panel by 1024 columns, which makes longer contiguous reads and writes, and more rows of fewer columns
// where an operand's columns would leave threads idle.
//
// Plain input is loaded straight to registers, one tile per CTA: 128 bytes per thread are in flight while other CTAs
// compute. With a computing prologue CTAs are persistent and prefetch the next tile's input (cp.async) during the
// current tile; each thread prefetches exactly what it will read itself, so no barrier is needed.
#pragma once

#include "cuda/device/divisor.cuh"
#include "cuda/device/packs.cuh"
#include "octavo/quantize.h"

namespace octavo::cuda {

constexpr int TILE_COLS = 128;
constexpr int THREADS = 256;
constexpr int WARPS = THREADS / 32;

// Threads along a row of a tile; of tiles for rowwise data alone the most.
constexpr int COLUMN_LANES = 16;
constexpr int ROW_LANES = 128;

// How a tile's threads stand: 2 to the power of `lane_bits` of them along a row, at least COLUMN_LANES.
struct TileShape {
  uint32_t lane_bits;

  OCTAVO_HD int cols() const { return 8 << lane_bits; }
  OCTAVO_HD int rows() const { return 8 * THREADS >> lane_bits; }
  OCTAVO_HD uint32_t part_bits() const { return lane_bits - 4; }  // log2 of the tiles down a panel
};

constexpr TileShape SQUARE{4}, WIDEST{7};
static_assert(1 << SQUARE.lane_bits == COLUMN_LANES && 1 << WIDEST.lane_bits == ROW_LANES);

// The widest whose last tile leaves an eighth of all threads without columns, or fewer; else the narrowest.
template <int LANES>
TileShape shape_for(int64_t cols) {
  if constexpr (LANES != COLUMN_LANES) {
    for (TileShape shape = WIDEST; shape.lane_bits > SQUARE.lane_bits; --shape.lane_bits) {
      const int64_t covered = round_up(cols, int64_t{shape.cols()});
      if (8 * (covered - cols) <= covered) return shape;
    }
  }
  return SQUARE;
}

// A constant where it can be one.
template <int LANES>
__device__ __forceinline__ TileShape shape_of(const TileShape& chosen) {
  if constexpr (LANES == COLUMN_LANES) return SQUARE;
  return chosen;
}

// Where groups begin: the part of Input and plan that a tile needs.
struct Groups {
  const Panel* panels;         // ragged
  int64_t matrix_rows;         // stacked
  const int64_t* rows_in_use;  // neither: panels of the first rows, regardless of groups
};

// The tiles of an operand in processing order. The columns are divided into slabs of `width` tiles, of which there is
// one unless rows are read through an index (slab_width in quantize/launches.cuh); slabs come one after the other, and
// the tiles of a slab row by row.
struct Tiles {
  Groups groups;
  TileShape shape;
  uint32_t col_blocks;              // tiles across all columns
  uint32_t down;                    // rows of tiles
  uint32_t step_down, step_across;  // the grid's size in whole rows of tiles, and the rest, for TileWalk::step
  uint32_t width;                   // divides col_blocks
  Divisor by_width, by_down;
  uint32_t most_ctas;  // of a persistent kernel, for its launch; 0: as many as the device holds at once
};

// A Panel (octavo/plan.h) in 32 bits, which rows (at most 2^30), columns and panels fit; address arithmetic uses 64.
struct Panel32 {
  int group;
  int rows;
  int row0;
  int local;
  int first16;
  int first32;
};

// A tile's position, and this thread's in it. Few members, because the next tile's are live during the current tile.
struct Tile {
  Panel32 panel;
  int panel_index;
  int first;  // first row of the tile in its panel
  int col0;   // first column of the tile
  TileShape shape;
  int end;  // first column past the tile's part of the operand

  // This thread's first row in the panel, that row's number in the operand, and the thread's first column.
  __device__ int row() const { return first + static_cast<int>(threadIdx.x >> shape.lane_bits) * 8; }
  __device__ int64_t first_row() const { return panel.row0 + row(); }
  __device__ int col() const { return col0 + static_cast<int>(threadIdx.x % (1u << shape.lane_bits)) * 8; }
  // Of its eight rows, those within the group.
  __device__ int live_rows() const { return min(max(panel.rows - row(), 0), 8); }
};

// False if all of the warp's rows are past the group's end: their codes are zero, and none of these rows is stored.
__device__ __forceinline__ bool is_live(const Tile& tile) { return __any_sync(~0u, tile.live_rows() > 0); }

// A load with L1 evict-last priority: all tiles of a panel read these words, and each needs them before it can issue
// its own loads.
__device__ __forceinline__ int4 load_evict_last(const int4* at) {
  int4 loaded;
  asm("ld.global.nc.L1::evict_last.v4.s32 {%0, %1, %2, %3}, [%4];"
      : "=r"(loaded.x), "=r"(loaded.y), "=r"(loaded.z), "=r"(loaded.w)
      : "l"(at));
  return loaded;
}

__device__ __forceinline__ Panel32 panel_at(const Groups& groups, int index) {
  if (groups.rows_in_use) {
    const int left = static_cast<int>(__ldg(groups.rows_in_use)) - index * PANEL_ROWS;
    return {0, min(max(left, 0), PANEL_ROWS), index * PANEL_ROWS, 0, 0, 0};
  }
  if (!groups.panels) {
    const Panel panel = stacked_panel(index, groups.matrix_rows);
    return {panel.group, panel.rows, static_cast<int>(panel.row0), panel.local, panel.first16, panel.first32};
  }
  const int4* words = reinterpret_cast<const int4*>(groups.panels + index);
  const int4 first = load_evict_last(words), second = load_evict_last(words + 1);
  return {first.x, first.y, first.z, second.x, second.z, second.w};
}

// A CTA's walk over its tiles, every gridDim.x-th one, without a division per step. Only persistent kernels step, and
// their tiles are one slab.
class TileWalk {
 public:
  __device__ TileWalk(const Tiles& tiles, bool reverse)
      : tiles_(tiles), reverse_(reverse), down_(tiles.by_width.quotient(blockIdx.x)) {
    const uint32_t slab = tiles.by_down.quotient(down_);
    across_ = blockIdx.x - (down_ - slab) * tiles.width;
    down_ -= slab * tiles.down;
  }

  __device__ bool done() const { return down_ >= tiles_.down; }

  __device__ void step() {
    down_ += tiles_.step_down;
    across_ += tiles_.step_across;
    if (across_ >= tiles_.col_blocks) {
      across_ -= tiles_.col_blocks;
      ++down_;
    }
  }

  // False if the tile holds no rows.
  template <int LANES>
  __device__ bool locate(Tile& tile) const {
    const TileShape shape = shape_of<LANES>(tiles_.shape);
    const uint32_t down = reverse_ ? tiles_.down - 1 - down_ : down_;
    const uint32_t across = reverse_ ? tiles_.col_blocks - 1 - across_ : across_;
    tile.first = static_cast<int>(down % (1u << shape.part_bits())) * shape.rows();
    tile.panel_index = static_cast<int>(down >> shape.part_bits());
    tile.col0 = static_cast<int>(across) * shape.cols();
    tile.shape = shape;
    tile.panel = panel_at(tiles_.groups, tile.panel_index);
    return tile.first < tile.panel.rows;
  }

 private:
  const Tiles& tiles_;
  bool reverse_;
  uint32_t down_, across_;
};

}  // namespace octavo::cuda
