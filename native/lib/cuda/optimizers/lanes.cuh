// Who does what among moments in blocks: a lane's row and columns, its addresses, and what its row's lanes share.
#pragma once

#include "draws.cuh"
#include "eights.cuh"
#include "moments.cuh"
#include "steps.cuh"

namespace octavo::cuda {

constexpr int ROWS_AT_ONCE = 2, LANES_OF_ROW = 32 / ROWS_AT_ONCE;

// The largest of this half of the warp; `lower`: all bits of lanes of the lower row.
__device__ __forceinline__ uint32_t largest_of_row(uint32_t own, uint32_t lower) {
  const uint32_t upper_row = __reduce_max_sync(~0u, own & ~lower), lower_row = __reduce_max_sync(~0u, own & lower);
  return (upper_row & ~lower) | (lower_row & lower);
}

// Kept in a register, and not worked out again where it is used.
__device__ __forceinline__ void keep(uint32_t& value) { asm volatile("" : "+r"(value)); }

// What distinguishes a lane from the others of its warp.
struct LaneFlags {
  uint32_t lower;  // all bits: of the lower row
  uint32_t bits;   // 1: its columns exist; 2: they are the first of their block

  __device__ LaneFlags(uint32_t thread, bool within)
      : lower(thread % 32 < LANES_OF_ROW ? 0u : ~0u),
        bits((within ? 1u : 0u) | (thread % LANES_OF_ROW == 0 ? 2u : 0u)) {
    keep(lower), keep(bits);
  }
  __device__ bool within() const { return bits & 1u; }
  __device__ bool first_of_block() const { return bits & 2u; }
  // Rows from the upper lanes' on, of those from this lane's on.
  __device__ int upper_of(int left) const { return left - static_cast<int>(lower); }
};

template <class M>
constexpr int streams_of() {
  return std::is_same_v<M, BF16> ? 3 : 2;
}

// What a row's lanes share: random bits, by stream (0 and 1 the moments, 2 the master), and the tops of both blocks
// before the step and after it.
template <class M>
struct alignas(16) RowState {
  RowPart part[streams_of<M>()];
  int2 tops, new_tops;
};

// Of a warp's 16 rows. `top`: lane i's of row i % 16, of the second moment from lane 16 on.
template <class M>
__device__ __forceinline__ void prepare_rows(RowState<M>* states, const StepArgs& args, uint32_t step, uint32_t row,
                                             int32_t top) {
  const uint32_t lane = threadIdx.x % 32, number = lane % WARP_ROWS;
#pragma unroll
  for (int k = 0; k < streams_of<M>(); k += 2) {
    const int stream = k + static_cast<int>(lane / WARP_ROWS);
    if (stream < streams_of<M>()) {
      states[number].part[stream] =
          row_part(args.keys, step, row + number, adamw_stream(args.step.draws.tensor, stream == 2 ? 0 : stream + 1));
    }
  }
  (lane < WARP_ROWS ? states[number].tops.x : states[number].tops.y) = top;
  __syncwarp();
}

// The top of lane i's block: of row i % 16, of the second moment from lane 16 on.
__device__ __forceinline__ int32_t* top_of_lane(const StepArgs& args, const WarpPlace& place, uint32_t lane) {
  const int64_t at = (place.first_row + lane % WARP_ROWS) * args.across + place.across;
  return args.step.arrays.tops[lane / WARP_ROWS] + at;
}

// Writes the tops of all rows of this warp, whose rows are those of the thread that asks.
template <Written W, class M>
__device__ __forceinline__ void store_tops(const RowState<M>* states, const StepArgs& args) {
  const uint32_t thread = thread_again(), lane = thread % 32, number = lane % WARP_ROWS;
  const WarpPlace place = warp_place<W>(args, thread / 32);
  const int2 tops = states[number].new_tops;
  if (static_cast<int>(number) < place.rows) *top_of_lane(args, place, lane) = lane < WARP_ROWS ? tops.x : tops.y;
}

// Where a lane's eight elements of a row are. What is read goes through slots in shared memory that are this lane's
// alone, asked for one iteration before it is used: it needs no register on its way and no barrier.
template <class M, class G>
struct LaneArrays {
  const void* grad;
  void *master, *codes[2];

  __device__ LaneArrays(const AdamWArrays& arrays, int64_t at)
      : grad(element_at(arrays.grad, at, Pack<G>::bytes)),
        master(element_at(arrays.master, at, Pack<M>::bytes)),
        codes{element_at(arrays.moment[0], at, 1), element_at(arrays.moment[1], at, 1)} {}

  using Slots = StagedArrays<M, G>;
  __device__ void ask_for_step(uint32_t slots) const {
    Slots::template ask<G>(slots + Slots::grad, grad);
#pragma unroll
    for (int i = 0; i < 2; ++i) copy_async<8>(slots + 8 * i, codes[i]);
  }
  __device__ void ask_for_master(uint32_t slots) const { Slots::template ask<M>(slots + Slots::master, master); }

  // By two rows.
  __device__ void advance_step(const uint32_t (&strides)[3]) {
    advance(grad, strides[0]);
#pragma unroll
    for (void*& each : codes) advance(each, strides[2]);
  }
  __device__ void advance_master(const uint32_t (&strides)[3]) { advance(master, strides[1]); }

  // Values have two bytes where codes have one: they need no pointer of their own, which would be one too many.
  __device__ void* values(const StepArgs& args) const {
    return reinterpret_cast<void*>(2 * reinterpret_cast<uint64_t>(codes[0]) + args.values_from_codes);
  }
};

}  // namespace octavo::cuda
