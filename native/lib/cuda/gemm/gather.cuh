// An operand whose rows stand where a router's tokens do. TMA on Hopper finds no rows by an index, so warps of the
// producer's warpgroup copy them into the stages, 16 bytes a lane (cp.async), in the swizzle that TMA writes: nobody
// else sees a difference. Each lane's copies arrive at the stage's barrier by themselves: the full one, or, of codes,
// one that a relay waits for (relay.cuh).
#pragma once

#include "addends.cuh"
#include "cuda/device/memory.cuh"
#include "pipeline.cuh"

namespace octavo::cuda {

template <class Config>
class RowGather {
 public:
  // `rank`: of the warp among those that gather.
  __device__ RowGather(const GemmParams& params, GemmPipeline<Config>& pipeline, int rank)
      : params_(params), pipeline_(pipeline), lane_(static_cast<int>(threadIdx.x) % 32) {
    first_row_ = rank * ROWS_AT_ONCE + lane_ / LANES;
    const int chunk = lane_ % LANES;
    column_ = chunk * CHUNK / BYTES;
    into_ = smem_address(LEFT ? pipeline.left(0) : pipeline.right(0)) + first_row_ * SWIZZLE_BYTES +
            (chunk ^ first_row_ % 8) * CHUNK;
  }

  __device__ void run() {
    const bool adds = Addends<Config>::used(params_);
    for (uint32_t number = 0;; ++number) {
      const GemmTileAt& tile = pipeline_.wait_tile(number);
      if (tile.k_blocks < 0) break;
      if (tile.k_blocks > 0) {
        gather(tile, number);
        if (adds) pass_addends();
      }
      pipeline_.release_gathered_tile(number);
    }
  }

 private:
  static constexpr bool LEFT = Config::GATHERED == Gathered::left;
  static constexpr bool TRANSPOSED = LEFT ? Config::LEFT_TRANSPOSED : Config::RIGHT_TRANSPOSED;
  static constexpr int BYTES = SWIZZLE_BYTES / Config::K_ELEMENTS;  // of an element
  static constexpr int ROWS = LEFT ? Config::TILE_M : Config::TILE_N;
  // What a K-block has of the operand: boxes of rows of 128 bytes, swizzled. Along K there is one, of the tile's rows;
  // rows along K make one for every 64 columns.
  static constexpr int BOXES = TRANSPOSED ? ROWS / 64 : 1, BOX_ROWS = TRANSPOSED ? 64 : ROWS;
  // Eight lanes copy a row of a box, so a warp copies four at a time, every GATHER_WARPS-th four of them.
  static constexpr int CHUNK = 16, LANES = SWIZZLE_BYTES / CHUNK, ROWS_AT_ONCE = 32 / LANES;
  static constexpr int STEP = ROWS_AT_ONCE * GATHER_WARPS, COPIES = BOX_ROWS / STEP;
  static constexpr int FINDS = BOX_ROWS / 32;  // rows of a box that a lane looks up
  static constexpr int32_t NOWHERE = -1;
  // As the producer's: the first K-block whose stage the last tile's results borrowed.
  static constexpr int FIRST_BORROWED = Config::STAGES - Config::BORROWED_TILES;
  static_assert(Config::GATHERED != Gathered::right || TRANSPOSED, "weights have no tokens");
  static_assert(STEP % 8 == 0, "rows of one lane are swizzled alike");

  // Where this lane copies from: its chunk of each of its rows, and a bit for each row that is somewhere. `whole`: all
  // rows of the warp are.
  struct Sources {
    const uint8_t* at[COPIES];
    uint32_t present;
    bool whole;
  };

  __device__ __forceinline__ void gather(const GemmTileAt& tile, uint32_t number) {
    const bool borrowed = LEFT && Config::BORROWED_TILES > 0 && params_.out_by_tma && !params_.store_warps;
    const int k_blocks = tile.k_blocks, first = TRANSPOSED ? LEFT ? tile.m : tile.n : 0;
    const int32_t start = TRANSPOSED ? tile.start : tile.start + tile.m;
    int32_t rows = TRANSPOSED ? tile.rows : tile.rows - tile.m;
    int columns = params_.token_cols - first;  // from the K-block's first one on
    const uint8_t* from = params_.tokens + int64_t{BYTES} * (first + column_);
    asm volatile("" : "+l"(from));  // one addition to it for each row, and not two
    int64_t choices[FINDS];
    Sources sources;
    find(start, rows, choices);
    if constexpr (!TRANSPOSED) aim(choices, rows, from, sources);
#pragma unroll 1
    for (int block = 0; block < k_blocks; ++block) {
      if constexpr (TRANSPOSED) {
        aim(choices, rows, from, sources);
        // of the next K-block, whose numbers arrive while this one's rows are copied
        rows -= BOX_ROWS;
        find(start + BOX_ROWS * (block + 1), rows, choices);
      }
      if (borrowed && block == FIRST_BORROWED) pipeline_.wait_tile_released(number);
      const int stage = pipeline_.gather_acquire();
      const uint32_t into = into_ + stage * (ROWS * SWIZZLE_BYTES);
      if (sources.whole && columns >= Config::K_ELEMENTS * BOXES) {
        copy<true>(sources, columns, into);
      } else {
        copy<false>(sources, columns, into);
      }
      mbarrier_arrive_after_copies(pipeline_.copied_barrier(stage));
      if constexpr (!TRANSPOSED) {
        columns -= Config::K_ELEMENTS;
#pragma unroll
        for (int i = 0; i < COPIES; ++i) sources.at[i] += SWIZZLE_BYTES;
      }
    }
    if (borrowed && k_blocks <= FIRST_BORROWED) pipeline_.wait_tile_released(number);
  }

  // The choices of rows lane, lane + 32, ... of `count` from `row` on; past them, the last one's.
  __device__ __forceinline__ void find(int32_t row, int32_t count, int64_t (&choices)[FINDS]) const {
#pragma unroll
    for (int i = 0; i < FINDS; ++i) choices[i] = __ldg(params_.rows_at.of_rows + row + min(lane_ + 32 * i, count - 1));
  }

  // The rows that this lane copies, of `count`. All at once, ahead of the copies: none of these waits for an address.
  __device__ __forceinline__ void aim(const int64_t (&choices)[FINDS], int32_t count, const uint8_t* from,
                                      Sources& sources) const {
    int32_t found[FINDS];
    bool whole = true;
#pragma unroll
    for (int i = 0; i < FINDS; ++i) {
      found[i] = lane_ + 32 * i < count ? params_.rows_at.token_of(choices[i]) : NOWHERE;
      whole &= found[i] != NOWHERE;
    }
    sources.whole = __all_sync(0xFFFFFFFFu, whole);
    sources.present = 0;
#pragma unroll
    for (int i = 0; i < COPIES; ++i) {
      const int32_t token = __shfl_sync(0xFFFFFFFFu, found[i * STEP / 32], first_row_ + i * STEP % 32);
      if (token != NOWHERE) sources.present |= 1u << i;
      sources.at[i] = from + uint64_t{static_cast<uint32_t>(token)} * params_.token_bytes;  // not read where nowhere
    }
  }

  // All boxes of a K-block, of which the tokens have so many `columns` more. `into`: the lane's chunk of its first row.
  template <bool WHOLE>
  __device__ __forceinline__ void copy(const Sources& sources, int columns, uint32_t into) const {
#pragma unroll
    for (int i = 0; i < COPIES; ++i) {
      const uint32_t to = into + i * STEP * SWIZZLE_BYTES;
#pragma unroll
      for (int box = 0; box < BOXES; ++box) {
        const bool present = WHOLE || ((sources.present >> i & 1) && columns - column_ > Config::K_ELEMENTS * box);
        copy_async_or_zeros(to + box * BLOCK_BYTES, sources.at[i] + box * SWIZZLE_BYTES, present);
      }
    }
  }

  // The stages that a tile's part of the result passes, of which nothing is gathered.
  __device__ void pass_addends() {
#pragma unroll 1
    for (int i = 0; i < Addends<Config>::STAGES; ++i)
      mbarrier_arrive(pipeline_.full_barrier(pipeline_.gather_acquire()));
  }

  const GemmParams& params_;
  GemmPipeline<Config>& pipeline_;
  const int lane_;
  int first_row_, column_;  // of a box, that this lane copies
  uint32_t into_;           // where in the first stage
};

}  // namespace octavo::cuda
