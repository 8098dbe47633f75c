// The tiles of a grouped GEMM in a fixed order that depends on the plan alone.
//
// CTA c computes tiles c, c + CTAs, c + 2 CTAs, ... of that order, so no counter is shared and every launch gives the
// same bits, however many CTAs there are. m-grouped: group after group, then the rows that belong to no group.
// k-grouped: groups by descending size, so that the last tiles are short. Within a group RASTER rows of tiles at a
// time, down before across: their left operand stays in L2 while the right operand streams through once.
#pragma once

#include "octavo/plan.h"
#include "params.h"

namespace octavo::cuda {

constexpr int RASTER = 16;

struct GemmTileAt {
  int32_t group;     // -1: rows past the last group
  int32_t m, n;      // first row and column within the group's result
  int32_t k_blocks;  // 0: the tile is zero; -1: there are no more tiles
  int32_t rows;      // of the group: in the result or, k-grouped, along K
  int32_t start;     // the group's first row in the ragged operand: at most 2^30
  int32_t panel;     // the group's first panel
};

template <class Config>
class GemmSchedule {
 public:
  __device__ explicit GemmSchedule(const GemmParams& params)
      : params_(params),
        plan_{params.plan, params.rows, params.groups},
        across_((params.width + TILE_N - 1) / TILE_N),
        lane_(static_cast<int>(threadIdx.x) % 32) {}

  // Tile `index` of the order; indices must not decrease from call to call. Called by all lanes of a warp.
  __device__ GemmTileAt at(int32_t index) { return params_.k_grouped ? k_grouped(index) : m_grouped(index); }

 private:
  static constexpr int TILE_M = Config::TILE_M, TILE_N = Config::TILE_N;
  static constexpr int HEIGHT = TILE_M == 64 ? HEIGHT_64 : HEIGHT_128;
  // m-grouped tiles are found by the plan's blocks of this height
  static_assert(TILE_HEIGHTS[HEIGHT] == TILE_M || Config::K_GROUPED);

  __device__ GemmTileAt m_grouped(int32_t index) {
    const int64_t* start = plan_.block_start(HEIGHT);
    const int32_t used = word(start + params_.groups) * across_;
    if (index >= used) return past_the_sum(index - used);
    find(start, index);
    const int32_t first = word(start + group_);
    GemmTileAt tile;
    tile.group = group_;
    place(index - first * across_, word(start + group_ + 1) - first, tile);
    tile.k_blocks = params_.k_blocks;
    tile.start = word(plan_.row_start() + group_);
    tile.rows = word(plan_.row_start() + group_ + 1) - tile.start;
    tile.panel = group_ * params_.panels_each;
    return tile;
  }

  __device__ GemmTileAt past_the_sum(int32_t index) const {
    GemmTileAt tile;
    tile.group = -1;
    tile.start = word(plan_.row_start() + params_.groups);
    tile.rows = static_cast<int32_t>(params_.rows) - tile.start;
    tile.panel = 0;
    const int32_t down = (tile.rows + TILE_M - 1) / TILE_M;
    if (index >= down * across_) {
      tile.k_blocks = -1;
      return tile;
    }
    tile.k_blocks = 0;
    tile.m = index / across_ * TILE_M;
    tile.n = index % across_ * TILE_N;
    return tile;
  }

  __device__ GemmTileAt k_grouped(int32_t index) const {
    const int32_t down = (params_.height + TILE_M - 1) / TILE_M;
    const int32_t each = down * across_, rank = index / each;
    GemmTileAt tile;
    if (rank >= params_.groups) {
      tile.k_blocks = -1;
      return tile;
    }
    tile.group = word(plan_.order() + rank);
    place(index - rank * each, down, tile);
    tile.start = word(plan_.row_start() + tile.group);
    tile.rows = word(plan_.row_start() + tile.group + 1) - tile.start;
    tile.panel = word(plan_.block_start(HEIGHT_128) + tile.group);
    tile.k_blocks = (tile.rows + Config::K_ELEMENTS - 1) / Config::K_ELEMENTS;
    return tile;
  }

  // Everything that the schedule reads fits 32 bits: there are at most 2^30 rows, and gemm.cu refuses 2^31 tiles.
  __device__ static int32_t word(const int64_t* at) { return __ldg(reinterpret_cast<const int32_t*>(at)); }

  // Finds the group of tile `index`, 32 groups per step, starting from the last result.
  __device__ void find(const int64_t* start, int32_t index) {
    while (true) {
      const int32_t group = group_ + lane_;
      const int32_t end = word(start + min(group + 1, params_.groups)) * across_;
      const uint32_t behind = __ballot_sync(0xFFFFFFFFu, end > index);
      if (behind != 0) {
        group_ += __ffs(static_cast<int>(behind)) - 1;
        return;
      }
      group_ += 32;
    }
  }

  __device__ void place(int32_t index, int32_t down, GemmTileAt& tile) const {
    const int32_t strip = index / (RASTER * across_);
    const int32_t here = min(RASTER, down - strip * RASTER);
    const int32_t rest = index - strip * RASTER * across_;
    tile.m = (strip * RASTER + rest % here) * TILE_M;
    tile.n = rest / here * TILE_N;
  }

  const GemmParams& params_;
  const PlanView plan_;
  const int32_t across_;
  const int lane_;
  int32_t group_ = 0;
};

}  // namespace octavo::cuda
