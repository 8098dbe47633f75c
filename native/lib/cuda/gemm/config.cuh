// What one GEMM kernel is compiled for, and what follows from it: who owns which part of a tile, what a stage holds,
// how registers and smem are divided.
#pragma once

#include "cuda/device/wgmma.cuh"
#include "params.h"

namespace octavo::cuda {

// When a warpgroup promotes wgmma's accumulators to its own fp32 sums, and by what they are scaled.
enum class Promotion : int32_t {
  none = 0,     // never: 16-bit operands, fast accumulation
  plain = 1,    // every K-block of 128
  square = 2,   // with one scale per row of the left and one per 128 x 128 block of the right operand
  vectors = 3,  // with one scale per row of the left and one per column of the right operand
};

// A CTA's first warpgroup is the producer's; consumers number theirs from the second one on.
constexpr int WARPGROUP_WARPS = 4;
constexpr int WARPGROUP_THREADS = 32 * WARPGROUP_WARPS;

// Rows of a wgmma's result: of the whole warpgroup, and of each of its warps.
constexpr int WARPGROUP_ROWS = 64;
constexpr int WARP_ROWS = WARPGROUP_ROWS / WARPGROUP_WARPS;

// Columns of the TMA tiles by which bf16 results are stored.
constexpr int OUT_TILE_COLS = SWIZZLE_BYTES / 2;

// A stage's row scales, fp32: a TMA load starts at 16 bytes, so that it begins up to three scales before the tile's
// first row and has four more than the tile has rows. In smem it begins at 128 bytes, to which a stage's room is
// rounded up.
constexpr int SCALE_TILE_EXTRA = 16 / sizeof(float), SCALE_ROOM_EXTRA = 128 / sizeof(float);

// One kernel. Each consumer warpgroup owns 64 rows of a tile, or half of the columns if the tile has only 64 rows.
template <int M, int N, int STAGE_COUNT, Element L, Element R, bool LT, bool RT, Promotion P,
          Gathered G = Gathered::none>
struct GemmConfig {
  static constexpr int TILE_M = M, TILE_N = N, STAGES = STAGE_COUNT;
  static constexpr int WARPGROUPS = M == 192 ? 3 : 2;  // of consumers
  static constexpr int CONSUMER_WARPS = WARPGROUP_WARPS * WARPGROUPS, THREADS = WARPGROUP_THREADS * (1 + WARPGROUPS);
  static constexpr Element LEFT = L, RIGHT = R;
  static constexpr bool LEFT_TRANSPOSED = LT, RIGHT_TRANSPOSED = RT;
  static constexpr Promotion PROMOTION = P;
  static constexpr Gathered GATHERED = G;
  // Gathered codes come with scales, and promotion has no time for a fence between proxies in each K-block.
  static constexpr bool RELAYED = G != Gathered::none && P != Promotion::none;
  static constexpr bool SPLITS_ROWS = M == WARPGROUP_ROWS * WARPGROUPS;
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
  static constexpr int BORROWED_TILES = OUT_TILES == 0 ? 0 : COLS / OUT_TILE_COLS - OUT_TILES;
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
  static_assert(WARPGROUP_THREADS * (PRODUCER_REGISTERS + WARPGROUPS * CONSUMER_REGISTERS) <=
                65536 / THREADS / 8 * 8 * THREADS);
  static constexpr int K_ELEMENTS = SWIZZLE_BYTES / (L <= Element::e5m2 ? 1 : 2);  // per K-block
  // In a tile of more K-blocks an H200's L2 evicts the prefetched result before the epilogue needs it (measured).
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

}  // namespace octavo::cuda
