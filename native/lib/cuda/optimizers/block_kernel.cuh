// AdamW in one pass over memory, with moments of 8 bits in blocks of 128.
//
//   reads   gradient, codes of moments, master, once
//   writes  codes of moments, master, and the master's values or codes in both planes
//   bound   memory; with bf16 masters and gradients, 10 bytes per element, also instructions: these bytes take as long
//           as some 70 of them
//
// A warp has 16 rows of 128 columns and works on two of them at a time. Half a warp has a row, and with it a block of
// moments; a lane has eight neighbouring columns, and with them a whole Philox counter of each stream. A few tests of
// all eight values find those for which the ordinary instructions are wrong (zeros, infinities, NaN, the very small and
// large), and a branch of its own handles them. LaneRows says how rows come from memory, which depends on dtypes.
#pragma once

#include <cstddef>

#include "codes.cuh"
#include "cuda/device/ptx.cuh"
#include "elements.cuh"
#include "lanes.cuh"

namespace octavo::cuda {

// CTAs at once: as many as the registers of a lane's eight elements allow without spilling.
constexpr int BLOCK_CTAS = 3;

template <class M, class G, Written W>
struct BlockMemory {
  std::conditional_t<W == Written::codes, MasterTile, NoTile> tile;
  typename LaneRows<M, G>::Slots slots[STEP_WARPS];
  RowState<M> states[STEP_WARPS][WARP_ROWS];
  StepFactors factors;
};

// Where a lane stores its row of a MasterTile, and the largest of what it has stored there.
struct Kept {
  uint32_t at, most;
  __device__ void keep_eight(const uint32_t (&halves)[4]) {
    store_shared(at, {halves[0], halves[1], halves[2], halves[3]});
#pragma unroll
    for (const uint32_t pair : halves) most = Pack<BF16>::maximum(most, pair);
  }
};

template <class M, class G, Written W>
__global__ void __launch_bounds__(STEP_THREADS, BLOCK_CTAS) adamw_blocks_kernel(const __grid_constant__ StepArgs args) {
  extern __shared__ __align__(16) uint8_t block_memory[];
  auto& memory = *reinterpret_cast<BlockMemory<M, G, W>*>(block_memory);
  const AdamWArgs& step = args.step;
  const uint32_t thread = threadIdx.x, warp = thread / 32, half = thread % 32 / LANES_OF_ROW;
  const WarpPlace place = warp_place<W>(args, warp);
  const auto cols = static_cast<uint32_t>(step.arrays.cols);
  const uint32_t col = place.across * TILE_SIDE + thread % LANES_OF_ROW * 8;
  // lanes of columns or of a last row that do not exist read others, and write nothing
  const int64_t row = place.first_row + (static_cast<int>(half) < place.rows ? half : 0);
  LaneRows<M, G> rows(step.arrays, row * cols + (col < cols ? col : 0), memory.slots[warp], thread % 32);
  int32_t top = 0;
  if (place.rows > 0) {
    rows.start(args, place.rows - static_cast<int>(half));
    if (static_cast<int>(thread % WARP_ROWS) < place.rows) top = *top_of_lane(args, place, thread % 32);
  }
  if (step.skip && __ldg(step.skip)) {
    rows.drain();
    return;
  }
  const StepFactors factors = shared_factors(memory.factors, step);
  [[maybe_unused]] Kept kept{0, 0};
  if (place.rows > 0) {
    prepare_rows<M>(memory.states[warp], args, factors.number,
                    static_cast<uint32_t>(place.first_row + step.draws.first_row), top);
    Product column = column_part(args.keys, factors.number, col / 8);
    LaneFlags lane(thread, col < cols);
    uint32_t state_at = smem_address(&memory.states[warp][half]);
    keep(state_at), keep(column.high), keep(column.low);
    if constexpr (W == Written::codes) {
      kept.at = smem_address(&memory.tile.eight(static_cast<int>(warp * WARP_ROWS + half), thread % LANES_OF_ROW));
      keep(kept.at);
    }
    int left = place.rows - static_cast<int>(half);  // rows from the lane's on
#pragma unroll 1
    do {
      const bool live = left > 0 && lane.within();
      rows.load_early();
      Words draws[streams_of<M>()];
      {
        RowPart part[streams_of<M>()];
#pragma unroll
        for (int k = 0; k < streams_of<M>(); ++k) {
          const uint4 words = load_shared(state_at + k * static_cast<uint32_t>(sizeof(RowPart)));
          part[k] = {words.x, {words.y, words.z, words.w}};
        }
        eight_draws(draws, args.keys, part, column);
      }
      float grad[8], moment[2][8], master[8];
      {
        const MomentsRead<G> read = rows.moments();
        const int2 tops = load_two_shared(state_at + static_cast<uint32_t>(offsetof(RowState<M>, tops)));
        values_of(grad, read.grad);
        unscale(grad, factors.inverse_scale);
        decode_moments(moment[0], moment[1], read.codes, {tops.x, tops.y});
      }
#pragma unroll
      for (int i = 0; i < 8; ++i) adamw_moments(moment[0][i], moment[1][i], grad[i], factors.scalars);
      rows.load_late();
      const uint32_t largest[2] = {largest_of_row(live ? largest_first(moment[0]) : 0u, lane.lower()),
                                   largest_of_row(live ? largest_second(moment[1]) : 0u, lane.lower())};
      const Encoded made[2] = {encode_first(moment[0], largest[0], draws[0]),
                               encode_second(moment[1], largest[1], draws[1])};
      if (live) {
#pragma unroll
        for (int i = 0; i < 2; ++i) store_global(rows.codes[i], made[i].codes);
      }
      if (lane.first_of_block()) {
        const auto at = state_at + static_cast<uint32_t>(offsetof(RowState<M>, new_tops));
        store_shared(at, int2{made[0].top, made[1].top});
      }
      rows.prefetch_moments(args, left);
      const bool plain = (made[0].rare | made[1].rare | factors.rare) == 0;
      values_of(master, rows.masters());
      uint32_t halves[4];
      if constexpr (std::is_same_v<M, BF16>) {
        step_rounded(halves, master, moment[0], moment[1], draws[2].word, factors, plain);
        if (live) store_eight<BF16>(rows.master, {{halves[0], halves[1], halves[2], halves[3]}});
        if constexpr (W == Written::values) {
          values_of_halves(master, halves);
          nearest_halves(halves, master, step.arrays.values_dtype);
        }
      } else {
        step_masters(master, moment[0], moment[1], factors.scalars, plain);
        Pack<F32> pack;
#pragma unroll
        for (int i = 0; i < 8; ++i) pack.word[i] = bits_of(master[i]);
        if (live) store_eight<F32>(rows.master, pack);
        if constexpr (W != Written::nothing)
          nearest_halves(halves, master, W == Written::codes ? DType::bf16 : step.arrays.values_dtype);
      }
      rows.prefetch_masters(args, left);
      if (live) {
        if constexpr (W == Written::values)
          store_eight<BF16>(rows.values(args), {{halves[0], halves[1], halves[2], halves[3]}});
        if constexpr (W == Written::codes) kept.keep_eight(halves);
      }
      if (left > ROWS_AT_ONCE) rows.advance(args);  // no address beyond the last row is read
      left -= ROWS_AT_ONCE;
      state_at += ROWS_AT_ONCE * static_cast<uint32_t>(sizeof(RowState<M>));
      if constexpr (W == Written::codes) kept.at += ROWS_AT_ONCE * TILE_SIDE * 2;
    } while (lane.upper_of(left) > 0);
    __syncwarp();
    store_tops<W>(memory.states[thread_again() / 32], args);
  }
  if constexpr (W == Written::codes)
    write_codes(memory.tile, thread_again(), kept.most, step.codes, step.arrays.cols, tile_place(args));
}

template <class M, class G>
void launch_block_written(const StepArgs& args, cudaStream_t stream) {
  if (args.step.writes_codes())
    return launch_ctas(adamw_blocks_kernel<M, G, Written::codes>, sizeof(BlockMemory<M, G, Written::codes>), args,
                       stream);
  if (args.step.arrays.values)
    return launch_ctas(adamw_blocks_kernel<M, G, Written::values>, sizeof(BlockMemory<M, G, Written::values>), args,
                       stream);
  launch_ctas(adamw_blocks_kernel<M, G, Written::nothing>, sizeof(BlockMemory<M, G, Written::nothing>), args, stream);
}

}  // namespace octavo::cuda
