// Results staged in smem, from where TMA and bulk copies bring them to device memory while the next tile's mainloop
// runs.
#pragma once

#include "cuda/device/values.cuh"
#include "factors.cuh"
#include "mainloop.cuh"
#include "pipeline.cuh"

namespace octavo::cuda {

// stmatrix.x4: stores four 8 x 8 matrices of 16-bit values, of which each lane holds one word per matrix. Lane l gives
// the address of row l % 8 of matrix l / 8.
__device__ __forceinline__ void stmatrix(void* row, const uint32_t (&words)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(smem_address(row)),
               "r"(words[0]), "r"(words[1]), "r"(words[2]), "r"(words[3])
               : "memory");
}

// Adds a tile of fp32 sums to the result by bulk reduce-adds from smem, which run during the next tile's mainloop: 64 x
// 128 sums per warpgroup, one bulk copy per row.
template <class Config, int N>
__device__ __forceinline__ void reduce_add_rows(const GemmParams& params, const GemmTileAt& tile, int row, float upper,
                                                float lower, const GemmPipeline<Config>& pipeline, float (&sums)[N]) {
  static_assert(N == 64 && Config::SPLITS_ROWS);
  const int thread = threadIdx.x % WARPGROUP_THREADS, col = threadIdx.x % 4 * 2;
  // The threads that issued the last tile's bulk copies wait until those have read smem.
  bulk_wait_group_read<0>();
  warpgroup_sync();
#pragma unroll
  for (int j = 0; j < 16; ++j) {
    *reinterpret_cast<float2*>(pipeline.staged(row) + 8 * j + col) = {sums[4 * j] * upper, sums[4 * j + 1] * upper};
    *reinterpret_cast<float2*>(pipeline.staged(row + 8) + 8 * j + col) = {sums[4 * j + 2] * lower,
                                                                          sums[4 * j + 3] * lower};
  }
  fence_proxy_async();
  warpgroup_sync();
  const int own = (threadIdx.x / WARPGROUP_THREADS - 1) * WARPGROUP_ROWS + thread, at = tile.m + own;
  if (thread < WARPGROUP_ROWS && at < params.height) {
    float* const into =
        static_cast<float*>(params.out) + tile.group * params.out_group_stride + at * params.out_row_stride + tile.n;
    const int bytes = min(Config::TILE_N, params.width - tile.n) * 4;
    asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(into),
                 "r"(smem_address(pipeline.staged(own))), "r"(bytes)
                 : "memory");
  }
  bulk_commit_group();
}

// Has TMA store rows of a tile that have been staged in smem: the 16 of `warp`, from `row` on, or all 64 of the
// warpgroup of which it is the first. Borrowed smem is stored first and as a bulk group of its own, so that it can be
// waited for alone. TMA clips rows past the group's end and columns past the result's.
template <class Config>
__device__ __forceinline__ void store_tiles(const GemmParams& params, const GemmTileAt& tile, int32_t row, int warp,
                                            const GemmPipeline<Config>& pipeline) {
  const int32_t col = tile.n, group = tile.group, rows = tile.rows, end = tile.start + rows;
#pragma unroll
  for (int piece = Config::COLS / OUT_TILE_COLS - 1; piece >= 0; --piece) {
    const uint8_t* const from = pipeline.out_tile(warp, piece);
    if (params.k_grouped) {
      tma_store(params.out_map, from, col + OUT_TILE_COLS * piece, row, group);
    } else {
      tma_store(params.out_map, from, col + OUT_TILE_COLS * piece, RAGGED_ROWS - rows + row, end, RAGGED_ROWS);
    }
    if (piece == Config::OUT_TILES || piece == 0) bulk_commit_group();
  }
}

// Stages a warp's 16 rows of a tile in smem, in TMA tiles of 64 columns, which are stored during the next tile's
// mainloop.
template <class Config, Finish F>
__device__ __forceinline__ void stage_tiles(const GemmParams& params, const GemmTileAt& tile,
                                            const GemmFactors<Config>& factors, GemmPipeline<Config>& pipeline,
                                            typename GemmMainloop<Config>::Sums& sums) {
  constexpr int TILES = Config::COLS / OUT_TILE_COLS, EACH = TILES / Config::PARTS;  // TMA tiles, and those of a part
  const int lane = threadIdx.x % 32,
            warp = __shfl_sync(0xFFFFFFFFu, static_cast<int>(threadIdx.x) / 32 - WARPGROUP_WARPS, 0);
  const float upper = factors.upper(), lower = factors.lower();
  const bool store_warps = Config::STORE_WARPS && params.store_warps;
  // All loaded before the first store to smem: nvcc moves no load above a store that it might alias.
  float2 columns[F == Finish::columns ? 8 * TILES : 1];
  if constexpr (F == Finish::columns) {
#pragma unroll
    for (int i = 0; i < 8 * TILES; ++i) {
      columns[i] = *reinterpret_cast<const float2*>(pipeline.columns() + 8 * i + lane % 4 * 2);
    }
  }
  if (store_warps) {
    pipeline.results_acquire();
  } else if (lane == 0) {
    bulk_wait_group_read<0>();  // the last tile's TMA stores have read smem
  }
  warpgroup_sync();  // and every warp has read the last stages
#pragma unroll
  for (int piece = 0; piece < TILES; ++piece) {
    uint8_t* const staged = pipeline.out_tile(warp, piece) + lane % WARP_ROWS * SWIZZLE_BYTES;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      uint32_t words[4];
#pragma unroll
      for (int w = 0; w < 4; ++w) {
        const float* const two = sums[piece / EACH] + 32 * (piece % EACH) + 8 * j + 2 * w;
        float left = two[0] * (w % 2 ? lower : upper), right = two[1] * (w % 2 ? lower : upper);
        if constexpr (F == Finish::columns) {
          left *= columns[8 * piece + 2 * j + w / 2].x;
          right *= columns[8 * piece + 2 * j + w / 2].y;
        }
        words[w] = round_pair<DType::bf16>(left, right, false);
      }
      stmatrix(staged + ((2 * j + lane / 16) ^ lane % 8) * 16, words);
    }
  }
  fence_proxy_async();
  __syncwarp();
  if (lane != 0) return;
  if (store_warps) {
    pipeline.results_publish();
  } else {
    store_tiles<Config>(params, tile, tile.m + WARP_ROWS * warp, warp, pipeline);
  }
}

}  // namespace octavo::cuda
