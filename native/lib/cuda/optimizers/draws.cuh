// Random bits of a step: Philox, and what many of its calls share.
#pragma once

#include "steps.cuh"

namespace octavo::cuda {

// A lane's random bits in a pair of rows: two words for each row, of which element i has half i % 2 of word i / 2. A
// counter is of eight columns, so of two lanes: the even one works out the upper row's, the odd one the lower row's,
// and they swap halves.
struct PairDraws {
  uint32_t word[4];  // two of the upper row, two of the lower
  __device__ uint32_t draw(int row, int i) const { return word[2 * row + i / 2] >> (16 * (i % 2)) & 0xFFFFu; }
};

__device__ __forceinline__ PairDraws pair_draws(const PhiloxKeys& keys, uint32_t row, uint32_t col, uint32_t step,
                                                uint32_t stream) {
  const bool odd = threadIdx.x % 2;
  const Words words =
      philox(row + (odd ? 1u : 0u), col / 8, step, stream, [&](int round) { return keys.round[round]; });
  PairDraws draws;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const uint32_t own = odd ? words.word[2 + i] : words.word[i], other = odd ? words.word[i] : words.word[2 + i];
    const uint32_t swapped = __shfl_xor_sync(~0u, other, 1);
    draws.word[i] = odd ? swapped : own;
    draws.word[2 + i] = odd ? own : swapped;
  }
  return draws;
}

// ---- eight columns of one row: a whole counter. Its words are the row, the columns, the step and the stream, of which
// the first three rounds multiply few at a time: products of the row and the stream are worked out once per row, those
// of the columns once per lane, and 14 of 20 are left.

struct Product {
  uint32_t high, low;
};

__device__ __forceinline__ Product product(uint32_t a, uint32_t b) {
  const uint64_t whole = static_cast<uint64_t>(a) * b;
  return {static_cast<uint32_t>(whole >> 32), static_cast<uint32_t>(whole)};
}

constexpr uint32_t PHILOX_FIRST = 0xD2511F53u, PHILOX_SECOND = 0xCD9E8D57u;

// Of word 0 after the first round, which is the same for all rows and streams.
__device__ __forceinline__ Product column_part(const PhiloxKeys& keys, uint32_t step, uint32_t eight) {
  return product(product(step, PHILOX_SECOND).high ^ eight ^ keys.round[0].first, PHILOX_FIRST);
}

// What the first three rounds have of a row and a stream, with their keys.
struct alignas(16) RowPart {
  uint32_t second;   // of word 2 after the second round, the same for all streams
  uint32_t word[3];  // of words 0, 2 and 3 after the third
};

__device__ __forceinline__ RowPart row_part(const PhiloxKeys& keys, uint32_t step, uint32_t row, uint32_t stream) {
  const Product first = product(row, PHILOX_FIRST);
  const Product second = product(first.high ^ stream ^ keys.round[0].second, PHILOX_SECOND);
  const Product third = product(second.high ^ product(step, PHILOX_SECOND).low ^ keys.round[1].first, PHILOX_FIRST);
  return {first.low ^ keys.round[1].second,
          {second.low ^ keys.round[2].first, third.high ^ keys.round[2].second, third.low}};
}

// The draws of eight columns in all streams at once, so that each round's keys are loaded once.
template <int STREAMS>
__device__ __forceinline__ void eight_draws(Words (&words)[STREAMS], const PhiloxKeys& keys,
                                            const RowPart (&rows)[STREAMS], const Product& column) {
  // the third round's product of a row and eight columns is of all streams
  const Product shared = product(column.high ^ rows[0].second, PHILOX_SECOND);
#pragma unroll
  for (int k = 0; k < STREAMS; ++k) {
    words[k] = {{shared.high ^ rows[k].word[0], shared.low, column.low ^ rows[k].word[1], rows[k].word[2]}};
  }
#pragma unroll
  for (int round = 3; round < PHILOX_ROUNDS; ++round) {
    const RoundKeys both = keys.round[round];
#pragma unroll
    for (int k = 0; k < STREAMS; ++k) {
      uint32_t (&c)[4] = words[k].word;
      const Product first = product(c[0], PHILOX_FIRST), second = product(c[2], PHILOX_SECOND);
      c[0] = second.high ^ c[1] ^ both.first;
      c[2] = first.high ^ c[3] ^ both.second;
      c[1] = second.low;
      c[3] = first.low;
    }
  }
}

}  // namespace octavo::cuda
