// Rowwise data of row scaling in one read of device memory: one CTA per row, which keeps the row in registers between
// its amax and its codes, or whose second read hits the cache.
#pragma once

#include "tile_kernel.cuh"

namespace octavo::cuda {

constexpr int ROW_THREADS = 128;
constexpr int ROW_PASS = 8 * ROW_THREADS;  // columns that its threads load at once
constexpr int KEPT_PASSES = 8;

template <class S>
struct RowArgs {
  S source;
  int64_t rows, cols;
  const int64_t* rows_in_use;  // null: all
  Plane rowwise;
  ScaleOptions options;
  const int32_t* unchanged;
};

// The encode scale of a row whose threads have found these largest magnitudes, in fp32 bits.
template <Format F>
__device__ __forceinline__ float row_scale(uint32_t most, uint32_t (&of_warps)[ROW_THREADS / 32],
                                           const ScaleOptions& options) {
  most = __reduce_max_sync(~0u, most);
  if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = most;
  __syncthreads();
#pragma unroll
  for (const uint32_t other : of_warps) most = max(most, other);
  return fp32_scale(most, format_max(F), options.epsilon, options.power_of_two);
}

template <Format F, class T>
__device__ __forceinline__ Codes<F> scaled_codes(const Pack<T>& pack, float encode) {
  float scaled[8];
#pragma unroll
  for (int j = 0; j < 8; ++j) scaled[j] = pack.value(j) * encode;
  return encode8<F>(scaled);
}

// Whether the threads of a CTA keep a row. A narrower one is in the L1 cache when it is read again, and CTAs that keep
// none are smaller.
template <class T>
__host__ __device__ constexpr bool keeps_row(int64_t cols) {
  return Pack<T>::bytes == 2 && cols > KEPT_PASSES / 2 * ROW_PASS && cols <= KEPT_PASSES * ROW_PASS;
}

template <class S, Format F>
__global__ void __launch_bounds__(ROW_THREADS, 8) quantize_kept_row(const __grid_constant__ RowArgs<S> args) {
  using P = Pack<typename S::Type>;
  __shared__ uint32_t of_warps[ROW_THREADS / 32];
  const int64_t row = blockIdx.x;
  if ((args.unchanged && *args.unchanged) || (args.rows_in_use && row >= *args.rows_in_use)) return;

  const int64_t from = row_in(args.source, row);
  const int cols = static_cast<int>(args.cols), read = from < 0 ? 0 : cols;
  P packs[KEPT_PASSES];
#pragma unroll
  for (int pass = 0; pass < KEPT_PASSES; ++pass) {
    const int col = pass * ROW_PASS + static_cast<int>(threadIdx.x) * 8;
    packs[pass] = col < read ? args.source.load(from, col) : zeros<typename S::Type>();
  }
  uint32_t most = 0;
#pragma unroll
  for (const P& pack : packs) {
#pragma unroll
    for (int k = 0; k < P::words; ++k) most = P::maximum(most, pack.word[k]);
  }
  const float encode = row_scale<F>(P::fp32_bits(P::across(most), 0), of_warps, args.options);
  if (threadIdx.x == 0) static_cast<float*>(args.rowwise.scales)[row] = decode_scale(encode);
#pragma unroll
  for (int pass = 0; pass < KEPT_PASSES; ++pass) {
    const int col = pass * ROW_PASS + static_cast<int>(threadIdx.x) * 8;
    const Codes<F> codes = col < read ? scaled_codes<F>(packs[pass], encode) : Codes<F>{};
    if (col < cols) store_row_codes<true>(args.rowwise, row, col, cols, codes);
  }
}

template <class S, Format F, bool WIDE>
__global__ void __launch_bounds__(ROW_THREADS, 12) quantize_row(const __grid_constant__ RowArgs<S> args) {
  using T = typename S::Type;
  using P = Pack<T>;
  __shared__ uint32_t of_warps[ROW_THREADS / 32];
  const int64_t row = blockIdx.x;
  if ((args.unchanged && *args.unchanged) || (args.rows_in_use && row >= *args.rows_in_use)) return;

  const int64_t from = row_in(args.source, row);
  const int64_t cols = from < 0 ? 0 : args.cols;  // those that are read
  uint32_t most = 0;
  if constexpr (WIDE) {
#pragma unroll 4
    for (int64_t col = threadIdx.x * 8; col < cols; col += ROW_PASS) {
      const P pack = args.source.load(from, col);
#pragma unroll
      for (int k = 0; k < P::words; ++k) most = P::maximum(most, pack.word[k]);
    }
    most = P::fp32_bits(P::across(most), 0);
  } else {
    for (int64_t col = threadIdx.x; col < cols; col += ROW_THREADS)
      most = max(most, abs_bits(args.source.value(from, col)));
  }
  const float encode = row_scale<F>(most, of_warps, args.options);
  if (threadIdx.x == 0) static_cast<float*>(args.rowwise.scales)[row] = decode_scale(encode);
  if constexpr (WIDE) {
#pragma unroll 4
    for (int64_t col = threadIdx.x * 8; col < cols; col += ROW_PASS)
      store_row_codes<true>(args.rowwise, row, col, args.cols, scaled_codes<F>(args.source.load(from, col), encode));
    for (int64_t col = cols + threadIdx.x * 8; col < args.cols; col += ROW_PASS)
      store_row_codes<true>(args.rowwise, row, col, args.cols, Codes<F>{});
  } else {
    uint8_t* to = static_cast<uint8_t*>(args.rowwise.codes) + row * args.cols;
    for (int64_t col = threadIdx.x; col < cols; col += ROW_THREADS)
      to[col] = static_cast<uint8_t>(fp8_pair<F>(args.source.value(from, col) * encode, 0.0f));
    for (int64_t col = cols + threadIdx.x; col < args.cols; col += ROW_THREADS) to[col] = 0;
  }
}

}  // namespace octavo::cuda
