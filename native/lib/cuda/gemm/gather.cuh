// Rows of an operand that are a router's tokens, read where they stand. TMA on Hopper cannot load rows by an index, so
// warps of the producer's warpgroup copy them into the stages, 16 bytes per lane (cp.async), in the swizzle that TMA
// would write: consumers see no difference. Each lane's copies arrive at a barrier of the stage when they have
// completed: at the full one or, where the operand has scales, at one that a relay waits for (relay.cuh).
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
  // A K-block of the operand in smem, as load_operand would have TMA write it: one TMA tile of the tile's rows if
  // tokens lie along K, else one of 64 rows for each 64 columns. A row of it has 128 bytes, swizzled.
  static constexpr int TMA_TILES = TRANSPOSED ? ROWS / 64 : 1, TMA_TILE_ROWS = TRANSPOSED ? 64 : ROWS;
  // Eight lanes copy such a row, so a warp copies four at a time, and the gathering warps take turns.
  static constexpr int CHUNK = 16, LANES = SWIZZLE_BYTES / CHUNK, ROWS_AT_ONCE = 32 / LANES;
  static constexpr int STEP = ROWS_AT_ONCE * GATHER_WARPS, COPIES = TMA_TILE_ROWS / STEP;
  static constexpr int LOOKUPS = TMA_TILE_ROWS / 32;  // rows of a TMA tile whose tokens a lane looks up
  static constexpr int32_t NOWHERE = -1;              // the row has no token and is zeros
  static_assert(Config::GATHERED != Gathered::right || TRANSPOSED, "weights have no tokens");
  static_assert(STEP % 8 == 0, "rows of one lane are swizzled alike");
  static_assert(COPIES <= 32, "Sources::present has a bit for each");

  // What this lane copies: the addresses of its chunk of each of its rows, and a bit for each row that has a token.
  // `whole`: all rows of the TMA tile have one.
  struct Sources {
    const uint8_t* at[COPIES];
    uint32_t present;
    bool whole;
  };

  __device__ __forceinline__ void gather(const GemmTileAt& tile, uint32_t number) {
    const bool borrowed = LEFT && waits_for_borrowed<Config>(params_);
    const int k_blocks = tile.k_blocks, first = TRANSPOSED ? LEFT ? tile.m : tile.n : 0;
    const int32_t start = TRANSPOSED ? tile.start : tile.start + tile.m;
    int32_t rows = TRANSPOSED ? tile.rows : tile.rows - tile.m;
    int columns = params_.token_cols - first;  // from the K-block's first one on
    const uint8_t* from = params_.tokens + int64_t{BYTES} * (first + column_);
    asm volatile("" : "+l"(from));  // opaque: the compiler would add both terms of the sum to each row's offset
    int64_t choices[LOOKUPS];
    Sources sources;
    load_choices(start, rows, choices);
    if constexpr (!TRANSPOSED) set_sources(choices, rows, from, sources);
#pragma unroll 1
    for (int block = 0; block < k_blocks; ++block) {
      if constexpr (TRANSPOSED) {
        set_sources(choices, rows, from, sources);
        // of the next K-block: they arrive while this one's rows are copied
        rows -= TMA_TILE_ROWS;
        load_choices(start + TMA_TILE_ROWS * (block + 1), rows, choices);
      }
      if (borrowed && block == Config::FIRST_BORROWED) pipeline_.wait_tile_released(number);
      const int stage = pipeline_.gather_acquire();
      const uint32_t into = into_ + stage * (ROWS * SWIZZLE_BYTES);
      if (sources.whole && columns >= Config::K_ELEMENTS * TMA_TILES) {
        copy<true>(sources, columns, into);
      } else {
        copy<false>(sources, columns, into);
      }
      cp_async_mbarrier_arrive(pipeline_.copied_barrier(stage));
      if constexpr (!TRANSPOSED) {
        columns -= Config::K_ELEMENTS;
#pragma unroll
        for (int i = 0; i < COPIES; ++i) sources.at[i] += SWIZZLE_BYTES;
      }
    }
    if (borrowed && k_blocks <= Config::FIRST_BORROWED) pipeline_.wait_tile_released(number);
  }

  // The choices of rows lane, lane + 32, ... from `row` on, of which the group has `count`. A lane past the last row
  // loads the last row's, also where `count` is 0 or less: no load leaves the group.
  __device__ __forceinline__ void load_choices(int32_t row, int32_t count, int64_t (&choices)[LOOKUPS]) const {
#pragma unroll
    for (int i = 0; i < LOOKUPS; ++i)
      choices[i] = __ldg(params_.rows_at.of_rows + row + min(lane_ + 32 * i, count - 1));
  }

  // The addresses of all rows that this lane copies, of `count` in the TMA tile, before the first copy, so that no copy
  // waits for its address.
  __device__ __forceinline__ void set_sources(const int64_t (&choices)[LOOKUPS], int32_t count, const uint8_t* from,
                                              Sources& sources) const {
    int32_t tokens[LOOKUPS];
    bool whole = true;
#pragma unroll
    for (int i = 0; i < LOOKUPS; ++i) {
      tokens[i] = lane_ + 32 * i < count ? params_.rows_at.token_of(choices[i]) : NOWHERE;
      whole &= tokens[i] != NOWHERE;
    }
    sources.whole = __all_sync(0xFFFFFFFFu, whole);
    sources.present = 0;
#pragma unroll
    for (int i = 0; i < COPIES; ++i) {
      const int32_t token = __shfl_sync(0xFFFFFFFFu, tokens[i * STEP / 32], first_row_ + i * STEP % 32);
      if (token != NOWHERE) sources.present |= 1u << i;
      sources.at[i] = from + uint64_t{static_cast<uint32_t>(token)} * params_.token_bytes;  // NOWHERE's is not read
    }
  }

  // Copies the lane's chunks of a K-block, to `into` and after. The tokens have `columns` columns from the K-block's
  // first one on. WHOLE: nothing of the K-block is missing.
  template <bool WHOLE>
  __device__ __forceinline__ void copy(const Sources& sources, int columns, uint32_t into) const {
#pragma unroll
    for (int i = 0; i < COPIES; ++i) {
      const uint32_t to = into + i * STEP * SWIZZLE_BYTES;
#pragma unroll
      for (int part = 0; part < TMA_TILES; ++part) {
        const bool present = WHOLE || ((sources.present >> i & 1) && columns - column_ > Config::K_ELEMENTS * part);
        cp_async_or_zeros<true>(to + part * BLOCK_BYTES, sources.at[i] + part * SWIZZLE_BYTES, present);
      }
    }
  }

  // Arrives at the stages that the tile's part of the result passes through (addends.cuh), which are not gathered.
  __device__ void pass_addends() {
#pragma unroll 1
    for (int i = 0; i < Addends<Config>::STAGES; ++i)
      mbarrier_arrive(pipeline_.full_barrier(pipeline_.gather_acquire()));
  }

  const GemmParams& params_;
  GemmPipeline<Config>& pipeline_;
  const int lane_;
  int first_row_, column_;  // of a TMA tile: the first row that this lane copies, and the column of its chunk
  uint32_t into_;           // smem address of that chunk in the first stage
};

}  // namespace octavo::cuda
