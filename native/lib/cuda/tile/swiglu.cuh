// SwiGLU, plain or clamped, and its gradient for tiles whose gates are in registers and whose other inputs are in
// slots.
#pragma once

#include "slots.cuh"
#include "sources.cuh"

namespace octavo::cuda {

// Reloads the gate row: dynamic indexing of a register array would spill to local memory.
template <class Source>
__device__ __forceinline__ Pack<typename Source::Type> reload_gate(const Source& source, const Tile& tile, int row) {
  return load_pack<typename Source::Type>(source.address(0, tile.first_row() + row, tile.col()));
}

// Each of eight neighbouring threads holds the probability of one of their eight rows.
template <class Source>
__device__ __forceinline__ float own_probability(const Source& source, const Tile& tile) {
  const int row = static_cast<int>(threadIdx.x % 8);
  return source.probs && row < tile.live_rows() ? __ldg(source.probs + tile.first_row() + row) : 1.0f;
}

__device__ __forceinline__ float probability_of(float own, int row) { return __shfl_sync(~0u, own, row, 8); }

template <bool CLAMPED>
constexpr Activation swiglu_name = CLAMPED ? Activation::clamped_swiglu : Activation::swiglu;

template <bool CLAMPED, bool want_slope>
__device__ __forceinline__ ValueAndSlope moderate(float gate) {
  if constexpr (CLAMPED) return clamped_moderate<true, want_slope>(gate);
  return silu_moderate<true, want_slope>(gate);
}

// True if `moderate` applies to all gates of the warp.
template <class T>
__device__ __forceinline__ bool all_moderate(const Pack<T> (&gate)[8], bool clamped) {
  using P = Pack<T>;
  uint32_t most = P::maximum(gate[0].word[0], gate[0].word[1]);
#pragma unroll
  for (int i = 0; i < 8; ++i)
#pragma unroll
    for (int k = i ? 0 : 2; k < P::words; ++k) most = P::maximum(most, gate[i].word[k]);
  return __all_sync(~0u, P::fp32_bits(P::across(most), 0) <= bits_of(clamped ? CLAMPED_MODERATE : SILU_MODERATE));
}

// Keeps the compiler from interleaving many values, for which there are no registers.
__device__ __forceinline__ void order_barrier(uint32_t& word) { asm volatile("" : "+r"(word)::"memory"); }

// MODERATE: `moderate` applies to all eight gates.
template <bool MODERATE, bool CLAMPED, class T>
__device__ __forceinline__ Pack<T> activate(Pack<T> gate, const Pack<T>& up, float prob) {
  Pack<T> out;
#pragma unroll
  for (int pair = 0; pair < 4; ++pair) {
    float results[2];
    if (!MODERATE) order_barrier(gate.word[pair]);
#pragma unroll
    for (int k = 0; k < 2; ++k) {
      const float g = gate.value(2 * pair + k), u = up.value(2 * pair + k);
      results[k] = MODERATE ? moderate<CLAMPED, false>(g).value * gated_factor(swiglu_name<CLAMPED>, u) * prob
                            : Activated<T>::forward(swiglu_name<CLAMPED>, g, u, prob);
    }
    out.set(pair, results[0], results[1]);
  }
  return out;
}

// Replaces the gates in `values` by `result(moderate, gate, row, prob)`, of the first `live` rows. `moderate`, a
// constant: whether `moderate` applies to the row's gates.
template <bool CLAMPED, class Source, class T, class Result>
__device__ __forceinline__ void replace_gates(const Source& source, const Tile& tile, float own, int live,
                                              Pack<T> (&values)[8], const Result& result) {
  if (all_moderate(values, CLAMPED)) {
    // One branch per row: without it the compiler would interleave all rows.
#pragma unroll
    for (int row = 0; row < 8; ++row) {
      const float prob = probability_of(own, row);
      if (row < live) values[row] = result(std::true_type{}, values[row], row, prob);
    }
    return;
  }
  // Not unrolled, because it is rare and long.
#pragma unroll 1
  for (int row = 0; row < 8; ++row) {
    const float prob = probability_of(own, row);
    if (row >= live) continue;
    const Pack<T> made = result(std::false_type{}, reload_gate(source, tile, row), row, prob);
#pragma unroll
    for (int k = 0; k < 8; ++k)
      if (row == k) values[k] = made;
  }
}

template <bool CLAMPED, class T>
__device__ __forceinline__ void make_as(const Swiglu<T>& source, const Tile& tile, float own, Pack<T> (&values)[8],
                                        void* slots) {
  const int live = tile.col() < tile.end ? tile.live_rows() : 0;
  replace_gates<CLAMPED>(source, tile, own, live, values, [&](auto moderate, const Pack<T>& gate, int row, float prob) {
    return activate<moderate(), CLAMPED>(gate, Slots<T>::load(slots, 0, row), prob);
  });
}

// Replaces the gates in `values` by the values to quantize, once the slots are loaded. Rows past the group's end stay
// zero.
template <class T>
__device__ __forceinline__ void make(const Swiglu<T>& source, const Tile& tile, float own, Pack<T> (&values)[8],
                                     void* slots) {
  wait_for_slots();
  // A branch, and no template argument of the kernel: that would be one more of each.
  source.clamped ? make_as<true>(source, tile, own, values, slots) : make_as<false>(source, tile, own, values, slots);
}

// ---- the gradient

// Butterfly reduction of eight rows' sums over 8 lanes, in one fixed order: rows are folded in bit-reversed order, and
// lane l ends with row bitreverse3(l).
__device__ __forceinline__ constexpr int reversed(int three_bits) {
  return (three_bits & 1) << 2 | (three_bits & 2) | (three_bits & 4) >> 2;
}

__device__ __forceinline__ float fold(float first, float second, int bit) {
  const bool upper = threadIdx.x & bit;
  return (upper ? second : first) + __shfl_xor_sync(~0u, upper ? first : second, bit);
}

// Performs the folds that are possible once sum `at`, that of row `reversed(at)`, is known.
__device__ __forceinline__ void fold_sums(float (&sums)[8], int at) {
  if (at % 2 == 1) sums[at - 1] = fold(sums[at - 1], sums[at], 1);
  if (at % 4 == 3) sums[at - 3] = fold(sums[at - 3], sums[at - 1], 2);
  if (at == 7) sums[0] = fold(sums[0], sums[4], 4);
}

// Stores the folded sums to the source's products: the columns of 16 threads are one chunk.
template <class T>
__device__ __forceinline__ void store_products(const SwigluGrad<T>& source, const Tile& tile, float sum) {
  sum += __shfl_xor_sync(~0u, sum, 8);
  const int lane = static_cast<int>(threadIdx.x % 16), row = reversed(lane), chunk = tile.col() / PRODUCT_CHUNK;
  if (lane < 8 && row < tile.live_rows() && chunk * PRODUCT_CHUNK < source.features)
    source.products[chunk * source.rows + tile.first_row() + row] = sum;
}

// The gradients of eight gates and of their up projections, and where FORWARD what `activate` gives; returns their
// contribution to the row's products.
template <bool MODERATE, bool CLAMPED, bool FORWARD, class T>
__device__ __forceinline__ float gradients(Pack<T> gate, const Pack<T>& up, const Pack<T>& dy, float prob,
                                           Pack<T>& dgate, Pack<T>& dup, Pack<T>& forward) {
  float sum = 0.0f;
#pragma unroll
  for (int pair = 0; pair < 4; ++pair) {
    float of_gate[2], of_up[2], values[2];
    if (!MODERATE) order_barrier(gate.word[pair]);
#pragma unroll
    for (int k = 0; k < 2; ++k) {
      const float g = gate.value(2 * pair + k), u = up.value(2 * pair + k), d = dy.value(2 * pair + k);
      constexpr Activation name = swiglu_name<CLAMPED>;
      const ValueAndSlope parts = MODERATE ? moderate<CLAMPED, true>(g) : parts_of<T, true, true>(name, g);
      const float grad = d * prob, factor = gated_factor(name, u);
      of_gate[k] = (grad * parts.slope) * factor;
      of_up[k] = up_passes(name, u) ? grad * parts.value : 0.0f;
      const float value = parts.value * factor;
      values[k] = value * prob;
      sum += value * d;
    }
    dgate.set(pair, of_gate[0], of_gate[1]);
    dup.set(pair, of_up[0], of_up[1]);
    if constexpr (FORWARD) forward.set(pair, values[0], values[1]);
  }
  return sum;
}

// Writes one row's gradients to the slots, that of up where UP, and returns its contribution to the row's products.
template <bool MODERATE, bool CLAMPED, bool UP, class T>
__device__ __forceinline__ float differentiate(const Pack<T>& gate, float prob, int row, void* slots) {
  const Pack<T> dy = Slots<T>::load(slots, 0, row), up = Slots<T>::load(slots, 1, row);
  Pack<T> dgate, dup, none;
  const float sum = gradients<MODERATE, CLAMPED, false>(gate, up, dy, prob, dgate, dup, none);
  Slots<T>::store(slots, 0, row, dgate);
  if constexpr (UP) Slots<T>::store(slots, 1, row, dup);
  return sum;
}

// The same of the first `live` rows. Returns the folded sums.
template <bool CLAMPED, bool UP, class Source, class T>
__device__ __forceinline__ float differentiate_rows(const Source& source, const Tile& tile, float own, int live,
                                                    const Pack<T> (&gate)[8], void* slots) {
  float sums[8];
  if (all_moderate(gate, CLAMPED)) {
    // Even rows, then odd ones: code for all of them would not fit the instruction cache beside what follows.
    Pack<T> gates[4];
#pragma unroll
    for (int at = 0; at < 4; ++at) gates[at] = gate[reversed(at)];
#pragma unroll 1
    for (int odd = 0; odd < 2; ++odd) {
#pragma unroll
      for (int at = 0; at < 4; ++at) {
        const int row = reversed(at) + odd;
        const float prob = probability_of(own, row);
        sums[at] = 0.0f;
        if (row < live) sums[at] = differentiate<true, CLAMPED, UP>(gates[at], prob, row, slots);
        fold_sums(sums, at);
        gates[at] = gate[reversed(at) + 1];
      }
      if (odd) {
        sums[0] = fold(sums[4], sums[0], 4);
      } else {
        sums[4] = sums[0];
      }
    }
  } else {
#pragma unroll 1
    for (int row = 0; row < 8; ++row) {
      const float prob = probability_of(own, row);
      const float sum =
          row < live ? differentiate<false, CLAMPED, UP>(reload_gate(source, tile, row), prob, row, slots) : 0.0f;
#pragma unroll
      for (int k = 0; k < 8; ++k)
        if (row == k) sums[reversed(k)] = sum;
    }
#pragma unroll
    for (int at = 0; at < 8; ++at) fold_sums(sums, at);
  }
  return sums[0];
}

// Replaces dy and up in the slots, once they are loaded, by the gradients of gate and up. Rows past the group's end
// stay zero.
template <class T>
__device__ __forceinline__ void make(const SwigluGrad<T>& source, const Tile& tile, float own, const Pack<T> (&gate)[8],
                                     void* slots) {
  wait_for_slots();
  const int live = tile.col() < tile.end ? tile.live_rows() : 0;
  const float sum = source.clamped ? differentiate_rows<true, true>(source, tile, own, live, gate, slots)
                                   : differentiate_rows<false, true>(source, tile, own, live, gate, slots);
  if (source.products) store_products(source, tile, sum);
}

template <bool MODERATE, bool CLAMPED, class T>
__device__ __forceinline__ Pack<T> gradient_of_up(Pack<T> gate, const Pack<T>& up, const Pack<T>& dy, float prob) {
  constexpr Activation name = swiglu_name<CLAMPED>;
  Pack<T> out;
#pragma unroll
  for (int pair = 0; pair < 4; ++pair) {
    float results[2];
    if (!MODERATE) order_barrier(gate.word[pair]);
#pragma unroll
    for (int k = 0; k < 2; ++k) {
      const float g = gate.value(2 * pair + k), grad = dy.value(2 * pair + k) * prob;
      const float value = MODERATE ? moderate<CLAMPED, false>(g).value : parts_of<T, true, false>(name, g).value;
      results[k] = up_passes(name, up.value(2 * pair + k)) ? grad * value : 0.0f;
    }
    out.set(pair, results[0], results[1]);
  }
  return out;
}

// Whole warps enter each branch, and both where F lies within the columns of one.
template <bool CLAMPED, class T>
__device__ __forceinline__ void make_as(const JoinedSwigluGrad<T>& source, const Tile& tile, float own,
                                        Pack<T> (&values)[8], void* slots) {
  const bool is_up = tile.col() >= source.features;
  const int live = tile.col() < tile.end ? tile.live_rows() : 0;
  const bool any_gate = __any_sync(~0u, !is_up);
  if (any_gate) {
    const float sum = differentiate_rows<CLAMPED, false>(source, tile, own, is_up ? 0 : live, values, slots);
    if (source.products) store_products(source, tile, sum);
  }
  if (__any_sync(~0u, is_up))
    replace_gates<CLAMPED>(source, tile, own, is_up ? live : 0, values,
                           [&](auto moderate, const Pack<T>& gate, int row, float prob) {
                             return gradient_of_up<moderate(), CLAMPED>(gate, Slots<T>::load(slots, 1, row),
                                                                        Slots<T>::load(slots, 0, row), prob);
                           });
  if (!is_up) {
#pragma unroll
    for (int i = 0; i < 8; ++i) values[i] = Slots<T>::load(slots, 0, i);
  }
}

// Replaces the gates in `values` by the values to quantize, once the slots are loaded. Rows past the group's end stay
// zero.
template <class T>
__device__ __forceinline__ void make(const JoinedSwigluGrad<T>& source, const Tile& tile, float own,
                                     Pack<T> (&values)[8], void* slots) {
  wait_for_slots();
  source.clamped ? make_as<true>(source, tile, own, values, slots) : make_as<false>(source, tile, own, values, slots);
}

}  // namespace octavo::cuda
