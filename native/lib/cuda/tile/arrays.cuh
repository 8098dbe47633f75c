// Sources of a tile that are arrays: the input as it stands, rounded to MXFP4, of halves that take turns, or in MXFP4.
#pragma once

#include "cuda/device/divisor.cuh"
#include "cuda/device/packs.cuh"
#include "cuda/device/rows_at.cuh"
#include "cuda/device/values.cuh"
#include "octavo/interleave.h"
#include "octavo/quantize.h"

namespace octavo::cuda {

// A source is what a kernel's tiles are made of. It has
//
//   Type                       of its values: F32, F16 or BF16
//   inputs                     arrays that are loaded by `address` and `row_bytes`
//   address(input, row, col)   of eight values of such an array, from a column that is a multiple of eight
//   row_bytes(input)           from one row of it to the next
//   computes                   true: tiles are made by make(inputs, row, col) from eight loaded values of each input,
//                              in persistent kernels that prefetch them
//   value(row, col)            a single value, for arrays that are not aligned
//   kept                       if it does not compute: arrays that it loads into slots by itself, and how many
//                              (Swiglu and its gradients, swiglu.cuh)
//
// Those of this file load their values; the results of prologues are in sources.cuh.

// The input as it stands.
template <class T>
struct Plain {
  using Type = T;
  static constexpr int inputs = 1;
  static constexpr bool computes = false;
  static constexpr int kept = 0;
  const char* data;
  int64_t stride;
  RowsAt rows_at{};  // where no prologue reads the rows

  __device__ int64_t row_bytes(int) const { return stride * Pack<T>::bytes; }
  __device__ const char* address(int, int64_t row, int64_t col) const {
    return data + (row * stride + col) * Pack<T>::bytes;
  }
  __device__ Pack<T> load(int64_t row, int64_t col) const { return load_pack<T>(address(0, row, col)); }
  __device__ float value(int64_t row, int64_t col) const { return load_value<T>(data, row * stride + col); }
};

// Eight results of `function`, each rounded once.
template <class T, class Function>
__device__ __forceinline__ Pack<T> pack_of(const Function& function) {
  Pack<T> out;
#pragma unroll
  for (int pair = 0; pair < 4; ++pair) out.set(pair, function(2 * pair), function(2 * pair + 1));
  return out;
}

// Plain, rounded to MXFP4's values when it has been loaded (mxfp4.cuh), in blocks of a row or down a column.
template <class T>
struct Rounded : Plain<T> {};
template <class T>
struct RoundedColumns : Plain<T> {};

// Matrices whose columns, or whose rows, are two halves that take turns in the array. Halves are a multiple of eight,
// and blocks are one or a multiple of eight: a thread's values along that axis are then of one half, and either every
// other one of the array or neighbours.
template <class T>
struct Interleaved {
  using Type = T;
  static constexpr int inputs = 1;
  static constexpr bool computes = false;
  static constexpr int kept = 0;
  Plain<T> array;
  int64_t half, block;
  uint32_t matrix_rows;  // 0: columns take turns
  Divisor by_matrix;

  static Interleaved of(const Plain<T>& array, const Input& input) {
    const bool cols = input.interleaved_cols > 0;
    const uint32_t rows = cols ? 0 : static_cast<uint32_t>(input.matrix_rows);
    return {array, (cols ? input.cols : input.matrix_rows) / 2, input.interleaved_cols + input.interleaved_rows, rows,
            Divisor::of(rows ? rows : 1)};
  }
  // Whether the columns of both halves take turns one by one.
  __device__ bool in_pairs() const { return block == 1 && !matrix_rows; }
  __device__ int64_t row_bytes(int) const { return array.row_bytes(0) * (matrix_rows && block == 1 ? 2 : 1); }
  // Of columns in pairs: of the first pair.
  __device__ const char* address(int, int64_t row, int64_t col) const {
    if (in_pairs()) return array.address(0, row, 2 * (col >= half ? col - half : col));
    if (!matrix_rows) return array.address(0, row, interleaved_at(col, half, block));
    const uint32_t local = static_cast<uint32_t>(row) - by_matrix.quotient(static_cast<uint32_t>(row)) * matrix_rows;
    return array.address(0, row - local + interleaved_at(local, half, block), col);
  }
};

// MXFP4 as bf16, which holds its values: half a byte per element and a scale per 32, loaded straight to registers.
struct Packed {
  using Type = BF16;
  static constexpr int inputs = 1;
  static constexpr bool computes = false;
  static constexpr int kept = 0;
  const uint8_t* codes;
  const uint8_t* scales;
  int64_t cols;

  // Eight codes, and the scale of their block.
  __device__ uint32_t codes_at(int64_t row, int64_t col) const {
    return __ldg(reinterpret_cast<const uint32_t*>(codes) + (row * cols + col) / 8);
  }
  __device__ uint8_t scale_at(int64_t row, int64_t col) const { return __ldg(scales + (row * cols + col) / 32); }
  static __device__ Pack<BF16> make(uint32_t codes, uint8_t scale) {
    float values[8];
    decode4<Format::e2m1>(spread_nibbles(codes & 0xFFFFu), values);
    decode4<Format::e2m1>(spread_nibbles(codes >> 16), values + 4);
    const float factor = e8m0_value(scale);
    return pack_of<BF16>([&](int i) { return values[i] * factor; });
  }
};

template <class S>
constexpr bool is_plain = std::is_same_v<S, Plain<typename S::Type>>;

template <class S>
constexpr bool is_packed = std::is_same_v<S, Packed>;

template <class S>
constexpr bool is_interleaved = std::is_same_v<S, Interleaved<typename S::Type>>;

template <class S>
constexpr bool rounds_columns = std::is_same_v<S, RoundedColumns<typename S::Type>>;

template <class S>
constexpr bool is_rounded = rounds_columns<S> || std::is_same_v<S, Rounded<typename S::Type>>;

}  // namespace octavo::cuda
