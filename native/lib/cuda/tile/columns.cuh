// A tile's columnwise data: scales from the warps' maxima, codes staged in smem, stores as panels or rows.
#pragma once

#include "cuda/device/hints.cuh"
#include "draws.cuh"
#include "values.cuh"

namespace octavo::cuda {

// A thread's eight columns in the swizzled panel in smem.
template <Format F, class Smem>
class StagedColumns {
 public:
  __device__ StagedColumns(Smem& smem, const Tile& tile) {
    const int column = tile.col() - tile.col0;
    to_ = smem.panel + (column * CHUNKS + chunk_of(column, tile.row() / 8)) * WORDS;
  }

  // Codes of eight rows of column j.
  __device__ void store(int j, const Codes<F>& codes) const {
    uint32_t* const to = to_ + j * CHUNKS * WORDS;
    if constexpr (F == Format::e2m1) {
      *to = codes.low;
    } else {
      *reinterpret_cast<uint2*>(to) = {codes.low, codes.high};
    }
  }

 private:
  static constexpr int CHUNKS = PANEL_ROWS / 8, WORDS = Codes<F>::bytes / 4;
  uint32_t* to_;
};

// 16 bytes of a staged column: chunks 2 q, 2 q + 1 (FP8) or 4 q to 4 q + 3 (E2M1). Unsigned arithmetic lets the
// compiler hoist what a thread's columns have in common.
template <Format F, class Smem>
__device__ __forceinline__ uint4 staged_quad(const Smem& smem, uint32_t column, uint32_t quad) {
  const uint32_t swizzle = column / 8 % 16;
  const uint4* from = reinterpret_cast<const uint4*>(smem.panel);
  if constexpr (F == Format::e2m1) {
    uint4 four = from[column * 4 + (quad ^ swizzle / 4)];
    if (swizzle & 1) four = {four.y, four.x, four.w, four.z};
    if (swizzle & 2) four = {four.z, four.w, four.x, four.y};
    return four;
  } else {
    const uint4 two = from[column * 8 + (quad ^ swizzle / 2)];
    return swizzle & 1 ? uint4{two.z, two.w, two.x, two.y} : two;
  }
}

template <Format F, class Smem>
__device__ __forceinline__ uint8_t staged_code(const Smem& smem, int column, int row) {
  const int chunk = column * 16 + chunk_of(column, row / 8), within = row % 8;
  if constexpr (F == Format::e2m1) {
    return static_cast<uint8_t>(smem.panel[chunk] >> (4 * within) & 0xFu);
  } else {
    return reinterpret_cast<const uint8_t*>(smem.panel)[chunk * 8 + within];
  }
}

// Stores the staged panel: whole columns side by side (native, by `put`), or in the input's own orientation (plain).
template <Format F, bool HADAMARD, class S, class Smem, class Stores = Put>
__device__ __forceinline__ void store_columns(const TileArgs<S>& args, const Tile& tile, const Smem& smem,
                                              const Stores& put = Stores{}) {
  if constexpr (Smem::kind == Kind::mxfp8) {
    if (args.columnwise.layout == Layout::values) return store_column_values<F>(args, tile, smem);
  }
  const uint32_t live_cols = min(tile.end - tile.col0, TILE_COLS);
  if (args.columnwise.layout == Layout::native) {
    constexpr uint32_t quads = Codes<F>::bytes,
                       columns = THREADS / quads;  // 16-byte words per column, columns per step
    const int64_t first = static_cast<int64_t>(tile.panel_index) * args.cols + tile.col0;
    uint4* to = static_cast<uint4*>(args.columnwise.codes) + first * quads + threadIdx.x;
#pragma unroll
    for (uint32_t step = 0; step < TILE_COLS / columns; ++step) {
      const uint32_t column = step * columns + threadIdx.x / quads;
      if (column < live_cols) put(to + step * THREADS, staged_quad<F>(smem, column, threadIdx.x % quads));
    }
    return;
  }
  // Hadamard data pad each group to 16 rows.
  const int rows = HADAMARD ? static_cast<int>(round_up(tile.panel.rows, 16)) : tile.panel.rows;
  const int64_t row0 = HADAMARD ? static_cast<int64_t>(tile.panel.first16) * 16 : int64_t{tile.panel.row0};
  uint8_t* to = static_cast<uint8_t*>(args.columnwise.codes) + row0 * args.cols + tile.col0;
  const uint32_t column = threadIdx.x % TILE_COLS;
  if (column >= live_cols) return;
  for (int row = static_cast<int>(threadIdx.x / TILE_COLS); row < rows; row += THREADS / TILE_COLS)
    to[row * args.cols + column] = staged_code<F>(smem, column, row);
}

// Encode scales of the tile's column units from the warps' maxima, into smem; decode scales to device memory.
template <Kind K, Format F, class T, class S, class Smem>
__device__ __forceinline__ void column_scales(const TileArgs<S>& args, const Tile& tile, Smem& smem,
                                              const SecondLevel& level) {
  constexpr uint32_t units = column_units<K>(), warps_a_unit = WARPS / units;
  using Stored = typename Scale<K>::Stored;
  const bool native = args.columnwise.layout == Layout::native;
  const uint32_t live_units = static_cast<uint32_t>(ceil_div(tile.panel.rows, unit_size(K)));
#pragma unroll
  for (uint32_t step = 0; step < (units * TILE_COLS + THREADS - 1) / THREADS; ++step) {
    const uint32_t at = step * THREADS + threadIdx.x;
    if (at >= units * TILE_COLS) break;
    // In the order in which the layout stores them.
    const uint32_t unit = native ? at % units : at / TILE_COLS, column = native ? at / units : at % TILE_COLS;
    constexpr uint32_t per_word = Pack<T>::per_word;
    uint32_t most = 0;
#pragma unroll
    for (uint32_t k = 0; k < warps_a_unit; ++k)
      most = Pack<T>::maximum(most, smem.maxima[(unit * warps_a_unit + k) * maxima_stride<T>() + column / per_word]);
    Stored stored;
    const uint32_t amax = Pack<T>::fp32_bits(most, column % per_word);
    smem.encode[unit * ENCODE_STRIDE + column] = Scale<K>::template encode_any<F>(amax, args.options, level, stored);
    const int64_t col = tile.col0 + column;
    Stored* to = static_cast<Stored*>(args.columnwise.scales);
    if (col >= tile.end || !to) continue;  // values have none
    if (K == Kind::block) {
      to[static_cast<int64_t>(tile.panel_index) * (native ? round_up(args.cols, 4) : args.cols) + col] = stored;
    } else if (native) {
      to[(static_cast<int64_t>(tile.panel_index) * args.cols + col) * units + unit] = stored;
    } else if (unit < live_units) {
      const int64_t first = K == Kind::mxfp8 ? tile.panel.first32 : tile.panel.first16;
      to[(first + unit) * args.cols + col] = stored;
    }
  }
}

// The same where all columns of the tile are one unit. Each warp takes the maximum for itself.
template <Kind K, Format F, class T, class S, class Smem>
__device__ __forceinline__ void square_column_scale(const TileArgs<S>& args, const Tile& tile, Smem& smem) {
  using P = Pack<T>;
  if (threadIdx.x >= TILE_COLS) return;
  uint32_t most = 0;
#pragma unroll
  for (uint32_t warp = 0; warp < WARPS; ++warp)
#pragma unroll
    for (uint32_t word = 0; word < TILE_COLS / P::per_word; word += 32)
      most = P::maximum(most, smem.maxima[warp * maxima_stride<T>() + word + threadIdx.x % 32]);
  const uint32_t amax = __reduce_max_sync(~0u, P::fp32_bits(P::across(most), 0));
  typename Scale<K>::Stored stored;
  smem.encode[threadIdx.x] = Scale<K>::template encode_any<F>(amax, args.options, SecondLevel{}, stored);
  if (threadIdx.x == 0)
    static_cast<float*>(
        args.columnwise.scales)[tile.panel_index * ceil_div(args.cols, TILE_COLS) + tile.col0 / TILE_COLS] = stored;
}

template <Kind K, class T, class Smem>
__device__ __forceinline__ void share_column_maxima(Smem& smem, const Pack<T> (&values)[8]) {
  uint32_t words[Pack<T>::words];
  column_maxima(values, words);
  const int warp = static_cast<int>(threadIdx.x / 32), lane = static_cast<int>(threadIdx.x % 32);
  if (lane < 16) {
    uint4* to = reinterpret_cast<uint4*>(smem.maxima + warp * maxima_stride<T>() + lane * Pack<T>::words);
#pragma unroll
    for (int k = 0; k < Pack<T>::words / 4; ++k)
      to[k] = {words[4 * k], words[4 * k + 1], words[4 * k + 2], words[4 * k + 3]};
  }
}

// Stages the codes of the thread's eight columns. `encode(half)`: the scales of four of them.
template <Format F, bool STOCHASTIC, bool HADAMARD, class T, class Smem, class Encode>
__device__ __forceinline__ void stage_columns(const Tile& tile, Smem& smem, const Pack<T> (&values)[8],
                                              const Draws& draws, const Encode& encode) {
  const StagedColumns<F, Smem> staged(smem, tile);
  if (!is_live(tile)) {
#pragma unroll
    for (int j = 0; j < 8; ++j) staged.store(j, Codes<F>{});
    return;
  }
  // A NaN scale poisons the rows of its unit, but not those past the group's end.
  const Codes<F> kept = first_codes<F>(HADAMARD ? 8 : tile.live_rows());
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const float4 four = encode(half);
    const float scales[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      const int j = 4 * half + k;
      float scaled[8];
#pragma unroll
      for (int i = 0; i < 8; ++i) scaled[i] = values[i].value(j) * scales[k];
      if constexpr (STOCHASTIC) {
        const uint32_t block = static_cast<uint32_t>(tile.panel.local * (PANEL_ROWS / 16) + tile.row() / 16);
        const Words words =
            draws(static_cast<uint32_t>(tile.col() + j), block, Direction::columnwise, tile.row() / 8 % 2);
        staged.store(j, masked(encode8_stochastic(scaled, words), kept));
      } else {
        staged.store(j, masked(encode8<F>(scaled), kept));
      }
    }
  }
}

template <class S, Kind K, Format F, bool STOCHASTIC, bool HADAMARD, class Smem>
__device__ __forceinline__ void quantize_columns(const TileArgs<S>& args, const Tile& tile, Smem& smem,
                                                 const Pack<typename S::Type> (&values)[8], const Draws& draws) {
  using T = typename S::Type;
  const int column = tile.col() - tile.col0;
  const int64_t group = tile.panel.group;
  if constexpr (K == Kind::rows) {
    __syncthreads();  // the last tile's staged panel has been stored
    const float* from = args.encode_cols + group * args.cols + tile.col();
    const auto scale = [&](int j) { return tile.col() + j < tile.end ? __ldg(from + j) : 1.0f; };
    stage_columns<F, false, false>(tile, smem, values, draws, [&](int half) {
      return float4{scale(4 * half), scale(4 * half + 1), scale(4 * half + 2), scale(4 * half + 3)};
    });
  } else {
    const auto finish = [&](const auto& source) {
      using V = std::conditional_t<HADAMARD, BF16, T>;
      share_column_maxima<K>(smem, source);
      __syncthreads();
      {
        SecondLevel level{};
        if constexpr (K == Kind::nvfp4) level = args.col_levels[group];
        bool squares = false;
        if constexpr (K == Kind::block) squares = args.square_columns;
        if (!squares) column_scales<K, F, V>(args, tile, smem, level);
        if constexpr (K == Kind::block)
          if (squares) square_column_scale<K, F, V>(args, tile, smem);
      }
      __syncthreads();
      const int unit = static_cast<int>(threadIdx.x / 32) / (WARPS / column_units<K>());
      const float4* from = reinterpret_cast<const float4*>(smem.encode + unit * ENCODE_STRIDE + column);
      stage_columns<F, STOCHASTIC, HADAMARD>(tile, smem, source, draws, [&](int half) { return from[half]; });
    };
    if constexpr (HADAMARD) {
      Pack<BF16> transformed[8];
      hadamard_rows(values, transformed);
      finish(transformed);
    } else {
      finish(values);
    }
  }
}

// Stages the codes that rowwise and columnwise data share, as columns.
template <Format F, class S, class Smem>
__device__ __forceinline__ void store_transposed(const TileArgs<S>& args, const Tile& tile, Smem& smem,
                                                 Codes<F> (&codes)[8]) {
#pragma unroll
  for (int i = 0; i < 8; ++i)
    if (i >= tile.live_rows()) codes[i] = {};  // a NaN scale has poisoned the zeros there
  transpose(codes);
  __syncthreads();  // the last tile's staged panel has been stored
  const StagedColumns<F, Smem> staged(smem, tile);
#pragma unroll
  for (int j = 0; j < 8; ++j) staged.store(j, codes[j]);
}

}  // namespace octavo::cuda
