// SwiGLU and its gradient from bf16 to bf16, without codes.
//
//              reads            writes                bytes for each of M F
//   forward    gate, up         act(gate) up prob     6
//   gradient   gate, up, dy     both gradients        10, and 2 for the forward's values beside them
//   bound      device memory
//
// Sixteen threads have a chunk of 128 columns of a row, eight columns each. Chunks are numbered row by row, so that
// rows of few columns leave no thread idle. AT_ONCE: chunks that a thread loads before it computes with the first.
#include "swiglu_values.h"

#include "cuda/device/divisor.cuh"
#include "cuda/tile/swiglu.cuh"

namespace octavo::cuda {
namespace {

// 36 warps per multiprocessor, with 56 registers per thread: 32 warps with 64 have too few loads on their way.
constexpr int VALUE_THREADS = 128, VALUE_CTAS = 9;
constexpr int CHUNK_LANES = PRODUCT_CHUNK / 8, CHUNKS = VALUE_THREADS / CHUNK_LANES;

template <class S>
struct ValuesArgs {
  S source;
  ValuesOut out;
  uint32_t chunks;  // of a row. M chunks < 2^31, as Divisor needs: M is at most 2^30, and 2^31 chunks fit no device
  Divisor by_chunks;
};

// A thread's eight columns of one row. Rows and columns fit 32 bits, for which there are registers.
struct Place {
  uint32_t row, col;
  bool inside;
};

template <class S>
__device__ __forceinline__ Place place_of(const ValuesArgs<S>& args, uint32_t number, int64_t rows) {
  const uint32_t row = args.by_chunks.quotient(number), chunk = number - row * args.chunks;
  const uint32_t col = chunk * PRODUCT_CHUNK + threadIdx.x % CHUNK_LANES * 8;
  return {row, col, row < rows && col < args.source.features};
}

// The largest magnitude as fp32 bits; NaN above all.
__device__ __forceinline__ uint32_t greatest(const Pack<BF16>& values) {
  using P = Pack<BF16>;
  const uint32_t most =
      P::maximum(P::maximum(values.word[0], values.word[1]), P::maximum(values.word[2], values.word[3]));
  return P::fp32_bits(P::across(most), 0);
}

// True if `moderate` applies to all gates of the warp.
__device__ __forceinline__ bool is_moderate(const Pack<BF16>& gate, bool clamped) {
  return __all_sync(~0u, greatest(gate) <= bits_of(clamped ? CLAMPED_MODERATE : SILU_MODERATE));
}

__device__ __forceinline__ void store_values(void* to, int64_t at, Pack<BF16> values) {
  // Two instructions for each value, which few packs need.
  if (greatest(values) > INF_BITS) make_canonical(values);
  store_pack(static_cast<char*>(to) + at * Pack<BF16>::bytes, values);
}

template <class S>
__device__ __forceinline__ float probability(const S& source, const Place& place) {
  return source.probs && place.inside ? __ldg(source.probs + place.row) : 1.0f;
}

template <bool CLAMPED>
struct Forward {
  using Source = Swiglu<BF16>;
  static constexpr int AT_ONCE = 2;
  Pack<BF16> gate, up;
  float prob;

  __device__ __forceinline__ void load(const Source& source, const Place& place) {
    gate = place.inside ? source.x.load(place.row, place.col) : zeros<BF16>();
    up = place.inside ? source.x.load(place.row, place.col + source.features) : zeros<BF16>();
    prob = probability(source, place);
  }
  __device__ __forceinline__ void store(const Source& source, const ValuesOut& out, const Place& place) const {
    const Pack<BF16> values =
        is_moderate(gate, CLAMPED) ? activate<true, CLAMPED>(gate, up, prob) : activate<false, CLAMPED>(gate, up, prob);
    if (place.inside) store_values(out.to, place.row * source.features + place.col, values);
  }
};

template <bool CLAMPED, bool FORWARD>
struct Gradient {
  using Source = SwigluGrad<BF16>;
  static constexpr int AT_ONCE = 1;
  Pack<BF16> gate, up, dy;
  float prob;

  __device__ __forceinline__ void load(const Source& source, const Place& place) {
    gate = place.inside ? source.x.load(place.row, place.col) : zeros<BF16>();
    up = place.inside ? source.x.load(place.row, place.col + source.features) : zeros<BF16>();
    dy = place.inside ? source.dy.load(place.row, place.col) : zeros<BF16>();
    prob = probability(source, place);
  }
  __device__ __forceinline__ void store(const Source& source, const ValuesOut& out, const Place& place) const {
    Pack<BF16> dgate, dup, forward;
    float sum = is_moderate(gate, CLAMPED)
                    ? gradients<true, CLAMPED, FORWARD>(gate, up, dy, prob, dgate, dup, forward)
                    : gradients<false, CLAMPED, FORWARD>(gate, up, dy, prob, dgate, dup, forward);
    if (place.inside) {
      const int64_t at = 2 * (place.row * source.features) + place.col;
      store_values(out.to, at, dgate);
      store_values(out.to, at + source.features, dup);
    }
    if constexpr (FORWARD) {
      if (place.inside) store_values(out.forward, place.row * source.features + place.col, forward);
    }
    if (!source.products) return;
    // The order in which tiles fold sums (tile/swiglu.cuh).
#pragma unroll
    for (int bit = 1; bit < CHUNK_LANES; bit *= 2) sum += __shfl_xor_sync(~0u, sum, bit);
    // A chunk's first column is inside if any is.
    if (threadIdx.x % CHUNK_LANES == 0 && place.inside)
      source.products[place.col / PRODUCT_CHUNK * source.rows + place.row] = sum;
  }
};

template <class Values>
__global__ void __launch_bounds__(VALUE_THREADS, VALUE_CTAS)
    swiglu_values_kernel(const __grid_constant__ ValuesArgs<typename Values::Source> args) {
  if (args.out.unchanged && *args.out.unchanged) return;
  const int64_t rows = args.out.rows_in_use ? min(__ldg(args.out.rows_in_use), args.out.rows) : args.out.rows;
  const uint32_t first = blockIdx.x * (CHUNKS * Values::AT_ONCE) + threadIdx.x / CHUNK_LANES;
  Place places[Values::AT_ONCE];
  Values values[Values::AT_ONCE];
#pragma unroll
  for (int i = 0; i < Values::AT_ONCE; ++i) {
    places[i] = place_of(args, first + i * CHUNKS, rows);
    values[i].load(args.source, places[i]);
  }
#pragma unroll
  for (int i = 0; i < Values::AT_ONCE; ++i) values[i].store(args.source, args.out, places[i]);
}

template <class Values, class Source>
void launch(const Source& source, const ValuesOut& out, cudaStream_t stream) {
  const auto chunks = static_cast<uint32_t>(ceil_div(source.features, PRODUCT_CHUNK));
  const int64_t count = out.rows * chunks;
  if (!count) return;
  const ValuesArgs<Source> args{source, out, chunks, Divisor::of(chunks)};
  const auto grid = static_cast<uint32_t>(ceil_div(count, CHUNKS * Values::AT_ONCE));
  swiglu_values_kernel<Values><<<grid, VALUE_THREADS, 0, stream>>>(args);
}

}  // namespace

void swiglu_values(const Swiglu<BF16>& source, const ValuesOut& out, cudaStream_t stream) {
  source.clamped ? launch<Forward<true>>(source, out, stream) : launch<Forward<false>>(source, out, stream);
}

void swiglu_values(const SwigluGrad<BF16>& source, const ValuesOut& out, cudaStream_t stream) {
  if (out.forward)
    return source.clamped ? launch<Gradient<true, true>>(source, out, stream)
                          : launch<Gradient<false, true>>(source, out, stream);
  source.clamped ? launch<Gradient<true, false>>(source, out, stream)
                 : launch<Gradient<false, false>>(source, out, stream);
}

}  // namespace octavo::cuda
