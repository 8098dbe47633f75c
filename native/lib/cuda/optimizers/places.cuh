// Where the rows of a CTA and of its warps are. A CTA takes one place and ends.
#pragma once

#include "steps.h"

namespace octavo::cuda {

// The thread's number, asked for anew: what is worked out from it does not stay in registers beyond where it is used.
__device__ __forceinline__ uint32_t thread_again() {
  uint32_t thread;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
  return thread;
}

// A tile of 128 x 128, whose rows are of one matrix.
struct TilePlace {
  uint32_t panel, across;  // numbers of the tile's rows and columns of tiles
  int64_t first_row;
  int rows;  // up to 128 exist
};

// As stacked_panel, in 32 bits: a division of 64 is a subroutine.
__device__ __forceinline__ TilePlace tile_place(const StepArgs& args) {
  TilePlace place;
  place.panel = blockIdx.x / args.across, place.across = blockIdx.x - place.panel * args.across;
  const uint32_t matrix = place.panel / args.panels_each;
  const int64_t within = int64_t{place.panel - matrix * args.panels_each} * TILE_SIDE;
  place.first_row = matrix * args.step.codes.matrix_rows + within;
  place.rows = static_cast<int>(min(args.step.codes.matrix_rows - within, int64_t{TILE_SIDE}));
  return place;
}

// 16 rows of 128 columns.
struct WarpPlace {
  uint32_t across;  // number of the block of columns
  int64_t first_row;
  int rows;  // up to 16 exist; none if it is not above 0
};

// Of a tile whose codes are written, a warp has 16 rows. Otherwise the warps of a CTA are side by side, so that what
// they read and write at about the same time is next to each other in memory.
template <Written W>
__device__ __forceinline__ WarpPlace warp_place(const StepArgs& args, uint32_t warp) {
  WarpPlace place;
  if constexpr (W == Written::codes) {
    const TilePlace tile = tile_place(args);
    place.across = tile.across;
    place.first_row = tile.first_row + warp * WARP_ROWS;
    place.rows = min(tile.rows - static_cast<int>(warp) * WARP_ROWS, WARP_ROWS);
  } else {
    const uint32_t number = blockIdx.x * STEP_WARPS + warp, down = number / args.across;
    place.across = number - down * args.across;
    place.first_row = int64_t{down} * WARP_ROWS;
    place.rows = static_cast<int>(min(args.step.arrays.rows - place.first_row, int64_t{WARP_ROWS}));
  }
  return place;
}

}  // namespace octavo::cuda
