// Rowwise data of row scaling in one read of device memory: one CTA per row, whose second read hits the cache.
#pragma once

#include "tile_kernel.cuh"

namespace octavo::cuda {

constexpr int ROW_THREADS = 128;

template <class S>
struct RowArgs {
  S source;
  int64_t rows, cols;
  const int64_t* rows_in_use;  // null: all
  Plane rowwise;
  ScaleOptions options;
  const int32_t* unchanged;
};

template <class S, Format F, bool WIDE>
__global__ void __launch_bounds__(ROW_THREADS, 12) quantize_row(const __grid_constant__ RowArgs<S> args) {
  using T = typename S::Type;
  using P = Pack<T>;
  __shared__ uint32_t partial[ROW_THREADS / 32];
  const int64_t row = blockIdx.x;
  if ((args.unchanged && *args.unchanged) || (args.rows_in_use && row >= *args.rows_in_use)) return;

  const int64_t from = row_in(args.source, row);
  const int64_t cols = from < 0 ? 0 : args.cols;  // those that are read
  uint32_t most = 0;
  if constexpr (WIDE) {
#pragma unroll 4
    for (int64_t col = threadIdx.x * 8; col < cols; col += ROW_THREADS * 8) {
      const P pack = args.source.load(from, col);
#pragma unroll
      for (int k = 0; k < P::words; ++k) most = P::maximum(most, pack.word[k]);
    }
    most = P::fp32_bits(P::across(most), 0);
  } else {
    for (int64_t col = threadIdx.x; col < cols; col += ROW_THREADS)
      most = max(most, abs_bits(args.source.value(from, col)));
  }
  most = __reduce_max_sync(~0u, most);
  if (threadIdx.x % 32 == 0) partial[threadIdx.x / 32] = most;
  __syncthreads();
#pragma unroll
  for (int k = 0; k < ROW_THREADS / 32; ++k) most = max(most, partial[k]);

  const float encode = fp32_scale(most, format_max(F), args.options.epsilon, args.options.power_of_two);
  if (threadIdx.x == 0) static_cast<float*>(args.rowwise.scales)[row] = decode_scale(encode);
  if constexpr (WIDE) {
#pragma unroll 4
    for (int64_t col = threadIdx.x * 8; col < cols; col += ROW_THREADS * 8) {
      const P pack = args.source.load(from, col);
      float scaled[8];
#pragma unroll
      for (int j = 0; j < 8; ++j) scaled[j] = pack.value(j) * encode;
      store_row_codes<true>(args.rowwise, row, col, args.cols, encode8<F>(scaled));
    }
    for (int64_t col = cols + threadIdx.x * 8; col < args.cols; col += ROW_THREADS * 8)
      store_row_codes<true>(args.rowwise, row, col, args.cols, Codes<F>{});
  } else {
    uint8_t* to = static_cast<uint8_t*>(args.rowwise.codes) + row * args.cols;
    for (int64_t col = threadIdx.x; col < cols; col += ROW_THREADS)
      to[col] = static_cast<uint8_t>(fp8_pair<F>(args.source.value(from, col) * encode, 0.0f));
    for (int64_t col = cols + threadIdx.x; col < args.cols; col += ROW_THREADS) to[col] = 0;
  }
}

}  // namespace octavo::cuda
