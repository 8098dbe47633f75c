// AdamW in one pass over memory, with moments of 8 bits in blocks of 128.
//
//   reads   gradient, codes of moments, master, once
//   writes  codes of moments, master, and the master's values or codes in both planes
//   bound   instructions and memory: 10 bytes per element for bf16 masters and gradients, whose time is that of some 70
//   instructions
//
// A tile is 128 rows by 128 columns. A warp has 16 of its rows, two at a time; half of a warp a row, and so a block of
// moments; a lane eight neighbouring columns, and so a whole counter of each stream of random bits. Values that need
// more than the ordinary instructions (zeros, infinities, NaN, the very small and large) are told by a few tests of all
// eight and take a branch of their own.
#pragma once

#include "codes.cuh"
#include "elements.cuh"
#include "lanes.cuh"

namespace octavo::cuda {

// CTAs at once: as many as the registers of a lane's eight elements allow without spilling.
constexpr int BLOCK_CTAS = 3;

template <class M, class G, Written W>
__global__ void __launch_bounds__(STEP_THREADS, BLOCK_CTAS) adamw_blocks_kernel(const __grid_constant__ StepArgs args) {
  __shared__ std::conditional_t<W == Written::codes, CodeTile, NoTile> code_tile;
  __shared__ RowParts<M> row_parts[STEP_WARPS];
  __shared__ StepFactors held;
  // each warp's tile: a lane has no register to spare for it while it goes through rows
  __shared__ volatile uint32_t indices[STEP_WARPS];
  const AdamWArgs& step = args.step;
  if (step.skip && __ldg(step.skip)) return;
  const StepFactors factors = shared_factors(held, step);
  if (threadIdx.x % 32 == 0) indices[threadIdx.x / 32] = blockIdx.x;
  __syncwarp();
  while (true) {
    const uint32_t thread = thread_of_tile(), warp = thread / 32, half = thread % 32 / LANES_OF_ROW;
    if (indices[warp] >= args.tiles) break;
    uint32_t most = 0;
    const TileRows<W> tile(args, indices[warp]);
    const int64_t row0 = tile.first + warp * WARP_ROWS;
    const int rows = tile.count - static_cast<int>(warp) * WARP_ROWS;  // 16 or more: the warp has 16
    if (rows > 0) {
      const auto cols = static_cast<uint32_t>(step.arrays.cols);
      const uint32_t col = tile.beside * TILE_SIDE + thread % LANES_OF_ROW * 8;
      // lanes of columns or of a last row that do not exist read others, and write nothing
      const int64_t row = row0 + (static_cast<int>(half) < rows ? half : 0);
      LanePlace<M, G> place(step.arrays, row * cols + (col < cols ? col : 0), row * args.across + tile.beside);
      RowParts<M>& parts = row_parts[warp];
      prepare_draws<M>(parts, args, thread, factors.number, static_cast<uint32_t>(row0 + step.draws.first_row));
      Product column = column_part(args.keys, factors.number, col / 8);
      LaneFlags lane(thread, col < cols);
      uint32_t part_at = shared_address(&parts[0][half]);
      keep(part_at), keep(column.high), keep(column.low);
      [[maybe_unused]] uint32_t kept_at = 0;
      if constexpr (W == Written::codes) {
        kept_at = shared_address(&code_tile.eight(static_cast<int>(warp * WARP_ROWS + half), thread % LANES_OF_ROW));
        keep(kept_at);
      }
      int left = min(rows, WARP_ROWS) - static_cast<int>(half);  // rows from the lane's on
#pragma unroll 1
      do {
        const bool live = left > 0 && lane.within();
        const uint2 codes[2] = {__ldcs(static_cast<const uint2*>(place.codes[0])),
                                __ldcs(static_cast<const uint2*>(place.codes[1]))};
        const int32_t tops[2] = {__ldcs(place.top_of(0, args)), __ldcs(place.top_of(1, args))};
        const Pack<G> grads = load_eight<G>(place.grad);
        Words draws[streams_of<M>()];
        {
          RowPart part[streams_of<M>()];
#pragma unroll
          for (int k = 0; k < streams_of<M>(); ++k)
            part[k] = load_part(part_at + k * static_cast<uint32_t>(sizeof(RowPart) * WARP_ROWS));
          eight_draws(draws, args.keys, part, column);
          part_at += ROWS_AT_ONCE * static_cast<uint32_t>(sizeof(RowPart));
        }
        float grad[8], moment[2][8], master[8];
        values_of(grad, grads);
        unscale(grad, factors.inverse_scale);
        decode_moments(moment[0], moment[1], codes, tops);
#pragma unroll
        for (int i = 0; i < 8; ++i) adamw_moments(moment[0][i], moment[1][i], grad[i], factors.scalars);
        // not asked for before, because of the registers
        const Pack<M> masters = load_eight<M>(place.master);
        const uint32_t largest[2] = {largest_of_row(live ? largest_first(moment[0]) : 0u, lane.lower),
                                     largest_of_row(live ? largest_second(moment[1]) : 0u, lane.lower)};
        const Encoded made[2] = {encode_first(moment[0], largest[0], draws[0]),
                                 encode_second(moment[1], largest[1], draws[1])};
        if (live) place.store(made, lane.with_tops(), args);
        const bool plain = (made[0].rare | made[1].rare | factors.rare) == 0;
        values_of(master, masters);
        uint32_t halves[4];
        if constexpr (std::is_same_v<M, BF16>) {
          step_rounded(halves, master, moment[0], moment[1], draws[2].word, factors, plain);
          if (live) store_eight<BF16>(place.master, {{halves[0], halves[1], halves[2], halves[3]}});
          if constexpr (W == Written::values) {
            values_of_halves(master, halves);
            nearest_halves(halves, master, step.arrays.values_dtype);
          }
        } else {
          step_masters(master, moment[0], moment[1], factors.scalars, plain);
          Pack<F32> pack;
#pragma unroll
          for (int i = 0; i < 8; ++i) pack.word[i] = bits_of(master[i]);
          if (live) store_eight<F32>(place.master, pack);
          if constexpr (W != Written::nothing)
            nearest_halves(halves, master, W == Written::codes ? DType::bf16 : step.arrays.values_dtype);
        }
        if (live) {
          if constexpr (W == Written::values)
            store_eight<BF16>(place.values(args), {{halves[0], halves[1], halves[2], halves[3]}});
          if constexpr (W == Written::codes) {
            store_shared(kept_at, {halves[0], halves[1], halves[2], halves[3]});
#pragma unroll
            for (const uint32_t pair : halves) most = Pack<BF16>::maximum(most, pair);
          }
        }
        place.advance_by(left > ROWS_AT_ONCE ? 1u : 0u, args.strides);
        left -= ROWS_AT_ONCE;
        if constexpr (W == Written::codes) kept_at += ROWS_AT_ONCE * TILE_SIDE * 2;
      } while (lane.upper_of(left) > 0);
    }
    const uint32_t again = thread_of_tile();
    if constexpr (W == Written::codes) {
      const TileRows<W> written(args, indices[again / 32]);
      write_codes(code_tile, again, most, step.codes, step.arrays.cols,
                  {written.down, written.beside, written.first, written.count});
    }
    __syncwarp();
    if (again % 32 == 0) indices[again / 32] = indices[again / 32] + gridDim.x;
    __syncwarp();
  }
}

template <class M, class G>
void launch_block_written(const StepArgs& args, cudaStream_t stream) {
  if (args.step.writes_codes()) return launch_tiles(adamw_blocks_kernel<M, G, Written::codes>, args, stream);
  if (args.step.arrays.values) return launch_tiles(adamw_blocks_kernel<M, G, Written::values>, args, stream);
  launch_tiles(adamw_blocks_kernel<M, G, Written::nothing>, args, stream);
}

}  // namespace octavo::cuda
