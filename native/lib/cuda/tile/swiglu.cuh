// SwiGLU and its gradient, of tiles whose gates are in registers and whose other inputs are in slots.
#pragma once

#include "slots.cuh"
#include "sources.cuh"

namespace octavo::cuda {

// A gate's row once more, from memory: of an array in registers it could not be picked by a number without many steps.
template <class Source>
__device__ __forceinline__ Pack<typename Source::Type> gate_again(const Source& source, const Tile& tile, int row) {
  return load_pack<typename Source::Type>(source.address(0, tile.first_row() + row, tile.col()));
}

// Eight neighbouring threads each hold one of their eight rows' probabilities.
template <class Source>
__device__ __forceinline__ float own_probability(const Source& source, const Tile& tile) {
  const int row = static_cast<int>(threadIdx.x % 8);
  return source.probs && row < tile.live_rows() ? __ldg(source.probs + tile.first_row() + row) : 1.0f;
}

__device__ __forceinline__ float probability_of(float own, int row) { return __shfl_sync(~0u, own, row, 8); }

// True where silu_moderate serves all gates of the warp.
template <class T>
__device__ __forceinline__ bool all_moderate(const Pack<T> (&gate)[8]) {
  using P = Pack<T>;
  uint32_t most = P::maximum(gate[0].word[0], gate[0].word[1]);
#pragma unroll
  for (int i = 0; i < 8; ++i)
#pragma unroll
    for (int k = i ? 0 : 2; k < P::words; ++k) most = P::maximum(most, gate[i].word[k]);
  return __all_sync(~0u, P::fp32_bits(P::across(most), 0) <= bits_of(SILU_MODERATE));
}

// Keeps the compiler from working on many values at once, for which there are no registers.
__device__ __forceinline__ void in_turn(uint32_t& word) { asm volatile("" : "+r"(word)::"memory"); }

// MODERATE: silu_moderate serves all eight gates.
template <bool MODERATE, class T>
__device__ __forceinline__ Pack<T> activate(Pack<T> gate, const Pack<T>& up, float prob) {
  Pack<T> out;
#pragma unroll
  for (int pair = 0; pair < 4; ++pair) {
    float made[2];
    if (!MODERATE) in_turn(gate.word[pair]);
#pragma unroll
    for (int k = 0; k < 2; ++k) {
      const float g = gate.value(2 * pair + k), u = up.value(2 * pair + k);
      made[k] = MODERATE ? silu_moderate<true, false>(g).value * u * prob
                         : Activated<T>::forward(Activation::swiglu, g, u, prob);
    }
    out.set(pair, made[0], made[1]);
  }
  return out;
}

// The gates in `values` become what is quantized, once the slots are there; rows past the group's end are zeros and
// stay so.
template <class T>
__device__ __forceinline__ void make(const Swiglu<T>& source, const Tile& tile, float own, Pack<T> (&values)[8],
                                     void* slots) {
  const int live = tile.col() < tile.end ? tile.live_rows() : 0;
  wait_for_slots();
  if (all_moderate(values)) {
    // a branch a row: without it the compiler works on all at once
#pragma unroll
    for (int row = 0; row < 8; ++row) {
      const float prob = probability_of(own, row);
      if (row < live) values[row] = activate<true>(values[row], Slots<T>::load(slots, 0, row), prob);
    }
    return;
  }
  // rolled, because it is rare and long
#pragma unroll 1
  for (int row = 0; row < 8; ++row) {
    const float prob = probability_of(own, row);
    if (row >= live) continue;
    const Pack<T> made = activate<false>(gate_again(source, tile, row), Slots<T>::load(slots, 0, row), prob);
#pragma unroll
    for (int k = 0; k < 8; ++k)
      if (row == k) values[k] = made;
  }
}

// ---- the gradient

// Eight rows' sums over neighbouring threads, in one order whoever asks: rows come in the order of their reversed bits,
// two become one a thread, which of them the lane's bit says, and at the end a lane holds the row of its reversed bits.
__device__ __forceinline__ constexpr int reversed(int three_bits) {
  return (three_bits & 1) << 2 | (three_bits & 2) | (three_bits & 4) >> 2;
}

__device__ __forceinline__ float fold(float first, float second, int bit) {
  const bool upper = threadIdx.x & bit;
  return (upper ? second : first) + __shfl_xor_sync(~0u, upper ? first : second, bit);
}

// What can be folded once the sum number `at`, of row `reversed(at)`, is there.
__device__ __forceinline__ void fold_sums(float (&sums)[8], int at) {
  if (at % 2 == 1) sums[at - 1] = fold(sums[at - 1], sums[at], 1);
  if (at % 4 == 3) sums[at - 3] = fold(sums[at - 3], sums[at - 1], 2);
  if (at == 7) sums[0] = fold(sums[0], sums[4], 4);
}

// The folded sums to the source's products: 16 threads' columns are a chunk.
template <class T>
__device__ __forceinline__ void store_products(const SwigluGrad<T>& source, const Tile& tile, float sum) {
  sum += __shfl_xor_sync(~0u, sum, 8);
  const int lane = static_cast<int>(threadIdx.x % 16), row = reversed(lane), chunk = tile.col() / PRODUCT_CHUNK;
  if (lane < 8 && row < tile.live_rows() && chunk * PRODUCT_CHUNK < tile.end)
    source.products[chunk * source.rows + tile.first_row() + row] = sum;
}

// One row's gradients into the slots, and what it adds to the row's products.
template <bool MODERATE, class T>
__device__ __forceinline__ float differentiate(Pack<T> gate, float prob, int row, void* slots) {
  const Pack<T> dy = Slots<T>::load(slots, 0, row), up = Slots<T>::load(slots, 1, row);
  Pack<T> dgate, dup;
  float sum = 0.0f;
#pragma unroll
  for (int pair = 0; pair < 4; ++pair) {
    float of_gate[2], of_up[2];
    if (!MODERATE) in_turn(gate.word[pair]);
#pragma unroll
    for (int k = 0; k < 2; ++k) {
      const float g = gate.value(2 * pair + k), u = up.value(2 * pair + k), d = dy.value(2 * pair + k);
      const ValueAndSlope parts =
          MODERATE ? silu_moderate<true, true>(g) : parts_of<T, true, true>(Activation::swiglu, g);
      const float grad = d * prob;
      of_gate[k] = (grad * parts.slope) * u;
      of_up[k] = grad * parts.value;
      sum += (parts.value * u) * d;
    }
    dgate.set(pair, of_gate[0], of_gate[1]);
    dup.set(pair, of_up[0], of_up[1]);
  }
  Slots<T>::store(slots, 0, row, dgate);
  Slots<T>::store(slots, 1, row, dup);
  return sum;
}

// The slots' dy and up, once they are there, become the gradients of gate and up; rows past the group's end are zeros
// and stay so.
template <class T>
__device__ __forceinline__ void make(const SwigluGrad<T>& source, const Tile& tile, float own, const Pack<T> (&gate)[8],
                                     void* slots) {
  const int live = tile.col() < tile.end ? tile.live_rows() : 0;
  float sums[8];
  wait_for_slots();
  if (all_moderate(gate)) {
#pragma unroll
    for (int at = 0; at < 8; ++at) {
      const int row = reversed(at);
      const float prob = probability_of(own, row);
      sums[at] = 0.0f;
      if (row < live) sums[at] = differentiate<true>(gate[row], prob, row, slots);
      fold_sums(sums, at);
    }
  } else {
#pragma unroll 1
    for (int row = 0; row < 8; ++row) {
      const float prob = probability_of(own, row);
      const float sum = row < live ? differentiate<false>(gate_again(source, tile, row), prob, row, slots) : 0.0f;
#pragma unroll
      for (int k = 0; k < 8; ++k)
        if (row == k) sums[reversed(k)] = sum;
    }
#pragma unroll
    for (int at = 0; at < 8; ++at) fold_sums(sums, at);
  }
  if (source.products) store_products(source, tile, sums[0]);
}

}  // namespace octavo::cuda
