// Row statistics of RMSNorm and LayerNorm.
//
//   reads   x          [M, C], once from device memory; LayerNorm's second pass finds the row in the cache
//   writes  mean, its rounding error, rstd [M] fp32
//   bound   device memory: 2 B/element in 16 bits
//
// One warp per row, or one CTA if rows are long. Each thread sums eight strands of 1/8 of its elements each in fp32;
// strands and threads are then added pairwise. The error is at most (C / (8 * threads) + 16) * 2^-24 of the sum of
// magnitudes, and every run gives the same bits.
#include "norm.h"

#include "common/check.h"
#include "cuda/device/launch.h"
#include "octavo/numerics.h"

namespace octavo::cuda {
namespace {

constexpr int THREADS = 256;
constexpr unsigned ALL = 0xFFFFFFFFu;

struct Job {
  const void* x;
  int64_t rows, cols, row_stride;
  float epsilon;
  NormStatistics to;
  const int64_t* plan;
  const int32_t* unchanged;
  bool vectors;  // eight elements are aligned to 16 bytes
};

template <DType D>
__device__ __forceinline__ float element(const void* row, int64_t col) {
  if constexpr (D == DType::f32) return __ldg(static_cast<const float*>(row) + col);
  const uint16_t bits = __ldg(static_cast<const uint16_t*>(row) + col);
  if constexpr (D == DType::bf16) return float_of_bf16(bits);
  return float_of_f16(bits);
}

template <DType D>
__device__ __forceinline__ void load8(const void* row, int64_t col, float (&values)[8]) {
  if constexpr (D == DType::f32) {
    const float4* from = reinterpret_cast<const float4*>(static_cast<const float*>(row) + col);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float4 four = __ldg(from + i);
      values[4 * i] = four.x, values[4 * i + 1] = four.y, values[4 * i + 2] = four.z, values[4 * i + 3] = four.w;
    }
  } else {
    const uint4 eight = __ldg(reinterpret_cast<const uint4*>(static_cast<const uint16_t*>(row) + col));
    const uint32_t words[4] = {eight.x, eight.y, eight.z, eight.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const uint16_t low = static_cast<uint16_t>(words[i]), high = static_cast<uint16_t>(words[i] >> 16);
      values[2 * i] = D == DType::bf16 ? float_of_bf16(low) : float_of_f16(low);
      values[2 * i + 1] = D == DType::bf16 ? float_of_bf16(high) : float_of_f16(high);
    }
  }
}

// The sum of deviations from `shift`, and that of their squares.
struct Sums {
  float first, second;
};

__device__ __forceinline__ float pairwise(const float (&strand)[8]) {
  return ((strand[0] + strand[1]) + (strand[2] + strand[3])) + ((strand[4] + strand[5]) + (strand[6] + strand[7]));
}

template <DType D, int LANES>
__device__ __forceinline__ Sums thread_sums(const Job& job, const void* row, int lane, float shift) {
  float first[8] = {}, second[8] = {};
  const int64_t whole = job.vectors ? job.cols / 8 * 8 : 0;
#pragma unroll 2
  for (int64_t col = 8 * lane; col < whole; col += 8 * LANES) {
    float values[8];
    load8<D>(row, col, values);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const float deviation = values[i] - shift;
      first[i] += deviation;
      second[i] = fmaf(deviation, deviation, second[i]);
    }
  }
  // The remainder, or everything if rows are not aligned to 16 bytes: strand by strand.
  for (int64_t base = whole; base < job.cols; base += 8 * LANES) {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const int64_t col = base + lane + LANES * i;
      if (col < job.cols) {
        const float deviation = element<D>(row, col) - shift;
        first[i] += deviation;
        second[i] = fmaf(deviation, deviation, second[i]);
      }
    }
  }
  return {pairwise(first), pairwise(second)};
}

// Sums over the row's threads, the same in all of them. Ends with a barrier, after which `scratch` may be overwritten.
template <int LANES>
__device__ __forceinline__ Sums row_sums(Sums sums, float2* scratch) {
#pragma unroll
  for (int mask = 16; mask > 0; mask /= 2) {
    sums.first += __shfl_xor_sync(ALL, sums.first, mask);
    sums.second += __shfl_xor_sync(ALL, sums.second, mask);
  }
  if constexpr (LANES > 32) {
    constexpr int warps = LANES / 32;
    if (threadIdx.x % 32 == 0) scratch[threadIdx.x / 32] = {sums.first, sums.second};
    __syncthreads();
    float2 part = scratch[threadIdx.x % warps];
#pragma unroll
    for (int mask = warps / 2; mask > 0; mask /= 2) {
      part.x += __shfl_xor_sync(ALL, part.x, mask);
      part.y += __shfl_xor_sync(ALL, part.y, mask);
    }
    __syncthreads();
    sums = {part.x, part.y};
  }
  return sums;
}

template <DType D, int LANES, bool with_mean>
__global__ void __launch_bounds__(THREADS) norm_kernel(const __grid_constant__ Job job) {
  __shared__ float2 scratch[THREADS / 32];
  if (job.unchanged != nullptr && __ldg(job.unchanged) != 0) return;
  const int64_t rows = job.plan ? __ldg(job.plan) : job.rows;
  constexpr int each = THREADS / LANES;
  const int lane = threadIdx.x % LANES;
  const float count = static_cast<float>(job.cols);
  for (int64_t row = int64_t{blockIdx.x} * each + threadIdx.x / LANES; row < rows; row += int64_t{gridDim.x} * each) {
    const void* at = static_cast<const uint8_t*>(job.x) + row * job.row_stride * dtype_bytes(D);
    float mean = 0.0f;
    if constexpr (with_mean) mean = row_sums<LANES>(thread_sums<D, LANES>(job, at, lane, 0.0f), scratch).first / count;
    const Sums sums = row_sums<LANES>(thread_sums<D, LANES>(job, at, lane, mean), scratch);
    float mean_square = sums.second / count;
    float rest = 0.0f;
    if constexpr (with_mean) {
      rest = sums.first / count;
      const float corrected = fmaf(-rest, rest, mean_square);
      mean_square = corrected < 0.0f ? 0.0f : corrected;  // keeps NaN
    }
    if (lane == 0) {
      if constexpr (with_mean) {
        job.to.mean[row] = mean;
        job.to.rest[row] = rest;
      }
      job.to.rstd[row] = __fdiv_rn(1.0f, __fsqrt_rn(mean_square + job.epsilon));
    }
  }
}

constexpr int64_t LONG_ROW = 2048;  // from here on one CTA per row

template <DType D, bool with_mean>
Error launch(const Job& job, cudaStream_t stream) {
  if (job.cols < LONG_ROW) {
    const unsigned grid = grid_for(ceil_div(job.rows, THREADS / 32));
    norm_kernel<D, 32, with_mean><<<grid, THREADS, 0, stream>>>(job);
  } else {
    norm_kernel<D, THREADS, with_mean><<<grid_for(job.rows), THREADS, 0, stream>>>(job);
  }
  return launched();
}

template <DType D>
Error launch_norm(const Job& job, Norm norm, cudaStream_t stream) {
  return norm == Norm::layer ? launch<D, true>(job, stream) : launch<D, false>(job, stream);
}

}  // namespace

Error norm_statistics(const Input& x, const Prologue& prologue, const NormStatistics& to, const int32_t* unchanged,
                      cudaStream_t stream) {
  if (to.rstd == nullptr) return invalid("rstd is null and the prologue is norm; give [rows] fp32 for it");
  const Norm norm = prologue.norm;
  if (norm == Norm::layer && (to.mean == nullptr || to.rest == nullptr)) {
    return invalid("mean is null and the prologue is LayerNorm; give [rows] fp32 for it");
  }
  if (x.rows == 0 || x.cols == 0) return {};
  const bool vectors = aligned(x.data, 16) && (x.row_stride * dtype_bytes(x.dtype)) % 16 == 0;
  const Job job = {x.data, x.rows, x.cols, x.row_stride, prologue.epsilon, to, x.plan, unchanged, vectors};
  switch (x.dtype) {
    case DType::f32: return launch_norm<DType::f32>(job, norm, stream);
    case DType::f16: return launch_norm<DType::f16>(job, norm, stream);
    default: return launch_norm<DType::bf16>(job, norm, stream);
  }
}

}  // namespace octavo::cuda
