// Maximum magnitudes of rows, columns and warps, and the Hadamard transform along the rows' axis.
#pragma once

#include "tile.cuh"

namespace octavo::cuda {

// The number of lanes that share a row's scaling unit, up to 8, and how many of the eight rows each of them owns.
template <int LANES>
constexpr int sharing_lanes() {
  return LANES < 8 ? LANES : 8;
}

template <int LANES>
constexpr int own_rows() {
  return 8 / sharing_lanes<LANES>();
}

// Maximum magnitudes of a lane's own rows, two rows per word if values have 16 bits.
template <int LANES, class T>
struct RowMaxima {
  static constexpr int rows = own_rows<LANES>(), per_word = Pack<T>::per_word;
  uint32_t word[rows < per_word ? 1 : rows / per_word];

  // Of own row k.
  __device__ uint32_t fp32_bits(int k) const {
    const int half = rows < per_word ? static_cast<int>(threadIdx.x % per_word) : k % per_word;
    return Pack<T>::fp32_bits(word[k / per_word], half);
  }
};

// One butterfly step: a lane sends the word that its partner keeps, and returns the maximum of the other one.
template <class T>
__device__ __forceinline__ uint32_t exchanged_maximum(uint32_t first, uint32_t second, int bit) {
  const bool upper = threadIdx.x & bit;
  return Pack<T>::maximum(upper ? second : first, __shfl_xor_sync(~0u, upper ? first : second, bit));
}

// Among LANES neighbouring threads (16: the tile's 128 columns).
template <int LANES, class T>
__device__ __forceinline__ RowMaxima<LANES, T> row_maxima(const Pack<T> (&values)[8]) {
  using P = Pack<T>;
  uint32_t rows[8];
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    uint32_t most = P::maximum(values[i].word[0], values[i].word[1]);
#pragma unroll
    for (int k = 2; k < P::words; ++k) most = P::maximum(most, values[i].word[k]);
    rows[i] = most;
  }
  int words = 8 / P::per_word;
  if constexpr (P::per_word == 2) {
#pragma unroll
    for (int k = 0; k < 4; ++k)
      rows[k] = P::maximum(__byte_perm(rows[2 * k], rows[2 * k + 1], 0x5410),
                           __byte_perm(rows[2 * k], rows[2 * k + 1], 0x7632));
  }
#pragma unroll
  for (int bit = sharing_lanes<LANES>() / 2; bit; bit /= 2) {
    // This bit of the lane index selects which half of the remaining rows the lane keeps.
    if (words > 1) {
      words /= 2;
#pragma unroll
      for (int k = 0; k < 4; ++k)
        if (k < words) rows[k] = exchanged_maximum<T>(rows[k], rows[k + words], bit);
    } else {
      rows[0] = P::maximum(rows[0], __shfl_xor_sync(~0u, rows[0], bit));
    }
  }
  if constexpr (LANES == 16) rows[0] = P::maximum(rows[0], __shfl_xor_sync(~0u, rows[0], 8));
  RowMaxima<LANES, T> result;
#pragma unroll
  for (int k = 0; k < static_cast<int>(sizeof(result.word) / 4); ++k) result.word[k] = rows[k];
  return result;
}

// Maximum magnitudes of the thread's columns over the warp's 16 rows, as words.
template <class T>
__device__ __forceinline__ void column_maxima(const Pack<T> (&values)[8], uint32_t (&words)[Pack<T>::words]) {
  using P = Pack<T>;
#pragma unroll
  for (int k = 0; k < P::words; ++k) {
    uint32_t most = P::maximum(values[0].word[k], values[1].word[k]);
#pragma unroll
    for (int i = 2; i < 8; ++i) most = P::maximum(most, values[i].word[k]);
    words[k] = P::maximum(most, __shfl_xor_sync(~0u, most, 16));
  }
}

// fp32 bits of the maximum magnitude of the thread's values.
template <class T>
__device__ __forceinline__ uint32_t thread_maximum(const Pack<T> (&values)[8]) {
  using P = Pack<T>;
  uint32_t most = 0;
#pragma unroll
  for (int i = 0; i < 8; ++i)
#pragma unroll
    for (int k = 0; k < P::words; ++k) most = P::maximum(most, values[i].word[k]);
  return P::fp32_bits(P::across(most), 0);
}

// The same over the warp; NaN as NAN_BITS.
template <class T>
__device__ __forceinline__ uint32_t warp_maximum(const Pack<T> (&values)[8]) {
  const uint32_t bits = __reduce_max_sync(~0u, thread_maximum(values));
  return bits > INF_BITS ? NAN_BITS : bits;
}

// Skips the atomic if it would change nothing: after a group's first tiles almost none does.
__device__ __forceinline__ void raise(uint32_t* most, uint32_t bits) {
  if (bits > *static_cast<volatile uint32_t*>(most)) atomicMax(most, bits);
}

// The Hadamard transform over runs of 16 rows, eight in each half warp. The results are bf16 values.
template <class T>
__device__ __forceinline__ void hadamard_rows(const Pack<T> (&values)[8], Pack<BF16> (&out)[8]) {
  const bool second_half = threadIdx.x & 16;
#pragma unroll
  for (int pair = 0; pair < 4; ++pair) {
    float column[2][8];
#pragma unroll
    for (int which = 0; which < 2; ++which) {
      float (&x)[8] = column[which];
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        float value = values[i].value(2 * pair + which);
        if constexpr (!std::is_same_v<T, BF16>) value = rounded<BF16>(value);
        const uint32_t negate = HADAMARD_SIGNS >> (second_half ? 8 + i : i) & 1u;
        x[i] = float_of(bits_of(value) ^ negate << 31);
      }
#pragma unroll
      for (int step = 1; step < 8; step *= 2)
#pragma unroll
        for (int i = 0; i < 8; ++i)
          if (!(i & step)) {
            const float a = x[i], b = x[i + step];
            x[i] = a + b;
            x[i + step] = a - b;
          }
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const float other = __shfl_xor_sync(~0u, x[i], 16);
        x[i] = (second_half ? other - x[i] : x[i] + other) * 0.25f;
      }
    }
#pragma unroll
    for (int i = 0; i < 8; ++i) out[i].set(pair, column[0][i], column[1][i]);
  }
}

}  // namespace octavo::cuda
