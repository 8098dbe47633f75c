// AdamW in one pass over memory.
//
//   reads   gradient, moments, master, once
//   writes  moments, master, and the master's values or codes in both planes
//   bound   memory: 28 bytes per element for fp32 moments and master and a bf16 gradient, with two bytes of codes or
//   values
//
// A warp has 16 rows of 128 columns, two at a time; a lane four neighbouring columns of both, so that every access of a
// warp to fp32 is 512 contiguous bytes, and a block of 128 moments is one warp's.
#pragma once

#include "codes.cuh"
#include "draws.cuh"
#include "elements.cuh"
#include "fours.cuh"
#include "rounding.cuh"
#include "steps.cuh"

namespace octavo::cuda {

// A lane's part of two rows, one after the other.
struct Pair {
  float grad[8], master[8], moment[2][8];
};

template <class M, bool BLOCKS, class G, bool WIDE>
__device__ __forceinline__ void load_pair(Pair& pair, const AdamWArrays& arrays, const int64_t (&at)[2],
                                          const int64_t (&top_at)[2], const Live<WIDE> (&live)[2]) {
  uint32_t codes[2][2];
  int32_t tops[2][2];
#pragma unroll
  for (int row = 0; row < 2; ++row) {
    load_gradient<G>(pair.grad + 4 * row, arrays, at[row], live[row]);
    load_four<M>(pair.master + 4 * row, arrays.master, at[row], live[row]);
#pragma unroll
    for (int moment = 0; moment < 2; ++moment) {
      if constexpr (BLOCKS) {
        codes[row][moment] = load_codes(arrays.moment[moment], at[row], live[row]);
        tops[row][moment] = live[row].any() ? arrays.tops[moment][top_at[row]] : 0;
      } else {
        load_four<F32>(pair.moment[moment] + 4 * row, arrays.moment[moment], at[row], live[row]);
      }
    }
  }
  if constexpr (BLOCKS) {
#pragma unroll
    for (int i = 0; i < 8; ++i)
#pragma unroll
      for (int moment = 0; moment < 2; ++moment) {
        const uint32_t code = codes[i / 4][moment] >> (8 * (i % 4)) & 0xFFu;
        pair.moment[moment][i] = live[i / 4].at(i % 4) ? moment_value(moment, code, tops[i / 4][moment]) : 0.0f;
      }
  }
}

template <bool WIDE>
__device__ __forceinline__ void step_pair(Pair& pair, const StepFactors& factors, const Live<WIDE> (&live)[2]) {
  unscale(pair.grad, factors.inverse_scale);
#pragma unroll
  for (int i = 0; i < 8; ++i) adamw_moments(pair.moment[0][i], pair.moment[1][i], pair.grad[i], factors.scalars);
  step_masters(pair.master, pair.moment[0], pair.moment[1], factors.scalars,
               factors.rare == 0 && are_plain(pair.moment[0], pair.moment[1]));
  // 0 / 0, where epsilon is 0, is no value of an element that does not exist
#pragma unroll
  for (int i = 0; i < 8; ++i)
    if (!live[i / 4].at(i % 4)) pair.master[i] = 0.0f;
}

template <bool WIDE>
__device__ __forceinline__ void store_blocks(const Pair& pair, int moment, const AdamWArrays& arrays,
                                             const int64_t (&at)[2], const int64_t (&top_at)[2],
                                             const Live<WIDE> (&live)[2], const PairDraws& draws) {
#pragma unroll
  for (int row = 0; row < 2; ++row) {
    uint32_t largest = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i)
      if (live[row].at(i)) largest = max(largest, abs_bits(pair.moment[moment][4 * row + i]));
    const int32_t top = moment_top(__reduce_max_sync(~0u, largest));
    uint32_t word = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i)
      word |= moment_code(moment, pair.moment[moment][4 * row + i], top, draws.draw(row, i)) << (8 * i);
    store_codes(arrays.moment[moment], at[row], live[row], word);
    // the lane of the block's first column, which exists if the block does
    if (threadIdx.x % 32 == 0 && live[row].any()) arrays.tops[moment][top_at[row]] = top;
  }
}

// The new masters as they are stored, which is what values and codes are made of.
template <class M, bool WIDE>
__device__ __forceinline__ void store_masters(Pair& pair, const AdamWArrays& arrays, const int64_t (&at)[2],
                                              const Live<WIDE> (&live)[2], const PairDraws& draws) {
  uint32_t halves[4];
  if constexpr (std::is_same_v<M, BF16>) {
    stochastic_halves(halves, pair.master, draws.word);
    values_of_halves(pair.master, halves);
  }
#pragma unroll
  for (int row = 0; row < 2; ++row) {
    if constexpr (std::is_same_v<M, F32>) {
      store_floats(arrays.master, at[row], live[row], pair.master + 4 * row);
    } else {
      store_halves(arrays.master, at[row], live[row], {halves[2 * row], halves[2 * row + 1]});
    }
  }
}

// CTAs at once: as many as the registers of a lane's two rows allow without spilling.
template <bool BLOCKS, Written W, bool WIDE>
constexpr int ctas_at_once() {
  return BLOCKS && (W == Written::codes || !WIDE) ? 2 : 3;
}

template <class M, bool BLOCKS, class G, Written W, bool WIDE>
__global__ void __launch_bounds__(STEP_THREADS, ctas_at_once<BLOCKS, W, WIDE>())
    adamw_kernel(const __grid_constant__ StepArgs args) {
  __shared__ std::conditional_t<W == Written::codes, MasterTile, NoTile> tile;
  __shared__ StepFactors held;
  const AdamWArgs& step = args.step;
  const AdamWArrays& arrays = step.arrays;
  if (step.skip && __ldg(step.skip)) return;
  const StepFactors factors = shared_factors(held, step);
  const int lane = static_cast<int>(threadIdx.x % 32), warp = static_cast<int>(threadIdx.x / 32);
  const WarpPlace place = warp_place<W>(args, threadIdx.x / 32);
  const int64_t col = int64_t{place.across} * TILE_SIDE + lane * 4;
  uint32_t most = 0;
#pragma unroll 1
  for (int each = 0; each < place.rows; each += 2) {
    const int64_t row0 = place.first_row + each;
    int64_t at[2], top_at[2];
    Live<WIDE> live[2];
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      at[row] = (row0 + row) * arrays.cols + col;
      top_at[row] = (row0 + row) * args.across + place.across;
      const int64_t left = each + row < place.rows ? min(arrays.cols - col, args.limit - at[row]) : 0;
      live[row].count = static_cast<int>(min(max(left, int64_t{0}), int64_t{4}));
    }
    Pair pair;
    load_pair<M, BLOCKS, G>(pair, arrays, at, top_at, live);
    const auto drawn = [&](int stream) {
      return pair_draws(args.keys, static_cast<uint32_t>(row0 + step.draws.first_row), static_cast<uint32_t>(col),
                        factors.number, adamw_stream(step.draws.tensor, stream));
    };
    step_pair(pair, factors, live);
#pragma unroll
    for (int moment = 0; moment < 2; ++moment) {
      if constexpr (BLOCKS) {
        store_blocks(pair, moment, arrays, at, top_at, live, drawn(1 + moment));
      } else {
#pragma unroll
        for (int row = 0; row < 2; ++row)
          store_floats(arrays.moment[moment], at[row], live[row], pair.moment[moment] + 4 * row);
      }
    }
    PairDraws draws{};
    if constexpr (std::is_same_v<M, BF16>) draws = drawn(0);
    store_masters<M>(pair, arrays, at, live, draws);
    if constexpr (W != Written::nothing) {
      uint32_t halves[4];
      nearest_halves(halves, pair.master, W == Written::codes ? DType::bf16 : arrays.values_dtype);
#pragma unroll
      for (int row = 0; row < 2; ++row) {
        const uint2 four = {halves[2 * row], halves[2 * row + 1]};
        if constexpr (W == Written::values) {
          store_halves(arrays.values, at[row], live[row], four);
        } else {
          tile.four(warp * WARP_ROWS + each + row, lane) = four;
          most = Pack<BF16>::maximum(most, Pack<BF16>::maximum(four.x, four.y));
        }
      }
    }
  }
  if constexpr (W == Written::codes) write_codes(tile, thread_again(), most, step.codes, arrays.cols, tile_place(args));
}

template <class M, class G, bool BLOCKS, bool WIDE>
void launch_written(const StepArgs& args, cudaStream_t stream) {
  if constexpr (WIDE) {
    if (args.step.writes_codes()) return launch_ctas(adamw_kernel<M, BLOCKS, G, Written::codes, true>, 0, args, stream);
  }
  if (args.step.arrays.values) return launch_ctas(adamw_kernel<M, BLOCKS, G, Written::values, WIDE>, 0, args, stream);
  launch_ctas(adamw_kernel<M, BLOCKS, G, Written::nothing, WIDE>, 0, args, stream);
}

// Gradients of any dtype.
template <class M, bool WIDE>
void launch_moments(const StepArgs& args, cudaStream_t stream) {
  args.step.in_blocks() ? launch_written<M, AnyDType, true, WIDE>(args, stream)
                        : launch_written<M, AnyDType, false, WIDE>(args, stream);
}

template <class M>
void launch_pairs(const StepArgs& args, Vector vector, cudaStream_t stream) {
  if (vector == Vector::one) return launch_moments<M, false>(args, stream);
  const DType grad = args.step.arrays.grad_dtype;
  if (args.step.in_blocks() || grad == DType::f16) return launch_moments<M, true>(args, stream);
  grad == DType::f32 ? launch_written<M, F32, false, true>(args, stream)
                     : launch_written<M, BF16, false, true>(args, stream);
}

}  // namespace octavo::cuda
