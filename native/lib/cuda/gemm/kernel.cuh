// The grouped GEMM kernel: persistent CTAs, each with one producer warp (TMA loads), consumer warpgroups (wgmma)
// and, in launches that use them, a store warp for each warpgroup (TMA stores).
//
//   reads   both operands' codes through L2, each once per tile, and the block scales next to them
//   writes  the result once
//   bound   tensor cores; device memory where groups are small
//
// Rows of tokens that a router chose come by warps beside the producer (gather.cuh).
//
// The producer warp walks the schedule and keeps STAGES K-blocks of TMA loads in flight, across tiles. TMA fills rows
// past a group's end with zeros (tensor_map.h says how the maps achieve this), so groups need no padding and no tensor
// map is edited on the device.
#pragma once

#include "addends.cuh"
#include "common/gemm_tile.h"
#include "epilogue.cuh"
#include "gather.cuh"
#include "mainloop.cuh"
#include "pipeline.cuh"
#include "relay.cuh"

namespace octavo::cuda {

// One kernel. Each consumer warpgroup owns 64 rows of a tile, or half of the columns if the tile has only 64 rows.
template <int M, int N, int STAGE_COUNT, Element L, Element R, bool LT, bool RT, Promotion P,
          Gathered G = Gathered::none>
struct GemmConfig {
  static constexpr int TILE_M = M, TILE_N = N, STAGES = STAGE_COUNT;
  static constexpr int WARPGROUPS = M == 192 ? 3 : 2;  // of consumers
  static constexpr int CONSUMER_WARPS = WARPGROUP_WARPS * WARPGROUPS, THREADS = 128 * (1 + WARPGROUPS);
  static constexpr Element LEFT = L, RIGHT = R;
  static constexpr bool LEFT_TRANSPOSED = LT, RIGHT_TRANSPOSED = RT;
  static constexpr Promotion PROMOTION = P;
  static constexpr Gathered GATHERED = G;
  // Gathered codes come with scales, and promotion has no time for a fence between proxies in each K-block.
  static constexpr bool RELAYED = G != Gathered::none && P != Promotion::none;
  static constexpr bool SPLITS_ROWS = M == 64 * WARPGROUPS;
  static constexpr int COLS = SPLITS_ROWS ? N : N / WARPGROUPS;  // per warpgroup
  // With promotion 128 columns at a time, or 192: wgmma's accumulators take 64 or 96 registers on top of the fp32 sums
  // of all columns.
  static constexpr int PART_COLS = P == Promotion::none || N == 192 ? COLS : 128, PARTS = COLS / PART_COLS;
  // fp32 sums that are added to the result are staged in smem if a whole tile of them fits.
  static constexpr bool STAGED = M == 128 && N == 128;
  static constexpr bool LEFT_SCALES = P >= Promotion::square, RIGHT_SCALES = P == Promotion::vectors;
  // TMA tiles of a bf16 result for which a warp has smem of its own. For the others it borrows the left operand's part
  // of the stages that held the tile's last K-blocks, one stage for each: its warpgroup alone read those rows, and has
  // finished. The next tile begins in the stages behind them, and the first of its K-blocks that needs a borrowed one
  // is FIRST_BORROWED (docs/decisions/0012).
  static constexpr int OUT_TILES = M == 64 ? 0 : RIGHT_SCALES && M == 128 ? 1 : 2;
  static constexpr int BORROWED_TILES = OUT_TILES == 0 ? 0 : COLS / 64 - OUT_TILES;
  static constexpr int FIRST_BORROWED = STAGES - BORROWED_TILES;
  // Whether a launch may have store warps that wait, in place of the consumers, until TMA has read a bf16 result from
  // smem. Not in bf16's wgrad: it would gain with few tokens per group, and take 1.01 of the time with more only
  // because the code is there.
  static constexpr bool STORE_WARPS =
      G == Gathered::none && M == 128 && N == 256 && (P != Promotion::none || (L == Element::bf16 && !LT));
  // Registers per thread after setmaxnreg. The launch divides 65,536 evenly, in multiples of 8: 168 for each of 384
  // threads, 128 of 512. Consumers can take no more than the producer's warpgroup gives up, which needs more where its
  // warps gather and hold addresses.
  static constexpr int PRODUCER_REGISTERS = G == Gathered::none ? 56 : 72;
  static constexpr int CONSUMER_REGISTERS = WARPGROUPS == 3 ? 152 : G == Gathered::none ? 224 : 216;
  static_assert(128 * (PRODUCER_REGISTERS + WARPGROUPS * CONSUMER_REGISTERS) <= 65536 / THREADS / 8 * 8 * THREADS);
  static constexpr int K_ELEMENTS = SWIZZLE_BYTES / (L <= Element::e5m2 ? 1 : 2);  // per K-block
  // In a tile of more K-blocks L2 would evict the prefetched result before the epilogue needs it.
  static constexpr int PREFETCH_BLOCKS = (N == 256 ? 1024 : 512) / K_ELEMENTS;
  // Bytes that TMA loads into a stage, for which its full barrier waits.
  static constexpr uint32_t STAGE_BYTES =
      ((G == Gathered::left ? 0 : M) + (G == Gathered::right ? 0 : N)) * SWIZZLE_BYTES +
      (LEFT_SCALES && G != Gathered::left ? 4 * (M + SCALE_TILE_EXTRA) : 0) + (RIGHT_SCALES ? 4 * N : 0);
  // Epilogues that no launch requests from this kernel are not compiled: only FP8 with row scaling has column factors,
  // and wgrad alone adds, whose operands lie alike.
  static constexpr bool COLUMNS = L <= Element::e5m2 && P <= Promotion::plain;
  static constexpr bool ADDS = LT == RT && !RELAYED;
  static constexpr bool ADDS_IN_PLACE = ADDS && M != 64 && !STAGED;
  // Tiles of 192 rows or columns are for wgrad with a scale per column.
  static constexpr bool K_GROUPED = M == 192 || N == 192;
  static_assert(!K_GROUPED || P == Promotion::vectors);
  static_assert(P == Promotion::none || (L <= Element::e5m2 && R <= Element::e5m2));
  static_assert(M == 64 || SPLITS_ROWS);
  static_assert(G == Gathered::none || P == Promotion::none || (G == Gathered::left && P == Promotion::square),
                "codes of tokens are gathered with scales of blocks along rows");
};

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

// The epilogue of one tile: picks the compiled variant that the launch asks for.
template <class Config>
struct GemmEpilogue {
  const GemmParams& params;
  const GemmTileAt& tile;
  const GemmMainloop<Config>& mainloop;
  const GemmFactors<Config>& factors;
  GemmPipeline<Config>& pipeline;

  template <Finish F, DType D>
  __device__ __forceinline__ void store(typename GemmMainloop<Config>::Sums& sums) const {
#pragma unroll
    for (int part = 0; part < Config::PARTS; ++part) {
      GemmStore(params, tile, mainloop.row(), mainloop.col(part))
          .template store<F, D>(sums[part], factors.upper(), factors.lower(), pipeline.columns() + mainloop.col(part));
    }
  }

  template <Finish F>
  __device__ __forceinline__ void store_bf16(typename GemmMainloop<Config>::Sums& sums) const {
    if constexpr (Config::OUT_TILES == 0) {
      store<F, DType::bf16>(sums);
    } else {
      stage_tiles<Config, F>(params, tile, factors, pipeline, sums);
    }
  }

  __device__ __forceinline__ void add(typename GemmMainloop<Config>::Sums& sums) const {
    if constexpr (Config::STAGED) {
      reduce_add_rows<Config>(params, tile, mainloop.row(), factors.upper(), factors.lower(), pipeline, sums[0]);
    } else if constexpr (Config::ADDS_IN_PLACE) {
      Addends<Config>::add(factors, pipeline, sums);
    } else {
      store<Finish::adds, DType::f32>(sums);
    }
  }

  __device__ __forceinline__ void run(typename GemmMainloop<Config>::Sums& sums) const {
    const bool bf16 = params.out_dtype == DType::bf16, f32 = params.out_dtype == DType::f32;
    if (params.finish == Finish::plain && bf16) {
      store_bf16<Finish::plain>(sums);
    } else if (Config::COLUMNS && params.finish == Finish::columns && bf16) {
      if constexpr (Config::COLUMNS) store_bf16<Finish::columns>(sums);
    } else if (Config::ADDS && params.finish == Finish::adds) {
      if constexpr (Config::ADDS) add(sums);
    } else if (params.finish == Finish::plain && f32) {
      store<Finish::plain, DType::f32>(sums);
    } else if (f32) {
      store<Finish::general, DType::f32>(sums);
    } else {
      store<Finish::general, DType::bf16>(sums);
    }
  }
};

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
      store_tiles<Config>(params, tile, tile.m + 64 * warpgroup, WARPGROUP_WARPS * warpgroup, pipeline);
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
  if (threadIdx.x < 128) {
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
