// The grouped GEMM kernel: persistent CTAs, each with one producer warp (TMA loads), consumer warpgroups (wgmma)
// and, in launches that use them, a store warp for each warpgroup (TMA stores).
//
//   reads   both operands' codes through L2, each once per tile, and the block scales next to them
//   writes  the result once
//   bound   tensor cores; device memory where groups are small
//
// A tile's way: schedule.cuh finds it, producer.cuh loads its K-blocks, or gather.cuh those of tokens that a router
// chose; mainloop.cuh multiplies them, and epilogue.cuh scales and stores the sums. pipeline.cuh says who waits for
// whom.
//
// The producer warp walks the schedule and keeps STAGES K-blocks of TMA loads in flight, across tiles. TMA fills rows
// past a group's end with zeros (tensor_map.h says how the maps achieve this), so groups need no padding and no tensor
// map is edited on the device.
#pragma once

#include "addends.cuh"
#include "epilogue.cuh"
#include "gather.cuh"
#include "mainloop.cuh"
#include "pipeline.cuh"
#include "producer.cuh"
#include "relay.cuh"

namespace octavo::cuda {

template <class Config>
__device__ void consumer(const GemmParams& params, GemmPipeline<Config>& pipeline) {
  GemmMainloop<Config> mainloop(params, pipeline);
  for (uint32_t number = 0;; ++number) {
    const GemmTileAt& tile = pipeline.wait_tile(number);
    if (tile.k_blocks < 0) break;
    if (tile.k_blocks > 0) {
      const GemmFactors<Config> factors(params, tile, mainloop.row(), pipeline);
      const bool prefetches = params.accumulate && !Addends<Config>::used(params);
      if (prefetches && tile.k_blocks <= Config::PREFETCH_BLOCKS) GemmStore::prefetch<Config>(params, tile);
      typename GemmMainloop<Config>::Sums sums;
      mainloop.run(tile, sums);
      factors.wait(params);
      GemmEpilogue<Config>{params, tile, mainloop, factors, pipeline}.run(sums);
    } else if (!params.accumulate) {
      GemmStore(params, tile, mainloop.row(), mainloop.col(0)).store_zeros(Config::COLS);
    }
    pipeline.release_tile(number);
  }
  bulk_wait_group();  // pending TMA stores read smem, which ends with the kernel
}

// One thread for each consumer warpgroup, or for both: hands its results to TMA and releases their smem.
template <class Config>
__device__ void storer(const GemmParams& params, GemmPipeline<Config>& pipeline, int warpgroup) {
  const bool adds = Addends<Config>::used(params);
  for (uint32_t number = 0;; ++number) {
    const GemmTileAt& tile = pipeline.wait_tile(number);
    const int k_blocks = tile.k_blocks;
    if (k_blocks < 0) break;
    pipeline.skip(k_blocks);
    if (k_blocks == 0) {
      pipeline.release_stored_tile(number);
    } else if (adds) {
      const int to = store_warps<Config> == 1 ? Config::WARPGROUPS : warpgroup + 1;
      Addends<Config>::store(params, tile, warpgroup, to, pipeline);
      pipeline.release_stored_tile(number);
    } else if constexpr (Config::STORE_WARPS) {
      pipeline.results_wait(warpgroup);
      store_tiles<Config>(params, tile, tile.m + WARPGROUP_ROWS * warpgroup, WARPGROUP_WARPS * warpgroup, pipeline);
      bulk_wait_group_read<1>();  // the borrowed smem, which was committed first
      pipeline.release_stored_tile(number);
      bulk_wait_group_read<0>();
      pipeline.results_release(warpgroup);
    }
  }
  bulk_wait_group();  // pending TMA stores read smem, which ends with the kernel
}

template <class Config>
__global__ void __launch_bounds__(Config::THREADS, 1) gemm_kernel(const __grid_constant__ GemmParams params) {
  extern __shared__ __align__(1024) uint8_t smem_bytes[];
  GemmSmem<Config>& smem = *reinterpret_cast<GemmSmem<Config>*>(smem_bytes);
  if (threadIdx.x == 0) GemmPipeline<Config>::init(smem, params.store_warps);
  __syncthreads();
  GemmPipeline<Config> pipeline(smem);
  if (threadIdx.x < WARPGROUP_THREADS) {
    setmaxnreg_dec<Config::PRODUCER_REGISTERS>();
    const int warp = static_cast<int>(threadIdx.x) / 32;
    if (warp == 0) {
      producer<Config>(params, pipeline);
      return;
    }
    if constexpr (Config::STORE_WARPS || Config::ADDS_IN_PLACE) {
      if (params.store_warps && warp <= store_warps<Config>) {
        if (threadIdx.x % 32 == 0) storer<Config>(params, pipeline, warp - 1);
        return;
      }
    }
    if constexpr (Config::GATHERED != Gathered::none) {
      constexpr int FIRST = WARPGROUP_WARPS - GATHER_WARPS;
      if constexpr (Config::RELAYED) {
        if (warp == FIRST - 1) ScaleRelay<Config>(params, pipeline).run();
      }
      if (warp >= FIRST) RowGather<Config>(params, pipeline, warp - FIRST).run();
    }
  } else {
    setmaxnreg_inc<Config::CONSUMER_REGISTERS>();
    consumer<Config>(params, pipeline);
  }
}

template <class Config>
constexpr size_t gemm_smem_bytes() {
  return sizeof(GemmSmem<Config>);
}

}  // namespace octavo::cuda
