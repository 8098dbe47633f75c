// The producer warp: walks the schedule, publishes each tile to the other warps and issues the TMA loads of its
// K-blocks.
#pragma once

#include "addends.cuh"
#include "pipeline.cuh"
#include "schedule.cuh"

namespace octavo::cuda {

// TMA loads of one K-block of an operand: ROWS rows of 128 bytes, or TMA tiles of 64 x 64 if it is transposed.
template <class Config, int ROWS, bool TRANSPOSED>
__device__ __forceinline__ void load_operand(const CUtensorMap& map, OperandWalk walk, int32_t interleave,
                                             const GemmTileAt& tile, int first, int block, uint8_t* into,
                                             uint64_t* barrier) {
  const int32_t before = RAGGED_ROWS - tile.rows, end = tile.start + tile.rows;
  if constexpr (TRANSPOSED) {
#pragma unroll
    for (int part = 0; part < ROWS / 64; ++part) {
      uint8_t* const at = into + part * BLOCK_BYTES;
      if (walk == OperandWalk::rows_t) {
        tma_load(map, at, barrier, first + 64 * part, before + 64 * block, end, RAGGED_ROWS);
      } else {
        tma_load(map, at, barrier, first + 64 * part, 64 * block, tile.group);
      }
    }
  } else if (walk == OperandWalk::rows) {
    tma_load(map, into, barrier, block * Config::K_ELEMENTS, before + first, end, RAGGED_ROWS);
  } else if (walk == OperandWalk::matrices) {
    tma_load(map, into, barrier, block * Config::K_ELEMENTS, first, tile.group);
  } else {
    constexpr int EACH = PANEL_ROWS / Config::K_ELEMENTS;  // K-blocks per panel
    const int32_t k = block % EACH * Config::K_ELEMENTS, panel = tile.panel + block / EACH;
    if (interleave == 0) {
      tma_load(map, into, barrier, k, first, panel);
    } else {
      tma_load(map, into, barrier, k, 0, 0, first >> interleave, panel);
    }
  }
}

// The TMA loads of one K-block into a stage. A borrowed stage gets its left operand later than the rest.
template <class Config>
struct BlockLoads {
  const GemmParams& params;
  const GemmTileAt& tile;
  GemmPipeline<Config>& pipeline;

  __device__ __forceinline__ void left(int block, int stage) const {
    if constexpr (Config::GATHERED == Gathered::left) return;
    load_operand<Config, Config::TILE_M, Config::LEFT_TRANSPOSED>(params.left, params.left_walk, params.left_interleave,
                                                                  tile, tile.m, block, pipeline.left(stage),
                                                                  pipeline.full_barrier(stage));
  }

  __device__ __forceinline__ void right(int block, int stage) const {
    if constexpr (Config::GATHERED == Gathered::right) return;
    load_operand<Config, Config::TILE_N, Config::RIGHT_TRANSPOSED>(params.right, params.right_walk,
                                                                   params.right_interleave, tile, tile.n, block,
                                                                   pipeline.right(stage), pipeline.full_barrier(stage));
  }

  __device__ __forceinline__ void scales(int block, int stage) const {
    uint64_t* const full = pipeline.full_barrier(stage);
    if constexpr (Config::LEFT_SCALES && Config::GATHERED != Gathered::left) {
      const bool panels = params.left_walk == OperandWalk::panels;
      const int32_t row = panels ? tile.m : tile.start + tile.m;
      tma_load(params.left_scales, pipeline.left_scales(stage), full, row - row % SCALE_TILE_EXTRA,
               panels ? tile.panel + block : block);
    }
    if constexpr (Config::RIGHT_SCALES) {
      const bool panels = params.right_rows == 0;
      tma_load(params.right_scales, pipeline.right_scales(stage), full,
               panels ? tile.n : tile.group * params.right_rows + tile.n, panels ? tile.panel + block : block);
    }
  }
};

// The first K-blocks of a tile, one for each stage: all but the left operands of borrowed stages at once, and these
// when TMA has read the last tile's results from there. Returns the number of the next K-block.
template <class Config>
__device__ __forceinline__ int load_around_borrowed(const BlockLoads<Config>& loads, GemmPipeline<Config>& pipeline,
                                                    uint32_t number) {
  const int first = pipeline.next_stage(), count = min(loads.tile.k_blocks, Config::STAGES);
#pragma unroll 1
  for (int block = 0; block < count; ++block) {
    int stage;
    pipeline.producer_acquire(stage, Config::STAGE_BYTES);
    loads.right(block, stage);
    if (block < Config::FIRST_BORROWED) loads.left(block, stage);
    loads.scales(block, stage);
  }
  pipeline.wait_tile_released(number);
#pragma unroll 1
  for (int block = Config::FIRST_BORROWED; block < count; ++block) loads.left(block, (first + block) % Config::STAGES);
  return count;
}

template <class Config>
__device__ void producer(const GemmParams& params, GemmPipeline<Config>& pipeline) {
  GemmSchedule<Config> schedule(params);
  const bool elected = threadIdx.x % 32 == 0, adds = Addends<Config>::used(params);
  // The K-block before which the producer waits for borrowed smem; -1: before none.
  const bool fills_left = Config::GATHERED != Gathered::left;
  const int first_borrowed = fills_left && waits_for_borrowed<Config>(params) ? Config::FIRST_BORROWED : -1;
  uint32_t number = 0;
  for (int32_t index = blockIdx.x;; index += gridDim.x, ++number) {
    const GemmTileAt tile = schedule.at(index);
    pipeline.publish_tile(number, tile);
    if (tile.k_blocks < 0) return;
    if (elected) {
      const BlockLoads<Config> loads = {params, tile, pipeline};
      int block = 0;
      if constexpr (Config::STORE_WARPS) {
        if (params.store_warps && !adds) block = load_around_borrowed(loads, pipeline, number);
      }
#pragma unroll 1  // unrolled, coordinates leave the uniform registers
      for (; block < tile.k_blocks; ++block) {
        if (block == first_borrowed) pipeline.wait_tile_released(number);
        int stage;
        pipeline.producer_acquire(stage, Config::STAGE_BYTES);
        loads.left(block, stage);
        loads.right(block, stage);
        loads.scales(block, stage);
      }
      if (tile.k_blocks <= first_borrowed) pipeline.wait_tile_released(number);
      if (adds && tile.k_blocks > 0) Addends<Config>::load(params, tile, pipeline);
    }
    __syncwarp();  // a lane two tiles behind would wait on a phase parity that has already flipped
  }
}

}  // namespace octavo::cuda
