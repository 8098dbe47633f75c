// The mainloop of one tile: wgmma over its K-blocks, accumulated in the registers of a warpgroup.
#pragma once

#include "config.cuh"
#include "cuda/device/wgmma.cuh"
#include "pipeline.cuh"

namespace octavo::cuda {

// A warpgroup's sums: PARTS of 64 rows x PART_COLS columns side by side, PART_COLS / 2 sums per thread and part. In a
// part thread t of the warpgroup holds, for each j < PART_COLS / 8, at 4 j and 4 j + 1 the row 16 (t / 32) + t % 32 /
// 4, columns 8 j + 2 (t % 4) and the next; at 4 j + 2 and 4 j + 3 the same columns 8 rows below.
template <class Config>
class GemmMainloop {
 public:
  using Sums = float[Config::PARTS][Config::PART_COLS / 2];

  __device__ GemmMainloop(const GemmParams& params, GemmPipeline<Config>& pipeline)
      : params_(params), pipeline_(pipeline) {
    // The shuffle tells the compiler that the value is uniform across the warp.
    const int warpgroup = __shfl_sync(0xFFFFFFFFu, static_cast<int>(threadIdx.x) / WARPGROUP_THREADS - 1, 0);
    row_ = Config::SPLITS_ROWS ? warpgroup * WARPGROUP_ROWS : 0;
    col_ = Config::SPLITS_ROWS ? 0 : warpgroup * Config::COLS;
    left_ = matrix_descriptor(pipeline.left(0) + row_ * SWIZZLE_BYTES);
    right_ = matrix_descriptor(pipeline.right(0) + col_ * SWIZZLE_BYTES);
  }

  // The row of the thread's first sum within the tile, and the first column of a part.
  __device__ int row() const {
    return row_ + static_cast<int>(threadIdx.x % WARPGROUP_THREADS / 32 * WARP_ROWS + threadIdx.x % 32 / 4);
  }
  __device__ int col(int part) const { return col_ + part * Config::PART_COLS; }

  __device__ void run(const GemmTileAt& tile, Sums& sums) {
    if constexpr (Config::PROMOTION == Promotion::none) {
      run_fast(tile.k_blocks, sums);
    } else {
      run_promoted(tile, sums);
    }
  }

 private:
  static constexpr Element L = Config::LEFT, R = Config::RIGHT;
  static constexpr bool LT = Config::LEFT_TRANSPOSED, RT = Config::RIGHT_TRANSPOSED;
  static constexpr int PARTS = Config::PARTS, STEPS = 4;  // wgmmas per K-block
  static constexpr int SUMS = Config::PART_COLS / 2;      // of a thread and part
  // 32 bytes along K, or 16 rows of a transposed TMA tile
  static constexpr int LEFT_STEP = LT ? 16 * SWIZZLE_BYTES : 32, RIGHT_STEP = RT ? 16 * SWIZZLE_BYTES : 32;

  // Scales that TMA loads start at a multiple of four rows.
  static constexpr bool SHIFTED = Config::GATHERED != Gathered::left;

  static constexpr int LEFT_BYTES = Config::TILE_M * SWIZZLE_BYTES, RIGHT_BYTES = Config::TILE_N * SWIZZLE_BYTES;

  // This warpgroup's operands in a stage.
  struct Operands {
    uint64_t left, right;
  };

  __device__ __forceinline__ Operands operands(int stage) const {
    return {advanced(left_, stage * LEFT_BYTES), advanced(right_, stage * RIGHT_BYTES)};
  }

  __device__ __forceinline__ void multiply(float (&sums)[Config::PART_COLS / 2], const Operands& from, int part,
                                           bool adds) const {
    const uint64_t right = advanced(from.right, part * Config::PART_COLS * SWIZZLE_BYTES);
#pragma unroll
    for (int step = 0; step < STEPS; ++step) {
      wgmma<L, R, LT, RT>(sums, advanced(from.left, step * LEFT_STEP), advanced(right, step * RIGHT_STEP),
                          adds || step > 0);
    }
  }

  __device__ int multiply_all(Sums& sums, bool adds) {
    const int stage = pipeline_.consumer_wait();
    // cp.async writes smem in the generic proxy, and wgmma reads it in the async one
    if constexpr (Config::GATHERED != Gathered::none && !Config::RELAYED) fence_proxy_async();
    wgmma_fence();
#pragma unroll
    for (int part = 0; part < PARTS; ++part) multiply(sums[part], operands(stage), part, adds);
    wgmma_commit_group();
    return stage;
  }

  // Accumulators in flight across the loop back-edge make ptxas serialise every wgmma (C7514).
  __device__ void run_fast(int k_blocks, Sums& sums) {
    constexpr int UNROLL = 4;
    int block = 0;
    for (; block + UNROLL <= k_blocks; block += UNROLL) {
      int last = 0;
#pragma unroll
      for (int i = 0; i < UNROLL; ++i) {
        const int stage = multiply_all(sums, block + i > 0);
        if (i > 0) {
          wgmma_wait_group<1>();
          pipeline_.consumer_release(last);
        }
        last = stage;
      }
      wgmma_wait_group<0>();
      pipeline_.consumer_release(last);
    }
    for (; block < k_blocks; ++block) {
      const int stage = multiply_all(sums, block > 0);
      wgmma_wait_group<0>();
      pipeline_.consumer_release(stage);
    }
#pragma unroll
    for (int part = 0; part < PARTS; ++part) wgmma_fence_operands(sums[part]);
  }

  // What the next K-block starts from, computed while the tensor cores still work on the last one.
  struct Ahead {
    Operands from;
    bool full;
  };

  // Advances step by step: the compiler would move a multiplication by the stage to the start of the K-block.
  __device__ __forceinline__ void look_ahead(Ahead& ahead) const {
    const bool first = pipeline_.next_stage() == 0;
    ahead.from.left = first ? left_ : advanced(ahead.from.left, LEFT_BYTES);
    ahead.from.right = first ? right_ : advanced(ahead.from.right, RIGHT_BYTES);
    ahead.full = pipeline_.consumer_try_wait();
  }

  // One part after the other: wgmma's accumulators of one part take 64 or 96 registers on top of the fp32 sums of all.
  // The other warpgroups' wgmmas run while this one promotes: with two of them and parts of 128 columns, each cycle
  // above 256 between the end of one part's wgmmas and the start of the next part's leaves the tensor cores idle.
  __device__ void run_promoted(const GemmTileAt& tile, Sums& sums) {
#pragma unroll
    for (int part = 0; part < PARTS; ++part) {
#pragma unroll
      for (int i = 0; i < SUMS; ++i) sums[part][i] = 0.0f;
    }
    const int k_blocks = tile.k_blocks;
    const int scale = row() + (SHIFTED && params_.left_walk == OperandWalk::rows ? tile.start % SCALE_TILE_EXTRA : 0);
    Ahead ahead = {operands(pipeline_.next_stage()), false};
    if constexpr (Config::PROMOTION != Promotion::square) {
      for (int block = 0; block < k_blocks; ++block) add_block(scale, nullptr, 0, ahead, sums);
    } else {
      // Each lane holds the scale of one of 32 K-blocks and prefetches that of the next 32.
      float squares[PARTS], next[PARTS];
      load_squares(tile, 0, next);
      for (int first = 0; first < k_blocks; first += 32) {
#pragma unroll
        for (int part = 0; part < PARTS; ++part) squares[part] = next[part];
        load_squares(tile, first + 32, next);
        const int here = min(k_blocks - first, 32);
        for (int block = 0; block < here; ++block) add_block(scale, squares, block, ahead, sums);
      }
    }
  }

  // One K-block: multiplies, scales and adds. `scale`: index of this thread's row among the left scales. `squares`: one
  // scale per part, of the K-block with the lane's number.
  __device__ __forceinline__ void add_block(int scale, const float* squares, int block, Ahead& ahead, Sums& sums) {
    const int stage = pipeline_.consumer_wait(ahead.full);
#pragma unroll
    for (int part = 0; part < PARTS; ++part) {
      float upper = 1.0f, lower = 1.0f, square = 1.0f;
      if constexpr (Config::PROMOTION >= Promotion::square) {
        upper = pipeline_.left_scales(stage)[scale];
        lower = pipeline_.left_scales(stage)[scale + 8];
      }
      if constexpr (Config::PROMOTION == Promotion::square) square = __shfl_sync(0xFFFFFFFFu, squares[part], block);
      float products[SUMS];
      wgmma_fence_operands(products);
      wgmma_fence();
      multiply(products, ahead.from, part, false);
      wgmma_commit_group();
      if (part == PARTS - 1) look_ahead(ahead);
      wgmma_wait_group<0>();
      wgmma_fence_operands(products);
      if (Config::PROMOTION != Promotion::vectors && part == PARTS - 1) pipeline_.consumer_release(stage);
      if constexpr (Config::PROMOTION == Promotion::vectors) {
        add_scaled(products, sums[part], upper, lower, pipeline_.right_scales(stage) + col(part));
      } else {
        add(products, sums[part], upper, lower, square);
      }
    }
    if constexpr (Config::PROMOTION == Promotion::vectors) pipeline_.consumer_release(stage);
  }

  // This lane's share of the scales of 32 K-blocks from `first` on; past the last K-block, the last one's.
  __device__ void load_squares(const GemmTileAt& tile, int first, float (&squares)[PARTS]) const {
    const int block = min(first + static_cast<int>(threadIdx.x % 32), tile.k_blocks - 1);
#pragma unroll
    for (int part = 0; part < PARTS; ++part) {
      squares[part] = __ldg(params_.square + square_at(tile, col(part)) + block * params_.square_k);
    }
  }

  // Index of the first scale of 128 columns. Columns past the matrix take the last one; their results are not stored.
  __device__ int32_t square_at(const GemmTileAt& tile, int col) const {
    const int32_t first = params_.k_grouped ? tile.panel * params_.square_k : tile.group * params_.square_group;
    return first + min(tile.n + col, params_.width - 1) / 128 * params_.square_column;
  }

  __device__ static void add(const float (&products)[64], float (&sums)[64], float upper, float lower, float square) {
    if constexpr (Config::PROMOTION == Promotion::plain) {
#pragma unroll
      for (int i = 0; i < 64; ++i) sums[i] += products[i];
    } else {
      const float above = upper * square, below = lower * square;
#pragma unroll
      for (int i = 0; i < 64; ++i) sums[i] = fmaf(products[i], i % 4 < 2 ? above : below, sums[i]);
    }
  }

  __device__ static void add_scaled(const float (&products)[SUMS], float (&sums)[SUMS], float upper, float lower,
                                    const float* scales) {
    scales += threadIdx.x % 4 * 2;
#pragma unroll
    for (int j = 0; j < SUMS / 4; ++j) {
      const float2 column = *reinterpret_cast<const float2*>(scales + 8 * j);
      sums[4 * j] = fmaf(products[4 * j], upper * column.x, sums[4 * j]);
      sums[4 * j + 1] = fmaf(products[4 * j + 1], upper * column.y, sums[4 * j + 1]);
      sums[4 * j + 2] = fmaf(products[4 * j + 2], lower * column.x, sums[4 * j + 2]);
      sums[4 * j + 3] = fmaf(products[4 * j + 3], lower * column.y, sums[4 * j + 3]);
    }
  }

  const GemmParams& params_;
  GemmPipeline<Config>& pipeline_;
  int row_, col_;
  uint64_t left_, right_;  // smem matrix descriptors of this warpgroup's operands in the first stage
};

}  // namespace octavo::cuda
