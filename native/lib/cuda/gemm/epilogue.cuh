// The epilogue of a tile: scales that apply to whole dot products, bias, one rounding, stores.
//
// bf16 results are staged in smem and stored by TMA while the next tile's mainloop runs; so are fp32 sums that are
// added to the result, by a bulk reduction or by what addends.cuh has. Everything else is stored straight from
// registers: four lanes hold eight neighbouring columns of a row, two each, and shuffles transpose the values among
// them until each lane has 16 contiguous bytes of the result.
//
// A tile's epilogue is straight-line code that runs once, and an instruction-cache miss costs more than the work
// itself: each variant is compiled separately, and the common ones are short.
#pragma once

#include <cuda_fp16.h>

#include "cuda/device/memory.cuh"
#include "cuda/device/values.cuh"
#include "mainloop.cuh"
#include "params.h"
#include "pipeline.cuh"
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

// A barrier among the 128 threads of this warpgroup.
__device__ __forceinline__ void warpgroup_sync() {
  asm volatile("bar.sync %0, 128;" ::"r"(threadIdx.x / 128) : "memory");
}

// stmatrix.x4: stores four 8 x 8 matrices of 16-bit values, of which each lane holds one word per matrix. Lane l gives
// the address of row l % 8 of matrix l / 8.
__device__ __forceinline__ void stmatrix(void* row, const uint32_t (&words)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(smem_address(row)),
               "r"(words[0]), "r"(words[1]), "r"(words[2]), "r"(words[3])
               : "memory");
}

// The factors of a tile's results apart from block scales: loaded before the mainloop, used after it.
template <class Config>
class GemmFactors {
 public:
  __device__ GemmFactors(const GemmParams& params, const GemmTileAt& tile, int row, GemmPipeline<Config>& pipeline) {
    upper_ = left(params, tile, tile.m + row);
    lower_ = left(params, tile, tile.m + row + 8);
    right_ = params.right_use == Factor::group ? __ldg(params.right_factor + tile.group) : 1.0f;
    if (params.right_use == Factor::column) {
      warpgroup_sync();  // the last tile's factors have been read
      const int last = min(Config::TILE_N, params.width - tile.n);
      const float* const from = params.right_factor + static_cast<int64_t>(tile.group) * params.width + tile.n;
      for (int i = threadIdx.x % 128; i < last; i += 128) {
        cp_async<4>(smem_address(pipeline.columns() + i), from + i);
      }
    }
  }

  __device__ static void wait(const GemmParams& params) {
    if (params.right_use != Factor::column) return;
    cp_async_wait_all();
    warpgroup_sync();
  }

  // For the thread's upper and lower row. Multiplied here, because at the load it would have to wait for the data.
  __device__ float upper() const { return upper_ * right_; }
  __device__ float lower() const { return lower_ * right_; }

 private:
  __device__ static float left(const GemmParams& params, const GemmTileAt& tile, int local) {
    switch (params.left_use) {
      case Factor::group: return __ldg(params.left_factor + tile.group);
      case Factor::row: return local < tile.rows ? __ldg(params.left_factor + tile.start + local) : 0.0f;
      case Factor::column:
        return local < params.height
                   ? __ldg(params.left_factor + static_cast<int64_t>(tile.group) * params.height + local)
                   : 0.0f;
      default: return 1.0f;
    }
  }

  float upper_, lower_, right_;
};

// One thread's two rows of a part of a tile, stored from registers.
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
    for (int piece = 0; piece < N / 16; ++piece) {
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
    const int thread = threadIdx.x % 128, warpgroup = threadIdx.x / 128 - 1;
    const int row = tile.m + thread + (Config::SPLITS_ROWS ? 64 * warpgroup : 0);
    const int col = tile.n + (Config::SPLITS_ROWS ? 0 : Config::COLS * warpgroup);
    const int bytes = min(Config::COLS, params.width - col) * dtype_bytes(params.out_dtype);
    if (thread >= 64 || row >= params.height || bytes <= 0) return;
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

// Adds a tile of fp32 sums to the result by bulk reduce-adds from smem, which run during the next tile's mainloop: 64 x
// 128 sums per warpgroup, one bulk copy per row.
template <class Config, int N>
__device__ __forceinline__ void reduce_add_rows(const GemmParams& params, const GemmTileAt& tile, int row, float upper,
                                                float lower, const GemmPipeline<Config>& pipeline, float (&sums)[N]) {
  static_assert(N == 64 && Config::SPLITS_ROWS);
  const int thread = threadIdx.x % 128, col = threadIdx.x % 4 * 2;
  // The threads that issued the last tile's bulk copies wait until those have read smem.
  bulk_wait_group_read<0>();
  warpgroup_sync();
#pragma unroll
  for (int j = 0; j < 16; ++j) {
    *reinterpret_cast<float2*>(pipeline.staged(row) + 8 * j + col) = {sums[4 * j] * upper, sums[4 * j + 1] * upper};
    *reinterpret_cast<float2*>(pipeline.staged(row + 8) + 8 * j + col) = {sums[4 * j + 2] * lower,
                                                                          sums[4 * j + 3] * lower};
  }
  fence_proxy_async();
  warpgroup_sync();
  const int own = (threadIdx.x / 128 - 1) * 64 + thread, at = tile.m + own;
  if (thread < 64 && at < params.height) {
    float* const into =
        static_cast<float*>(params.out) + tile.group * params.out_group_stride + at * params.out_row_stride + tile.n;
    const int bytes = min(Config::TILE_N, params.width - tile.n) * 4;
    asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(into),
                 "r"(smem_address(pipeline.staged(own))), "r"(bytes)
                 : "memory");
  }
  bulk_commit_group();
}

// Has TMA store rows of a tile that have been staged in smem: the 16 of `warp`, from `row` on, or all 64 of the
// warpgroup of which it is the first. Borrowed smem is stored first and as a bulk group of its own, so that it can be
// waited for alone. TMA clips rows past the group's end and columns past the result's.
template <class Config>
__device__ __forceinline__ void store_tiles(const GemmParams& params, const GemmTileAt& tile, int32_t row, int warp,
                                            const GemmPipeline<Config>& pipeline) {
  const int32_t col = tile.n, group = tile.group, rows = tile.rows, end = tile.start + rows;
#pragma unroll
  for (int piece = Config::COLS / 64 - 1; piece >= 0; --piece) {
    const uint8_t* const from = pipeline.out_tile(warp, piece);
    if (params.k_grouped) {
      tma_store(params.out_map, from, col + 64 * piece, row, group);
    } else {
      tma_store(params.out_map, from, col + 64 * piece, RAGGED_ROWS - rows + row, end, RAGGED_ROWS);
    }
    if (piece == Config::OUT_TILES || piece == 0) bulk_commit_group();
  }
}

// Stages a warp's 16 rows of a tile in smem, in TMA tiles of 64 columns, which are stored during the next tile's
// mainloop.
template <class Config, Finish F>
__device__ __forceinline__ void stage_tiles(const GemmParams& params, const GemmTileAt& tile,
                                            const GemmFactors<Config>& factors, GemmPipeline<Config>& pipeline,
                                            typename GemmMainloop<Config>::Sums& sums) {
  constexpr int TILES = Config::COLS / 64, EACH = TILES / Config::PARTS;  // TMA tiles, and those of a part
  const int lane = threadIdx.x % 32, warp = __shfl_sync(0xFFFFFFFFu, static_cast<int>(threadIdx.x) / 32 - 4, 0);
  const float upper = factors.upper(), lower = factors.lower();
  const bool store_warps = Config::STORE_WARPS && params.store_warps;
  // All loaded before the first store to smem: nvcc moves no load above a store that it might alias.
  float2 columns[F == Finish::columns ? 8 * TILES : 1];
  if constexpr (F == Finish::columns) {
#pragma unroll
    for (int i = 0; i < 8 * TILES; ++i) {
      columns[i] = *reinterpret_cast<const float2*>(pipeline.columns() + 8 * i + lane % 4 * 2);
    }
  }
  if (store_warps) {
    pipeline.results_acquire();
  } else if (lane == 0) {
    bulk_wait_group_read<0>();  // the last tile's TMA stores have read smem
  }
  warpgroup_sync();  // and every warp has read the last stages
#pragma unroll
  for (int piece = 0; piece < TILES; ++piece) {
    uint8_t* const staged = pipeline.out_tile(warp, piece) + lane % 16 * SWIZZLE_BYTES;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      uint32_t words[4];
#pragma unroll
      for (int w = 0; w < 4; ++w) {
        const float* const two = sums[piece / EACH] + 32 * (piece % EACH) + 8 * j + 2 * w;
        float left = two[0] * (w % 2 ? lower : upper), right = two[1] * (w % 2 ? lower : upper);
        if constexpr (F == Finish::columns) {
          left *= columns[8 * piece + 2 * j + w / 2].x;
          right *= columns[8 * piece + 2 * j + w / 2].y;
        }
        words[w] = round_pair<DType::bf16>(left, right, false);
      }
      stmatrix(staged + ((2 * j + lane / 16) ^ lane % 8) * 16, words);
    }
  }
  fence_proxy_async();
  __syncwarp();
  if (lane != 0) return;
  if (store_warps) {
    pipeline.results_publish();
  } else {
    store_tiles<Config>(params, tile, tile.m + 16 * warp, warp, pipeline);
  }
}

}  // namespace octavo::cuda
