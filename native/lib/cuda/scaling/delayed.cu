// Delayed scaling: recording a step's amaxes, and the scales of the next step.
//
//   record   reads amax [operands, G], reads and writes as much of the history
//   update   reads and writes history [operands, slots, G] and scale [operands, G], once
//   bound    latency: a few hundred KB at most
//
// In `update` a CTA owns 32 groups of one operand, one per lane. Its warps take neighbouring slots, block by block from
// the first on: a block is read completely before its rows move by one slot, so the history can move in place.
#include "octavo/delayed.h"

#include <cfloat>

#include "cuda/device/launch.h"

namespace octavo {

namespace cuda {
namespace {

constexpr int RECORD_THREADS = 256;
constexpr int LANES = 32;
constexpr int WARPS = 16;
constexpr int ROWS = 16;  // per thread and block

__global__ void __launch_bounds__(RECORD_THREADS) record_kernel(const __grid_constant__ RecordArgs args) {
  const int64_t i = int64_t{blockIdx.x} * RECORD_THREADS + threadIdx.x;
  if (i >= args.operands * args.groups) return;
  float* slot = args.history + i / args.groups * args.slots * args.groups + i % args.groups;
  const float amax = args.amax[i];
  if (amax > *slot) *slot = amax;
}

// The larger one; NaN wins over any number.
__device__ float maximum(float a, float b) { return isnan(a) || a > b ? a : b; }

__device__ float last_amax(const UpdateArgs& args, int64_t column, float recorded) {
  if (args.reduced == nullptr) return recorded;
  const float reduced = args.reduced[column];
  return reduced != 0.0f && !isnan(reduced) ? reduced : recorded;
}

__global__ void __launch_bounds__(LANES* WARPS) update_kernel(const __grid_constant__ UpdateArgs args) {
  __shared__ float maxima[WARPS][LANES];
  const int warp = threadIdx.x / LANES, lane = threadIdx.x % LANES, operand = blockIdx.y;
  const int64_t group = int64_t{blockIdx.x} * LANES + lane;
  const bool present = group < args.groups;
  const int64_t column = operand * args.groups + group;
  float* history = args.history + operand * args.slots * args.groups + group;
  const auto slot = [&](int64_t number) -> float& { return history[number * args.groups]; };

  const float last = present ? last_amax(args, column, slot(0)) : 0.0f;
  const bool seen = last != 0.0f;
  float amax = last;
  if (seen && warp == 0) amax = maximum(amax, slot(1));
  for (int64_t first = 1; first < args.slots - 1; first += WARPS * ROWS) {
    float values[ROWS];
#pragma unroll
    for (int i = 0; i < ROWS; ++i) {
      const int64_t number = first + i * WARPS + warp;
      values[i] = seen && number < args.slots - 1 ? slot(number + 1) : 0.0f;
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < ROWS; ++i) {
      const int64_t number = first + i * WARPS + warp;
      if (!seen || number >= args.slots - 1) continue;
      slot(number) = values[i];
      amax = maximum(amax, values[i]);
    }
  }
  maxima[warp][lane] = amax;
  __syncthreads();
  if (warp != 0 || !seen) return;
  for (int other = 1; other < WARPS; ++other) amax = maximum(amax, maxima[other][lane]);
  slot(0) = 0.0f;
  slot(args.slots - 1) = last;
  if (args.most_recent) amax = last;
  if (amax > 0.0f && isfinite(amax)) args.scale[column] = fminf(__fdiv_rn(args.maxima[operand], amax), FLT_MAX);
}

}  // namespace
}  // namespace cuda

Error record_cuda(const RecordArgs& args, void* stream) {
  if (const Error error = check_record(args)) return error;
  const auto blocks = static_cast<unsigned>(ceil_div(args.operands * args.groups, cuda::RECORD_THREADS));
  cuda::record_kernel<<<blocks, cuda::RECORD_THREADS, 0, cuda::stream_of(stream)>>>(args);
  return cuda::launched();
}

Error update_cuda(const UpdateArgs& args, void* stream) {
  if (const Error error = check_update(args)) return error;
  const dim3 blocks(static_cast<unsigned>(ceil_div(args.groups, cuda::LANES)), static_cast<unsigned>(args.operands));
  cuda::update_kernel<<<blocks, cuda::LANES * cuda::WARPS, 0, cuda::stream_of(stream)>>>(args);
  return cuda::launched();
}

}  // namespace octavo
