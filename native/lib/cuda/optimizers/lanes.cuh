// Who does what in a tile of moments in blocks: a lane's row and columns, its addresses, and its row's random bits.
#pragma once

#include "draws.cuh"
#include "eights.cuh"
#include "moments.cuh"

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
  __device__ bool with_tops() const { return bits & 2u; }
  // Rows from the upper lanes' on, of those from this lane's on.
  __device__ int upper_of(int left) const { return left - static_cast<int>(lower); }
};

__device__ __forceinline__ uint32_t shared_address(const void* at) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(at));
}

__device__ __forceinline__ void store_shared(uint32_t at, uint4 four) {
  asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(at), "r"(four.x), "r"(four.y), "r"(four.z), "r"(four.w)
               : "memory");
}

// 16 bytes of shared memory at this address in it.
__device__ __forceinline__ RowPart load_part(uint32_t at) {
  RowPart part;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(part.second), "=r"(part.word[0]), "=r"(part.word[1]), "=r"(part.word[2])
               : "r"(at)
               : "memory");
  return part;
}

template <class M>
constexpr int streams_of() {
  return std::is_same_v<M, BF16> ? 3 : 2;
}

// Of a warp's rows. Streams: 0 and 1 the moments, 2 the master.
template <class M>
using RowParts = RowPart[streams_of<M>()][WARP_ROWS];

template <class M>
__device__ __forceinline__ void prepare_draws(RowParts<M>& parts, const StepArgs& args, uint32_t thread, uint32_t step,
                                              uint32_t row) {
  const int lane = static_cast<int>(thread % 32);
  __syncwarp();  // the parts before have been read
#pragma unroll
  for (int k = 0; k < streams_of<M>(); k += 2) {
    const int stream = k + lane / WARP_ROWS;
    if (stream < streams_of<M>()) {
      parts[stream][lane % WARP_ROWS] = row_part(args.keys, step, row + static_cast<uint32_t>(lane % WARP_ROWS),
                                                 adamw_stream(args.step.draws.tensor, stream == 2 ? 0 : stream + 1));
    }
  }
  __syncwarp();
}

// Where a lane's eight elements of a row are, and the tops of their blocks.
template <class M, class G>
struct LanePlace {
  const void* grad;
  void *master, *codes[2], *tops;

  __device__ LanePlace(const AdamWArrays& arrays, int64_t at, int64_t top_at)
      : grad(element_at(arrays.grad, at, Pack<G>::bytes)),
        master(element_at(arrays.master, at, Pack<M>::bytes)),
        codes{element_at(arrays.moment[0], at, 1), element_at(arrays.moment[1], at, 1)},
        tops(element_at(static_cast<void*>(arrays.tops[0]), top_at, 4)) {}

  // By `count` times two rows.
  __device__ void advance_by(uint32_t count, const uint32_t (&strides)[4]) {
    advance(grad, count, strides[0]);
    advance(master, count, strides[1]);
#pragma unroll
    for (void*& each : codes) advance(each, count, strides[2]);
    advance(tops, count, strides[3]);
  }
  __device__ int32_t* top_of(int moment, const StepArgs& args) const {
    return static_cast<int32_t*>(moment ? element_at(tops, args.tops_apart, 1) : tops);
  }

  // Values have two bytes where codes have one: they need no pointer of their own, which would be one too many.
  __device__ void* values(const StepArgs& args) const {
    return reinterpret_cast<void*>(2 * reinterpret_cast<uint64_t>(codes[0]) + args.values_from_codes);
  }

  __device__ void store(const Encoded (&made)[2], bool with_tops, const StepArgs& args) const {
#pragma unroll
    for (int i = 0; i < 2; ++i) __stcs(static_cast<uint2*>(codes[i]), made[i].codes);
    if (!with_tops) return;
#pragma unroll
    for (int i = 0; i < 2; ++i) __stcs(top_of(i, args), made[i].top);
  }
};

// A tile's place among the rows. W == codes: its rows are of one matrix.
template <Written W>
struct TileRows {
  uint32_t down, beside;  // numbers of the tile in its column and row of tiles
  int64_t first;
  int count;  // rows that exist

  __device__ TileRows(const StepArgs& args, uint32_t index) {
    const auto across = static_cast<uint32_t>(args.across);
    down = index / across, beside = index - down * across;
    if constexpr (W == Written::codes) {
      // as stacked_panel, in 32 bits: a division of 64 is a subroutine
      const uint32_t matrix = down / args.panels_each;
      const int64_t within = int64_t{down - matrix * args.panels_each} * TILE_SIDE;
      first = matrix * args.step.codes.matrix_rows + within;
      count = static_cast<int>(min(args.step.codes.matrix_rows - within, int64_t{TILE_SIDE}));
    } else {
      first = int64_t{down} * TILE_SIDE;
      count = static_cast<int>(min(args.step.arrays.rows - first, int64_t{TILE_SIDE}));
    }
  }
};

}  // namespace octavo::cuda
