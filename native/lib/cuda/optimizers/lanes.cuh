// Who does what among moments in blocks: a lane's row and columns, and what its row's lanes share.
#pragma once

#include "draws.cuh"
#include "eights.cuh"
#include "moments.cuh"
#include "steps.cuh"

namespace octavo::cuda {

// The largest of this half of the warp; `lower`: all bits of lanes of the lower row.
__device__ __forceinline__ uint32_t largest_of_row(uint32_t own, uint32_t lower) {
  const uint32_t upper_row = __reduce_max_sync(~0u, own & ~lower), lower_row = __reduce_max_sync(~0u, own & lower);
  return (upper_row & ~lower) | (lower_row & lower);
}

// What distinguishes a lane from the others of its warp, in one register.
struct LaneFlags {
  uint32_t bits;  // 1: its columns exist; 2: they are the first of their block; the top bit: it has the lower row

  __device__ LaneFlags(uint32_t thread, bool within)
      : bits((within ? 1u : 0u) | (thread % LANES_OF_ROW == 0 ? 2u : 0u) |
             (thread % 32 < LANES_OF_ROW ? 0u : 1u << 31)) {
    keep(bits);
  }
  __device__ bool within() const { return bits & 1u; }
  __device__ bool first_of_block() const { return bits & 2u; }
  // All bits if it has the lower row.
  __device__ uint32_t lower() const { return static_cast<uint32_t>(static_cast<int32_t>(bits) >> 31); }
  // Rows from the upper lanes' on, of those from this lane's on.
  __device__ int upper_of(int left) const { return left - static_cast<int>(lower()); }
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

}  // namespace octavo::cuda
