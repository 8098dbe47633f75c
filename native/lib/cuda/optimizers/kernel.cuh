// AdamW in one pass over memory.
//
//   reads   gradient, moments, master, once
//   writes  moments, master, and the master's values or codes in both planes
//   bound   memory: 28 bytes per element for fp32 moments and master and a bf16 gradient, with two bytes of codes or
//   values
//
// A tile is 128 rows by 128 columns. A warp has 16 of its rows, two at a time; a lane four neighbouring columns of
// both, so that every access of a warp to fp32 is 512 contiguous bytes, and a block of 128 moments is one warp's. CTAs
// are persistent, because each works out the factors of the step for itself.
#pragma once

#include "codes.cuh"
#include "fours.cuh"
#include "steps.h"

namespace octavo::cuda {

// What is written from the master.
enum class Written { nothing, values, codes };

__device__ __forceinline__ AdamWScalars scalars_of(const AdamWArgs& args, uint32_t& step) {
  int64_t number = args.draws.step;
  if (args.draws.step_device) {
    const float count = __ldg(args.draws.step_device);
    number = count >= 1.0f ? static_cast<int64_t>(count) : 1;
  }
  step = static_cast<uint32_t>(number);
  return adamw_scalars(args.rule, args.rule.lr_device ? __ldg(args.rule.lr_device) : args.rule.lr, number);
}

// A lane's part of two rows.
struct Pair {
  float grad[2][4], master[2][4], moment[2][2][4];
};

template <class M, bool BLOCKS, class G, bool WIDE>
__device__ __forceinline__ void load_pair(Pair& pair, const AdamWArrays& arrays, const int64_t (&at)[2],
                                          const int64_t (&top_at)[2], const Live<WIDE> (&live)[2]) {
  uint32_t codes[2][2];
  int32_t tops[2][2];
#pragma unroll
  for (int row = 0; row < 2; ++row) {
    load_gradient<G>(pair.grad[row], arrays, at[row], live[row]);
    load_four<M>(pair.master[row], arrays.master, at[row], live[row]);
#pragma unroll
    for (int moment = 0; moment < 2; ++moment) {
      if constexpr (BLOCKS) {
        codes[row][moment] = load_codes(arrays.moment[moment], at[row], live[row]);
        tops[row][moment] = live[row].any() ? __ldcs(arrays.tops[moment] + top_at[row]) : 0;
      } else {
        load_four<F32>(pair.moment[row][moment], arrays.moment[moment], at[row], live[row]);
      }
    }
  }
  if constexpr (BLOCKS) {
#pragma unroll
    for (int row = 0; row < 2; ++row)
#pragma unroll
      for (int moment = 0; moment < 2; ++moment)
#pragma unroll
        for (int i = 0; i < 4; ++i)
          pair.moment[row][moment][i] =
              live[row].at(i) ? moment_value(moment, codes[row][moment] >> (8 * i) & 0xFFu, tops[row][moment]) : 0.0f;
  }
}

template <bool WIDE>
__device__ __forceinline__ void step_pair(Pair& pair, const AdamWScalars& scalars, const float* inverse_scale,
                                          const Live<WIDE> (&live)[2]) {
  const float scale = inverse_scale ? __ldg(inverse_scale) : 1.0f;
#pragma unroll
  for (int row = 0; row < 2; ++row)
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float grad = inverse_scale ? pair.grad[row][i] * scale : pair.grad[row][i];
      const AdamWElement made =
          adamw_element({pair.master[row][i], {pair.moment[row][0][i], pair.moment[row][1][i]}}, grad, scalars);
      // 0 / 0, where epsilon is 0, is no value of an element that does not exist
      pair.master[row][i] = live[row].at(i) ? made.master : 0.0f;
      pair.moment[row][0][i] = made.moment[0];
      pair.moment[row][1][i] = made.moment[1];
    }
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
      if (live[row].at(i)) largest = max(largest, abs_bits(pair.moment[row][moment][i]));
    const int32_t top = moment_top(__reduce_max_sync(~0u, largest));
    uint32_t word = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i)
      word |= moment_code(moment, pair.moment[row][moment][i], top, draws.draw(row, i)) << (8 * i);
    store_codes(arrays.moment[moment], at[row], live[row], word);
    // the lane of the block's first column, which exists if the block does
    if (threadIdx.x % 32 == 0 && live[row].any()) __stcs(arrays.tops[moment] + top_at[row], top);
  }
}

// The new masters as they are stored, which is what values and codes are made of.
template <class M, bool WIDE>
__device__ __forceinline__ void store_masters(Pair& pair, const AdamWArrays& arrays, const int64_t (&at)[2],
                                              const Live<WIDE> (&live)[2], const PairDraws& draws) {
#pragma unroll
  for (int row = 0; row < 2; ++row) {
    if constexpr (std::is_same_v<M, F32>) {
      store_floats(arrays.master, at[row], live[row], pair.master[row]);
    } else {
      uint16_t half[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        half[i] = bf16_stochastic(pair.master[row][i], draws.draw(row, i));
        pair.master[row][i] = float_of_bf16(half[i]);
      }
      store_halves(arrays.master, at[row], live[row], halves_of(half));
    }
  }
}

// CTAs at once: as many as the registers of a lane's two rows allow without spilling.
template <bool BLOCKS, Written W>
constexpr int ctas_at_once() {
  return BLOCKS && W == Written::codes ? 2 : 3;
}

template <class M, bool BLOCKS, class G, Written W, bool WIDE>
__global__ void __launch_bounds__(STEP_THREADS, ctas_at_once<BLOCKS, W>())
    adamw_kernel(const __grid_constant__ StepArgs args) {
  __shared__ std::conditional_t<W == Written::codes, CodeTile, NoTile> tile;
  const AdamWArgs& step = args.step;
  const AdamWArrays& arrays = step.arrays;
  if (step.skip && __ldg(step.skip)) return;
  uint32_t number;
  const AdamWScalars scalars = scalars_of(step, number);
  const int lane = static_cast<int>(threadIdx.x % 32), warp = static_cast<int>(threadIdx.x / 32);
  for (int64_t index = blockIdx.x; index < args.tiles; index += gridDim.x) {
    const int64_t down = index / args.across, across = index - down * args.across;
    const int64_t col = across * TILE_SIDE + lane * 4;
    int64_t first = down * TILE_SIDE, end = arrays.rows;
    if constexpr (W == Written::codes) {
      const Panel panel = stacked_panel(down, step.codes.matrix_rows);
      first = panel.row0, end = panel.row0 + panel.rows;
    }
#pragma unroll 1
    for (int each = 0; each < WARP_ROWS; each += 2) {
      const int64_t row0 = first + warp * WARP_ROWS + each;
      int64_t at[2], top_at[2];
      Live<WIDE> live[2];
#pragma unroll
      for (int row = 0; row < 2; ++row) {
        at[row] = (row0 + row) * arrays.cols + col;
        top_at[row] = (row0 + row) * args.across + across;
        const int64_t left = row0 + row < end ? min(arrays.cols - col, args.limit - at[row]) : 0;
        live[row].count = static_cast<int>(min(max(left, int64_t{0}), int64_t{4}));
      }
      Pair pair;
      load_pair<M, BLOCKS, G>(pair, arrays, at, top_at, live);
      const auto drawn = [&](int stream) {
        return pair_draws(args.keys, static_cast<uint32_t>(row0 + step.draws.first_row), static_cast<uint32_t>(col),
                          number, adamw_stream(step.draws.tensor, stream));
      };
      step_pair(pair, scalars, step.inverse_scale, live);
#pragma unroll
      for (int moment = 0; moment < 2; ++moment) {
        if constexpr (BLOCKS) {
          store_blocks(pair, moment, arrays, at, top_at, live, drawn(1 + moment));
        } else {
#pragma unroll
          for (int row = 0; row < 2; ++row)
            store_floats(arrays.moment[moment], at[row], live[row], pair.moment[row][moment]);
        }
      }
      PairDraws draws{};
      if constexpr (std::is_same_v<M, BF16>) draws = drawn(0);
      store_masters<M>(pair, arrays, at, live, draws);
#pragma unroll
      for (int row = 0; row < 2; ++row) {
        if constexpr (W == Written::values)
          store_halves(arrays.values, at[row], live[row], rounded_halves(arrays.values_dtype, pair.master[row]));
        if constexpr (W == Written::codes)
          tile.keep(warp * WARP_ROWS + each + row, rounded_halves(DType::bf16, pair.master[row]));
      }
    }
    if constexpr (W == Written::codes)
      write_codes(tile, step.codes, arrays.cols, {down, across, first, static_cast<int>(end - first)});
  }
}

template <class M, bool BLOCKS, class G, Written W, bool WIDE>
void launch_step(const StepArgs& args, cudaStream_t stream) {
  const auto kernel = adamw_kernel<M, BLOCKS, G, W, WIDE>;
  int device = 0, processors = 1, ctas = 1;
  cudaGetDevice(&device);
  cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device);
  cudaOccupancyMaxActiveBlocksPerMultiprocessor(&ctas, kernel, STEP_THREADS, 0);
  const int64_t most = int64_t{processors} * (ctas > 0 ? ctas : 1);
  kernel<<<static_cast<unsigned>(args.tiles < most ? args.tiles : most), STEP_THREADS, 0, stream>>>(args);
}

template <class M, class G, bool BLOCKS, bool WIDE>
void launch_written(const StepArgs& args, cudaStream_t stream) {
  if constexpr (WIDE) {
    if (args.step.writes_codes()) return launch_step<M, BLOCKS, G, Written::codes, true>(args, stream);
  }
  if (args.step.arrays.values) return launch_step<M, BLOCKS, G, Written::values, WIDE>(args, stream);
  launch_step<M, BLOCKS, G, Written::nothing, WIDE>(args, stream);
}

template <class M, class G, bool WIDE>
void launch_moments(const StepArgs& args, cudaStream_t stream) {
  args.step.in_blocks() ? launch_written<M, G, true, WIDE>(args, stream)
                        : launch_written<M, G, false, WIDE>(args, stream);
}

}  // namespace octavo::cuda
