// Loops of the grouped GEMMs. Part of body.h, whose rules apply.
#pragma once

#if defined(__AVX2__)
#include <immintrin.h>
#endif

#include "octavo/numerics.h"

namespace octavo {
namespace {

// 6 x 2 vectors of sums, two of the right operand, one of the left and a product: 16 registers, on SSE as on AVX.
#if defined(__AVX2__)
typedef float Lanes __attribute__((vector_size(32)));
#else
typedef float Lanes __attribute__((vector_size(16)));
#endif
constexpr int WIDTH = sizeof(Lanes) / 4, PRODUCT_ROWS = 6, PRODUCT_COLS = 2 * WIDTH;

Lanes lanes_at(const float* from) {
  Lanes lanes;
  std::memcpy(&lanes, from, sizeof(Lanes));
  return lanes;
}

void add_lanes(Lanes lanes, float* to) {
  lanes += lanes_at(to);
  std::memcpy(to, &lanes, sizeof(Lanes));
}

// Each sum runs along the depth from 0 on, whatever the width of the vectors.
void add_products(const float* __restrict left, int64_t left_stride, const float* __restrict right,
                  int64_t right_stride, int64_t depth, float* __restrict out, int64_t out_stride) {
  Lanes sums[PRODUCT_ROWS][2] = {};
  for (int64_t d = 0; d < depth; ++d) {
    const Lanes first = lanes_at(right + d * right_stride), second = lanes_at(right + d * right_stride + WIDTH);
    for (int r = 0; r < PRODUCT_ROWS; ++r) {
      const float value = left[d * left_stride + r];
      sums[r][0] += first * value;
      sums[r][1] += second * value;
    }
  }
  for (int r = 0; r < PRODUCT_ROWS; ++r) {
    add_lanes(sums[r][0], out + r * out_stride);
    add_lanes(sums[r][1], out + r * out_stride + WIDTH);
  }
}

void multiply(const float* left, int64_t left_stride, const float* right, int64_t right_stride, int64_t depth,
              int64_t rows, int64_t cols, float* out, int64_t out_stride) {
  for (int64_t col = 0; col < cols; col += PRODUCT_COLS) {
    for (int64_t row = 0; row < rows; row += PRODUCT_ROWS) {
      add_products(left + row, left_stride, right + col, right_stride, depth, out + row * out_stride + col, out_stride);
    }
  }
}

#if defined(__AVX2__)
void transpose_block(const float* from, int64_t stride, float* to, int64_t to_stride) {
  __m256 row[8], pair[8], quad[8];
  for (int i = 0; i < 8; ++i) row[i] = _mm256_loadu_ps(from + i * stride);
  for (int i = 0; i < 4; ++i) {
    pair[2 * i] = _mm256_unpacklo_ps(row[2 * i], row[2 * i + 1]);
    pair[2 * i + 1] = _mm256_unpackhi_ps(row[2 * i], row[2 * i + 1]);
  }
  for (int i = 0; i < 2; ++i) {
    quad[4 * i] = _mm256_shuffle_ps(pair[4 * i], pair[4 * i + 2], 0x44);
    quad[4 * i + 1] = _mm256_shuffle_ps(pair[4 * i], pair[4 * i + 2], 0xEE);
    quad[4 * i + 2] = _mm256_shuffle_ps(pair[4 * i + 1], pair[4 * i + 3], 0x44);
    quad[4 * i + 3] = _mm256_shuffle_ps(pair[4 * i + 1], pair[4 * i + 3], 0xEE);
  }
  for (int i = 0; i < 4; ++i) {
    _mm256_storeu_ps(to + i * to_stride, _mm256_permute2f128_ps(quad[i], quad[i + 4], 0x20));
    _mm256_storeu_ps(to + (i + 4) * to_stride, _mm256_permute2f128_ps(quad[i], quad[i + 4], 0x31));
  }
}
#else
void transpose_block(const float* from, int64_t stride, float* to, int64_t to_stride) {
  for (int c = 0; c < 8; ++c) {
    for (int r = 0; r < 8; ++r) to[c * to_stride + r] = from[r * stride + c];
  }
}
#endif

void transpose_values(const float* from, int64_t stride, int64_t rows, int64_t cols, float* to, int64_t to_stride) {
  for (int64_t col = 0; col < cols; col += 8) {
    for (int64_t row = 0; row < rows; row += 8) {
      transpose_block(from + row * stride + col, stride, to + col * to_stride + row, to_stride);
    }
  }
}

}  // namespace
}  // namespace octavo
