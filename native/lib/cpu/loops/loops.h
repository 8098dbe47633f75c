// The performance-critical loops over elements, as a table of functions: built once for every processor and once for
// AVX2 (loops_avx2.cpp), with the same bits. Nothing here may name a type of namespace octavo, which the AVX2 build
// renames.
#pragma once

#include <cstddef>
#include <cstdint>

namespace octavo_loops {

// `dtype`, `format`: the numbers of octavo/types.h. An amax is the bits of |x|, as a signed integer. Pointers of one
// call do not overlap. n counts elements.
struct Loops {
  // to[i] = the fp32 value of from[i]; `store` is its inverse for values that dtype holds, any NaN made canonical
  void (*load)(int dtype, const void* from, float* to, int64_t n);
  void (*store)(int dtype, const float* from, void* to, int64_t n);
  // values[i] = values[i] rounded once to dtype
  void (*round)(int dtype, float* values, int64_t n);

  // out[b] = amax of run b of `size` (16, 32 or 128) values
  void (*amax_blocks)(const float* values, int size, int64_t blocks, int32_t* out);
  // amax[i] = max(amax[i], |values[i]|)
  void (*amax_columns)(const float* values, int64_t n, int32_t* amax);
  int32_t (*amax_all)(const float* values, int64_t n);

  // encode scales, and what is stored: fp32 decode scales, E8M0 bytes, E4M3 codes
  void (*fp32_scales)(int format, const int32_t* amax, int64_t n, float epsilon, bool power_of_two, float* encode,
                      float* decode);
  void (*e8m0_scales)(int format, const int32_t* amax, int64_t n, float* encode, uint8_t* bytes);
  void (*nvfp4_scales)(const int32_t* amax, int64_t n, float sixth, float factor, float* encode, uint8_t* codes);
  // fp32 values of stored E8M0 bytes, and of E4M3 codes times `factor`
  void (*e8m0_values)(const uint8_t* bytes, int64_t n, float* values);
  void (*nvfp4_values)(const uint8_t* codes, int64_t n, float factor, float* values);

  // out[b * size + i] = scales[b]
  void (*spread)(const float* scales, int size, int64_t blocks, float* out);
  // codes[i] = cast(values[i] * encode[i])
  void (*cast)(int format, const float* values, const float* encode, int64_t n, uint8_t* codes);
  void (*cast_stochastic)(const float* values, const float* encode, const uint16_t* draws, int64_t n, uint8_t* codes);
  // codes[i] = nan where values[i] is not finite
  void (*mark_non_finite)(const float* values, int64_t n, uint8_t nan, uint8_t* codes);
  // out[i] = code * scale[i] in fp32, every NaN canonical
  void (*decode)(int format, const uint8_t* codes, const float* scales, int64_t n, float* out);

  // The draws of `blocks` row blocks from `block` on, 16 each; `stream` is the counter's third word without the half.
  void (*draws_row)(uint32_t row, uint32_t block, int64_t blocks, uint32_t stream, uint32_t group, const uint32_t* key,
                    uint16_t* out);
  // The draws of one block of 16 rows of n columns from `column` on, out[row * stride + i].
  void (*draws_columns)(uint32_t column, int64_t n, uint32_t block, uint32_t stream, uint32_t group,
                        const uint32_t* key, uint16_t* out, int64_t stride);

  // Transforms 16 rows of n columns; the rows from `rows` on are zeros that are not read.
  void (*hadamard)(const float* from, int rows, int64_t n, int64_t stride, float* to);
  // sums[i] += values[i]
  void (*add)(const float* values, int64_t n, float* sums);
  // to[c * 128 + r] = from[r * stride + c] for 128 rows and n columns, n a multiple of 32
  void (*transpose)(const uint8_t* from, int64_t stride, int64_t n, uint8_t* to);
  // to[i] = from[2 i] | from[2 i + 1] << 4, and back; n bytes of `to`, of `from`
  void (*pack)(const uint8_t* from, int64_t n, uint8_t* to);
  void (*unpack)(const uint8_t* from, int64_t n, uint8_t* to);

  // out[r][c] += the sum over d < depth of left[d][r] * right[d][c], each sum from d = 0 on and added once; every row
  // of an array is its stride long. Reads and writes rows and columns up to the next multiples of 6 and 16.
  void (*multiply)(const float* left, int64_t left_stride, const float* right, int64_t right_stride, int64_t depth,
                   int64_t rows, int64_t cols, float* out, int64_t out_stride);
  // to[c * to_stride + r] = from[r * stride + c], rows and columns up to the next multiples of 8
  void (*transpose_values)(const float* from, int64_t stride, int64_t rows, int64_t cols, float* to, int64_t to_stride);
};

const Loops& plain_loops();
const Loops& avx2_loops();  // where OCTAVO_AVX2 is 1, and on a processor that has it

// The fastest loops that this processor can run; with 0 threads the portable ones, so that tests can compare the two.
const Loops& loops_for(int threads);

}  // namespace octavo_loops
