// Results stored straight from registers. Four lanes hold eight neighbouring columns of a row, two each, and shuffles
// transpose the values among them until each lane has 16 contiguous bytes of the result.
#pragma once

#include <cuda_fp16.h>

#include "cuda/device/values.cuh"
#include "params.h"
#include "schedule.cuh"

namespace octavo::cuda {

template <DType D>
__device__ __forceinline__ float2 unpacked(uint32_t word) {
  if constexpr (D == DType::bf16) {
    return {__uint_as_float(word << 16), __uint_as_float(word & 0xFFFF0000u)};
  } else {
    return __half22float2(*reinterpret_cast<const __half2*>(&word));
  }
}

// Swaps word `first` of a lane whose bit `by` is set (`odd`) with word `second` of the lane without it.
__device__ __forceinline__ void exchange(uint32_t& first, uint32_t& second, bool odd, int by) {
  const uint32_t received = __shfl_xor_sync(0xFFFFFFFFu, odd ? first : second, by);
  first = odd ? received : first;
  second = odd ? second : received;
}

// A 4 x 4 transposition among four lanes: word `i` of lane `q` becomes word `q` of lane `i`.
__device__ __forceinline__ void transpose_quad(uint32_t (&words)[4], int lane) {
  exchange(words[0], words[1], lane & 1, 1);
  exchange(words[2], words[3], lane & 1, 1);
  exchange(words[0], words[2], lane & 2, 2);
  exchange(words[1], words[3], lane & 2, 2);
}

__device__ __forceinline__ void red_add_v4(float* at, float4 values) {
  asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(at), "f"(values.x), "f"(values.y),
               "f"(values.z), "f"(values.w)
               : "memory");
}

__device__ __forceinline__ float load_one(const void* data, DType dtype, int64_t index) {
  if (dtype == DType::f32) return __ldg(static_cast<const float*>(data) + index);
  const uint16_t half = __ldg(static_cast<const uint16_t*>(data) + index);
  return dtype == DType::bf16 ? unpacked<DType::bf16>(half).x : unpacked<DType::f16>(half).x;
}

// One thread's two rows of a part of a tile, of which the second lies eight below the first, stored from registers.
class GemmStore {
 public:
  __device__ GemmStore(const GemmParams& params, const GemmTileAt& tile, int row, int col)
      : params_(params), tile_(tile), lane_(static_cast<int>(threadIdx.x % 4)), row_(tile.m + row), col_(tile.n + col) {
    const int64_t first = params.k_grouped ? 0 : tile.start;
    const int64_t group = params.k_grouped ? tile.group * params.out_group_stride : 0;
    const int limit = params.k_grouped ? params.height : tile.rows;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int local = row_ + 8 * i;
      inside_[i] = local < limit;
      offset_[i] = group + (first + local) * params.out_row_stride;
    }
  }

  // `columns`: factors of this part's columns, in smem. With D bf16 and `general` the result may be fp16 too.
  template <Finish F, DType D, int N>
  __device__ void store(float (&sums)[N], float upper, float lower, const float* columns) const {
#pragma unroll
    for (int piece = 0; piece < N / 16; ++piece) {  // 32 columns, of which the thread has eight in each of its rows
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int col = col_ + 32 * piece;
        float values[8];
#pragma unroll
        for (int v = 0; v < 8; ++v) values[v] = sums[16 * piece + 4 * (v / 2) + 2 * i + v % 2] * (i ? lower : upper);
        if constexpr (F == Finish::columns) scale(values, columns + 32 * piece);
        if constexpr (F == Finish::general) {
          if (params_.right_use == Factor::column) scale(values, columns + 32 * piece);
          if (params_.bias) add_bias(values, i, col);
        }
        if constexpr (D == DType::f32) {
          store_f32<F>(values, i, col);
        } else {
          store_16<F>(values, i, col);
        }
      }
    }
  }

  // Prefetches into L2 what the result will be added to, one row of the tile per thread.
  template <class Config>
  __device__ static void prefetch(const GemmParams& params, const GemmTileAt& tile) {
    const int thread = threadIdx.x % WARPGROUP_THREADS, warpgroup = threadIdx.x / WARPGROUP_THREADS - 1;
    const int row = tile.m + thread + (Config::SPLITS_ROWS ? WARPGROUP_ROWS * warpgroup : 0);
    const int col = tile.n + (Config::SPLITS_ROWS ? 0 : Config::COLS * warpgroup);
    const int bytes = min(Config::COLS, params.width - col) * dtype_bytes(params.out_dtype);
    if (thread >= WARPGROUP_ROWS || row >= params.height || bytes <= 0) return;
    const int64_t at = tile.group * params.out_group_stride + row * params.out_row_stride + col;
    asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(static_cast<const uint8_t*>(params.out) +
                                                                    at * dtype_bytes(params.out_dtype)),
                 "r"(bytes)
                 : "memory");
  }

  // Stores zeros in this thread's share of `cols` columns.
  __device__ void store_zeros(int cols) const {
    const int bytes = dtype_bytes(params_.out_dtype), piece = 16 / bytes;
    const int end = min(col_ + cols, params_.width);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if (!inside_[i]) continue;
      for (int at = col_ + lane_ * piece; at < end; at += 4 * piece) {
        *reinterpret_cast<uint4*>(static_cast<uint8_t*>(params_.out) + (offset_[i] + at) * bytes) = {};
      }
    }
  }

 private:
  __device__ void scale(float (&values)[8], const float* columns) const {
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const float2 factor = *reinterpret_cast<const float2*>(columns + 8 * j + 2 * lane_);
      values[2 * j] *= factor.x;
      values[2 * j + 1] *= factor.y;
    }
  }

  __device__ void add_bias(float (&values)[8], int i, int col) const {
    const float factor =
        params_.bias_scales && inside_[i] ? __ldg(params_.bias_scales + tile_.start + row_ + 8 * i) : 1.0f;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const int at = col + 8 * j + 2 * lane_;
      if (at >= params_.width) continue;
      const int64_t index = static_cast<int64_t>(tile_.group) * params_.width + at;
      values[2 * j] = fmaf(factor, load_one(params_.bias, params_.bias_dtype, index), values[2 * j]);
      values[2 * j + 1] = fmaf(factor, load_one(params_.bias, params_.bias_dtype, index + 1), values[2 * j + 1]);
    }
  }

  // The two lanes of a pair exchange halves: the even one then holds four columns of the first block of 8, the odd one
  // four of the second.
  template <Finish F>
  __device__ void store_f32(const float (&values)[8], int i, int col) const {
#pragma unroll
    for (int j = 0; j < 4; j += 2) {
      uint32_t words[4];
#pragma unroll
      for (int w = 0; w < 4; ++w) words[w] = __float_as_uint(values[2 * j + w]);
      exchange(words[0], words[2], lane_ & 1, 1);
      exchange(words[1], words[3], lane_ & 1, 1);
      const float4 four = {__uint_as_float(words[0]), __uint_as_float(words[1]), __uint_as_float(words[2]),
                           __uint_as_float(words[3])};
      const int at = col + 8 * (j + lane_ % 2) + 4 * (lane_ / 2);
      if (!inside_[i] || at >= params_.width) continue;
      float* const into = static_cast<float*>(params_.out) + offset_[i] + at;
      if (F == Finish::adds || (F == Finish::general && params_.accumulate)) {
        red_add_v4(into, four);
      } else {
        *reinterpret_cast<float4*>(into) = four;
      }
    }
  }

  template <Finish F>
  __device__ void store_16(float (&values)[8], int i, int col) const {
    uint16_t* const out = static_cast<uint16_t*>(params_.out) + offset_[i];
    const bool f16 = F == Finish::general && params_.out_dtype == DType::f16;
    if (F == Finish::general && params_.accumulate) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const int at = col + 8 * j + 2 * lane_;
        if (!inside_[i] || at >= params_.width) continue;
        const uint32_t word = *reinterpret_cast<const uint32_t*>(out + at);
        const float2 old = f16 ? unpacked<DType::f16>(word) : unpacked<DType::bf16>(word);
        values[2 * j] += old.x;
        values[2 * j + 1] += old.y;
      }
    }
    uint32_t words[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      words[j] = f16 ? round_pair<DType::f16>(values[2 * j], values[2 * j + 1], false)
                     : round_pair<DType::bf16>(values[2 * j], values[2 * j + 1], false);
    }
    transpose_quad(words, lane_);
    const int at = col + 8 * lane_;
    if (inside_[i] && at < params_.width) {
      *reinterpret_cast<uint4*>(out + at) = {words[0], words[1], words[2], words[3]};
    }
  }

  const GemmParams& params_;
  const GemmTileAt& tile_;
  const int lane_, row_, col_;
  bool inside_[2];
  int64_t offset_[2];
};

}  // namespace octavo::cuda
