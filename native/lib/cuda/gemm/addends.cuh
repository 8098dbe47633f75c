// Adds a tile's sums to an fp32 result, in tiles of more than 128 rows or columns. Behind the tile's last K-block TMA
// loads its part of the result, the addends, into the next stages of the ring; consumers add their sums there, and
// store warps have TMA store them while the next tile begins (docs/decisions/0040).
//
// Reduce-adds in L2 would save these loads, but they leave smem at the rate of device memory, and the consumers or the
// ring would wait for that; stores leave as fast as L2 takes them.
#pragma once

#include "factors.cuh"
#include "mainloop.cuh"
#include "params.h"
#include "pipeline.cuh"

namespace octavo::cuda {

template <class Config>
struct Addends {
  // TMA tiles of 64 rows x 32 columns for each warpgroup, and how many of them fit in a stage.
  static constexpr int TILES = Config::ADDS_IN_PLACE ? Config::COLS / 32 : 0;
  static constexpr int PER_STAGE = 1 + Config::TILE_N / (WARPGROUP_ROWS * Config::WARPGROUPS);
  static constexpr int STAGES = (TILES + PER_STAGE - 1) / PER_STAGE;  // that a tile's part of the result passes

  __device__ static bool used(const GemmParams& params) { return TILES > 0 && params.finish == Finish::adds; }

  // Producer thread, behind a tile's last K-block. Rows and columns past the result's come as zeros.
  __device__ static void load(const GemmParams& params, const GemmTileAt& tile, GemmPipeline<Config>& pipeline) {
#pragma unroll 1
    for (int first = 0; first < TILES; first += PER_STAGE) {
      const int count = min(PER_STAGE, TILES - first);
      int stage;
      uint64_t* const full = pipeline.producer_acquire(stage, count * Config::WARPGROUPS * BLOCK_BYTES);
#pragma unroll 1
      for (int i = 0; i < count; ++i) {
        for (int warpgroup = 0; warpgroup < Config::WARPGROUPS; ++warpgroup) {
          tma_load_once(params.out_map, pipeline.addends(stage, i, warpgroup), full, tile.n + 32 * (first + i),
                        tile.m + WARPGROUP_ROWS * warpgroup, tile.group);
        }
      }
    }
  }

  // Consumer: adds its sums to the addends and hands them to the store warp.
  __device__ __forceinline__ static void add(const GemmFactors<Config>& factors, GemmPipeline<Config>& pipeline,
                                             typename GemmMainloop<Config>::Sums& sums) {
    constexpr int EACH = TILES / Config::PARTS;  // TMA tiles of a part
    const float upper = factors.upper(), lower = factors.lower();
#pragma unroll
    for (int first = 0; first < TILES; first += PER_STAGE) {
      const int stage = pipeline.consumer_wait();
#pragma unroll
      for (int piece = first; piece < first + PER_STAGE && piece < TILES; ++piece) {
        add_tile(sums[piece / EACH] + 16 * (piece % EACH), upper, lower,
                 pipeline.addends(stage, piece - first, threadIdx.x / WARPGROUP_THREADS - 1));
      }
      fence_proxy_async();
      __syncwarp();
      if (threadIdx.x % 32 == 0) pipeline.addends_publish(stage);
    }
  }

  // Store thread of the warpgroups [from, to): stores the addends, and releases their stages when TMA has read them.
  __device__ static void store(const GemmParams& params, const GemmTileAt& tile, int from, int to,
                               GemmPipeline<Config>& pipeline) {
#pragma unroll 1
    for (int first = 0; first < TILES; first += PER_STAGE) {
      const int stage = pipeline.addends_next(), count = min(PER_STAGE, TILES - first);
#pragma unroll 1
      for (int warpgroup = from; warpgroup < to; ++warpgroup) {
        pipeline.addends_wait(stage, warpgroup);
#pragma unroll 1
        for (int i = 0; i < count; ++i) {
          tma_store_once(params.out_map, pipeline.addends(stage, i, warpgroup), tile.n + 32 * (first + i),
                         tile.m + WARPGROUP_ROWS * warpgroup, tile.group);
        }
      }
      bulk_commit_group();
      bulk_wait_group_read<0>();
      pipeline.addends_release(stage, to - from);
    }
  }

 private:
  // Adds a thread's 16 sums to a TMA tile. Lanes of odd rows take columns 16 apart in the other order: a half-warp's
  // four rows then hit every bank once.
  __device__ __forceinline__ static void add_tile(const float* sums, float upper, float lower, uint8_t* addends) {
    const int lane = threadIdx.x % 32, row = lane / 4;
    const bool odd = row % 2;
    const int chunk = (lane % 4 / 2 ^ row ^ 4 * odd) * 16;
    addends += threadIdx.x / 32 % WARPGROUP_WARPS * OUT_TILE_BYTES + row * SWIZZLE_BYTES + lane % 2 * 8;
    float2 values[8];  // all loaded before the first store: nvcc moves no load above a store that it might alias
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      values[i] = *reinterpret_cast<const float2*>(addends + (chunk ^ i / 2 * 32) + i % 2 * 8 * SWIZZLE_BYTES);
    }
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const float* const one = sums + i / 2 * 4 + i % 2 * 2;
      const float* const other = sums + (i / 2 ^ 2) * 4 + i % 2 * 2;
      const float factor = i % 2 ? lower : upper;
      values[i].x += (odd ? other[0] : one[0]) * factor;
      values[i].y += (odd ? other[1] : one[1]) * factor;
      *reinterpret_cast<float2*>(addends + (chunk ^ i / 2 * 32) + i % 2 * 8 * SWIZZLE_BYTES) = values[i];
    }
  }
};

}  // namespace octavo::cuda
