// expand_mxfp4_cuda: packed E2M1 and its E8M0 scales to values.
//
//   reads   0.5 B/element, and a byte per 32 elements
//   writes  2 B/element (fp32: 4)
//   bound   device memory
#include "cuda/device/launch.h"
#include "cuda/device/values.cuh"

namespace octavo {

namespace cuda {
namespace {

constexpr int THREADS = 256, EACH = 4;  // EACH: pieces of eight elements that a thread expands at most

template <DType D>
__global__ void __launch_bounds__(THREADS) expand(const __grid_constant__ ExpandArgs args) {
  constexpr int pieces = MXFP4_BLOCK / 8;
  const int64_t all = args.blocks * pieces, step = int64_t{gridDim.x} * THREADS;
  for (int64_t piece = int64_t{blockIdx.x} * THREADS + threadIdx.x; piece < all; piece += step) {
    const uint32_t codes = __ldg(reinterpret_cast<const uint32_t*>(args.codes) + piece);
    const float scale = e8m0_value(__ldg(args.scales + piece / pieces));
    float values[8];
    decode4<Format::e2m1>(spread_nibbles(codes & 0xFFFFu), values);
    decode4<Format::e2m1>(spread_nibbles(codes >> 16), values + 4);
#pragma unroll
    for (float& value : values) value *= scale;
    store_values<D, 8>(args.out, piece * 8, values);
  }
}

template <DType D>
Error launch(const ExpandArgs& args, cudaStream_t stream) {
  const int64_t pieces = args.blocks * (MXFP4_BLOCK / 8);
  expand<D><<<grid_for(ceil_div(pieces, THREADS * EACH)), THREADS, 0, stream>>>(args);
  return launched();
}

}  // namespace
}  // namespace cuda

Error expand_mxfp4_cuda(const ExpandArgs& args, void* stream) {
  if (const Error error = check_expand(args)) return error;
  if (args.blocks == 0) return {};
  switch (args.out_dtype) {
    case DType::bf16: return cuda::launch<DType::bf16>(args, cuda::stream_of(stream));
    case DType::f16: return cuda::launch<DType::f16>(args, cuda::stream_of(stream));
    default: return cuda::launch<DType::f32>(args, cuda::stream_of(stream));
  }
}

}  // namespace octavo
