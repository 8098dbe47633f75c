// Scales that apply to whole dot products: of groups, and of rows and columns of the result.
#pragma once

#include "cuda/device/memory.cuh"
#include "params.h"
#include "pipeline.cuh"
#include "schedule.cuh"

namespace octavo::cuda {

// A barrier among the threads of this warpgroup.
__device__ __forceinline__ void warpgroup_sync() {
  asm volatile("bar.sync %0, %1;" ::"r"(threadIdx.x / WARPGROUP_THREADS), "n"(WARPGROUP_THREADS) : "memory");
}

// The factors of a tile's results apart from block scales: loaded before the mainloop, used after it.
template <class Config>
class GemmFactors {
 public:
  __device__ GemmFactors(const GemmParams& params, const GemmTileAt& tile, int row, GemmPipeline<Config>& pipeline) {
    upper_ = left(params, tile, tile.m + row);
    lower_ = left(params, tile, tile.m + row + 8);
    right_ = params.right_use == Factor::group ? __ldg(params.right_factor + tile.group) : 1.0f;
    if (params.right_use == Factor::column) {
      warpgroup_sync();  // the last tile's factors have been read
      const int last = min(Config::TILE_N, params.width - tile.n);
      const float* const from = params.right_factor + static_cast<int64_t>(tile.group) * params.width + tile.n;
      for (int i = threadIdx.x % WARPGROUP_THREADS; i < last; i += WARPGROUP_THREADS) {
        cp_async<4>(smem_address(pipeline.columns() + i), from + i);
      }
    }
  }

  __device__ static void wait(const GemmParams& params) {
    if (params.right_use != Factor::column) return;
    cp_async_wait_all();
    warpgroup_sync();
  }

  // For the thread's upper and lower row. Multiplied here, because at the load it would have to wait for the data.
  __device__ float upper() const { return upper_ * right_; }
  __device__ float lower() const { return lower_ * right_; }

 private:
  __device__ static float left(const GemmParams& params, const GemmTileAt& tile, int local) {
    switch (params.left_use) {
      case Factor::group: return __ldg(params.left_factor + tile.group);
      case Factor::row: return local < tile.rows ? __ldg(params.left_factor + tile.start + local) : 0.0f;
      case Factor::column:
        return local < params.height
                   ? __ldg(params.left_factor + static_cast<int64_t>(tile.group) * params.height + local)
                   : 0.0f;
      default: return 1.0f;
    }
  }

  float upper_, lower_, right_;
};

}  // namespace octavo::cuda
