#include "dprobs.h"

#include "cuda/device/launch.h"
#include "cuda/tile/sources.cuh"

namespace octavo::cuda {
namespace {

constexpr int SUM_THREADS = 256;

__device__ __forceinline__ bool in_use(const int64_t* rows_in_use, int64_t row) {
  return rows_in_use == nullptr || row < __ldg(rows_in_use);
}

__global__ void __launch_bounds__(SUM_THREADS)
    sum_chunks_kernel(const float* sums, int64_t chunks, int64_t rows, const int64_t* rows_in_use, float* out,
                      const int32_t* unchanged) {
  if (unchanged && *unchanged) return;
  const int64_t row = int64_t{blockIdx.x} * SUM_THREADS + threadIdx.x;
  if (row >= rows) return;
  float sum = 0.0f;
  if (in_use(rows_in_use, row)) {
#pragma unroll 8
    for (int64_t chunk = 0; chunk < chunks; ++chunk) sum += __ldg(sums + chunk * rows + row);
  }
  out[row] = canonical(sum);
}

struct Job {
  Input input;
  Activation activation;
  const void* dy;
  int64_t dy_stride;
  int64_t features;
  float* out;
  const int32_t* unchanged;
};

// The sum over a thread's eight columns.
template <class T, bool WIDE, class Name>
__device__ __forceinline__ float eight_products(const Job& job, int64_t row, int64_t col, Name name) {
  const Plain<T> x = {static_cast<const char*>(job.input.data), job.input.row_stride};
  const Plain<T> dy = {static_cast<const char*>(job.dy), job.dy_stride};
  const int64_t to_up = is_gated(name()) ? job.features : 0;
  float sum = 0.0f;
  const auto add = [&](float gate, float up, float grad) {
    sum += Activated<T>::forward(name(), gate, up, 1.0f) * grad;
  };
  if constexpr (WIDE) {
    if (col >= job.features) return sum;
    const Pack<T> gate = x.load(row, col), up = x.load(row, col + to_up), grad = dy.load(row, col);
#pragma unroll
    for (int i = 0; i < 8; ++i) add(gate.value(i), up.value(i), grad.value(i));
  } else {
    for (int i = 0; i < 8; ++i)
      if (col + i < job.features) add(x.value(row, col + i), x.value(row, col + i + to_up), dy.value(row, col + i));
  }
  return sum;
}

// One warp per row, two chunks at a time, in the same order as the tiles that compute chunks on the way.
template <class T, bool WIDE>
__global__ void __launch_bounds__(SUM_THREADS) sum_products_kernel(const __grid_constant__ Job job) {
  static_assert(PRODUCT_CHUNK == 16 * 8);
  if (job.unchanged && *job.unchanged) return;
  const int64_t row = int64_t{blockIdx.x} * (SUM_THREADS / 32) + threadIdx.x / 32;
  if (row >= job.input.rows) return;
  const int lane = static_cast<int>(threadIdx.x % 32);
  float sum = 0.0f;
  if (in_use(job.input.plan, row)) {
    with_activation(job.activation, [&](auto name) {
      for (int64_t col = 0; col < job.features; col += 2 * PRODUCT_CHUNK) {
        float chunk = eight_products<T, WIDE>(job, row, col + lane * 8, name);
#pragma unroll
        for (int bit = 1; bit < 16; bit *= 2) chunk += __shfl_xor_sync(~0u, chunk, bit);
        const float second = __shfl_sync(~0u, chunk, 16);
        sum += chunk;
        if (col + PRODUCT_CHUNK < job.features) sum += second;
      }
    });
  }
  if (lane == 0) job.out[row] = canonical(sum);
}

template <class T>
void launch_products(const Job& job, bool wide, cudaStream_t stream) {
  const auto grid = static_cast<unsigned>(ceil_div(job.input.rows, SUM_THREADS / 32));
  wide ? sum_products_kernel<T, true><<<grid, SUM_THREADS, 0, stream>>>(job)
       : sum_products_kernel<T, false><<<grid, SUM_THREADS, 0, stream>>>(job);
}

}  // namespace

Error sum_chunks(const float* sums, int64_t chunks, const Input& input, float* out, const int32_t* unchanged,
                 void* stream) {
  if (!input.rows) return {};
  const auto grid = static_cast<unsigned>(ceil_div(input.rows, SUM_THREADS));
  // The first word of a plan is the number of rows in use.
  sum_chunks_kernel<<<grid, SUM_THREADS, 0, stream_of(stream)>>>(
      sums, chunks, input.rows, input.matrix_rows ? nullptr : input.plan, out, unchanged);
  return launched();
}

Error sum_products(const Input& input, const Prologue& prologue, int64_t features, bool wide, float* out,
                   const int32_t* unchanged, void* stream) {
  if (!input.rows) return {};
  Job job = {input, prologue.activation, prologue.dy, prologue.dy_stride, features, out, unchanged};
  if (input.matrix_rows) job.input.plan = nullptr;
  switch (input.dtype) {
    case DType::bf16: launch_products<BF16>(job, wide, stream_of(stream)); break;
    case DType::f16: launch_products<F16>(job, wide, stream_of(stream)); break;
    case DType::f32: launch_products<F32>(job, wide, stream_of(stream)); break;
  }
  return launched();
}

}  // namespace octavo::cuda
