// A warp beside those that gather codes. It stores the scales of the rows into the stages, and passes gathered codes on
// to wgmma: cp.async writes smem in the generic proxy and wgmma reads it in the async proxy, so a fence has to stand
// between the two. This warp executes it, so that no consumer waits for it; the copies happen before it because their
// lanes have arrived at the barrier for which it waits.
#pragma once

#include "pipeline.cuh"

namespace octavo::cuda {

template <class Config>
class ScaleRelay {
 public:
  __device__ ScaleRelay(const GemmParams& params, GemmPipeline<Config>& pipeline)
      : params_(params), pipeline_(pipeline), lane_(static_cast<int>(threadIdx.x) % 32) {}

  __device__ void run() {
    for (uint32_t number = 0;; ++number) {
      const GemmTileAt& tile = pipeline_.wait_tile(number);
      if (tile.k_blocks < 0) break;
      if (tile.k_blocks > 0) relay(tile);
      pipeline_.release_gathered_tile(number);
    }
  }

 private:
  static constexpr int ROWS = Config::TILE_M / 32;  // of a tile, whose scales a lane stores
  static constexpr int BLOCKS = 4;                  // K-blocks whose scales of a row are loaded at once
  // The relay waits for a free stage before it passes on the K-block in the stage before.
  static_assert(Config::STAGES >= 2, "a single stage would never be passed on");

  // The scales of BLOCKS K-blocks, of each of the lane's rows; zeros where a row has no token.
  struct Scales {
    float of[ROWS][BLOCKS];
  };

  __device__ __forceinline__ void relay(const GemmTileAt& tile) {
    const int32_t start = tile.start + tile.m, count = tile.rows - tile.m;
    const int k_blocks = tile.k_blocks;
    const float* from[ROWS];
#pragma unroll
    for (int i = 0; i < ROWS; ++i) {
      const int row = lane_ + 32 * i;
      const int32_t token = row < count ? params_.rows_at(start + row) : -1;
      from[i] = token < 0 ? nullptr : params_.token_scales + int64_t{token} * k_blocks;
    }
    Scales next;
    load(from, 0, k_blocks, next);
#pragma unroll 1
    for (int first = 0; first < k_blocks; first += BLOCKS) {
      const Scales scales = next;
      load(from, first + BLOCKS, k_blocks, next);
#pragma unroll
      for (int j = 0; j < BLOCKS; ++j) {
        if (first + j >= k_blocks) break;
        float* const into = pipeline_.left_scales(pipeline_.gather_acquire()) + lane_;
#pragma unroll
        for (int i = 0; i < ROWS; ++i) into[32 * i] = scales.of[i][j];
        if (first + j > 0) pass_on();
      }
    }
    pass_on();
  }

  __device__ __forceinline__ void load(const float* const (&from)[ROWS], int first, int k_blocks,
                                       Scales& scales) const {
#pragma unroll
    for (int i = 0; i < ROWS; ++i) {
      if (k_blocks % BLOCKS == 0) {
        const bool present = from[i] != nullptr && first < k_blocks;
        const float4 four = present ? __ldg(reinterpret_cast<const float4*>(from[i] + first)) : float4{};
        scales.of[i][0] = four.x, scales.of[i][1] = four.y, scales.of[i][2] = four.z, scales.of[i][3] = four.w;
      } else {
#pragma unroll
        for (int j = 0; j < BLOCKS; ++j)
          scales.of[i][j] = from[i] != nullptr && first + j < k_blocks ? __ldg(from[i] + first + j) : 0.0f;
      }
    }
  }

  // Passes the next K-block on to the consumers once its codes have been copied. It is one behind the K-block whose
  // scales are stored, which gives the copies time. Every lane arrives, for each has stored scales.
  __device__ __forceinline__ void pass_on() {
    mbarrier_wait(pipeline_.copied_barrier(copied_.at), copied_.parity);
    fence_proxy_async();
    mbarrier_arrive(pipeline_.full_barrier(copied_.at));
    copied_.next();
  }

  const GemmParams& params_;
  GemmPipeline<Config>& pipeline_;
  const int lane_;
  Ring<Config::STAGES> copied_;
};

}  // namespace octavo::cuda
