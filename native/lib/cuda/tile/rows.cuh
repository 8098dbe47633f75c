// A tile's rowwise data: scales, codes, their stores, and the dequantized copy.
#pragma once

#include "draws.cuh"
#include "e2m1_rows.cuh"
#include "values.cuh"

namespace octavo::cuda {

// Stores the codes of eight values of one row from `col` on, one by one if they are not aligned.
template <bool WIDE, Format F>
__device__ __forceinline__ void store_row_codes(const Plane& plane, int64_t row, int64_t col, int64_t cols,
                                                const Codes<F>& codes) {
  const int left = static_cast<int>(cols - col);  // columns from here to the end
  if (F == Format::e2m1 && plane.layout == Layout::native) {
    uint8_t* to = static_cast<uint8_t*>(plane.codes) + row * ((cols + 1) / 2) + col / 2;
    if constexpr (WIDE) {
      *reinterpret_cast<uint32_t*>(to) = codes.low;
    } else {
#pragma unroll
      for (int pair = 0; pair < 4; ++pair) {
        const bool second = 2 * pair + 1 < left;
        const uint32_t byte = code_at(codes, 2 * pair) | (second ? code_at(codes, 2 * pair + 1) << 4 : 0);
        if (2 * pair < left) to[pair] = static_cast<uint8_t>(byte);
      }
    }
    return;
  }
  uint8_t* to = static_cast<uint8_t*>(plane.codes) + row * cols + col;
  if constexpr (WIDE && F != Format::e2m1) {
    *reinterpret_cast<uint2*>(to) = {codes.low, codes.high};
  } else {
#pragma unroll
    for (int i = 0; i < 8; ++i)
      if (i < left) to[i] = code_at(codes, i);
  }
}

// Stores of a thread's eight rows of codes. Aligned ones need one address increment and one condition per row.
template <bool WIDE, Format F>
class RowCodes {
 public:
  template <class S>
  __device__ RowCodes(const TileArgs<S>& args, const Tile& tile)
      : place_(tile), plane_(args.rowwise), cols_(args.cols), live_(tile.col() < tile.end ? tile.live_rows() : 0) {
    direct_ = WIDE && (F != Format::e2m1 || plane_.layout == Layout::native);
    constexpr int codes_a_byte = F == Format::e2m1 ? 2 : 1;
    stride_ = args.cols / codes_a_byte;
    to_ = static_cast<uint8_t*>(plane_.codes) + tile.first_row() * stride_ + tile.col() / codes_a_byte;
  }

  __device__ void store(int i, const Codes<F>& codes) {
    if (direct_) {
      if (i < live_) {
        if constexpr (F == Format::e2m1) {
          *reinterpret_cast<uint32_t*>(to_) = codes.low;
        } else {
          *reinterpret_cast<uint2*>(to_) = {codes.low, codes.high};
        }
      }
      to_ += stride_;
    } else if (i < live_) {
      store_row_codes<false>(plane_, place_.first_row() + i, place_.col(), cols_, codes);
    }
  }

 private:
  const Tile& place_;
  const Plane& plane_;
  int64_t cols_, stride_;
  uint8_t* to_;
  int live_;
  bool direct_;
};

// bf16 of code times stored scale: the values that a GEMM would see.
template <bool WIDE, Format F>
__device__ __forceinline__ void store_dequantized(void* out, int64_t row, int64_t col, int64_t cols,
                                                  const Codes<F>& codes, float decode) {
  const Pack<BF16> pack = values_of<F>(codes, decode);
  uint16_t* to = static_cast<uint16_t*>(out) + row * cols + col;
  if constexpr (WIDE) {
    store_pack(to, pack);
  } else {
#pragma unroll
    for (int i = 0; i < 8; ++i)
      if (col + i < cols) to[i] = static_cast<uint16_t>(pack.word[i / 2] >> (16 * (i % 2)));
  }
}

// Codes of one of the thread's rows (stochastic: with the row data's draws).
template <Format F, bool STOCHASTIC, class T>
__device__ __forceinline__ Codes<F> encode_row(const Draws& draws, const Tile& tile, int i, const Pack<T>& values,
                                               float encode) {
  if constexpr (F == Format::e2m1 && Pack<T>::bytes == 2 && !STOCHASTIC) {
    return {row_codes<false>(values, encode, sign_places(encode), Words{}, Multipliers::known())};
  } else {
    float scaled[8];
#pragma unroll
    for (int j = 0; j < 8; ++j) scaled[j] = values.value(j) * encode;
    if constexpr (STOCHASTIC) {
      const uint32_t row = static_cast<uint32_t>(tile.panel.local * PANEL_ROWS + tile.row() + i);
      const uint32_t col = static_cast<uint32_t>(tile.col());
      return encode8_stochastic(scaled, draws(row, col / 16, Direction::rowwise, static_cast<int>(col / 8 % 2)));
    } else {
      return encode8<F>(scaled);
    }
  }
}

// Turns infinities into NaN: a scale from history would let them saturate.
template <class T>
__device__ __forceinline__ void poison_infinities(Pack<T> (&values)[8]) {
  if (thread_maximum(values) < INF_BITS) return;
#pragma unroll
  for (int i = 0; i < 8; ++i)
#pragma unroll
    for (int pair = 0; pair < 4; ++pair) {
      const float a = values[i].value(2 * pair), b = values[i].value(2 * pair + 1), nan = float_of(NAN_BITS);
      values[i].set(pair, abs_bits(a) < INF_BITS ? a : nan, abs_bits(b) < INF_BITS ? b : nan);
    }
}

template <Kind K>
__device__ __forceinline__ float decode_of(typename Scale<K>::Stored stored, const SecondLevel& level) {
  if constexpr (K == Kind::block) return stored;
  if constexpr (K == Kind::mxfp8) return e8m0_value(stored);
  return e4m3_value(stored) * level.factor;
}

// What decode scales of rowwise values are multiplied by: planes of values leave the second level out.
template <Kind K, class S>
__device__ __forceinline__ SecondLevel level_of_values(const TileArgs<S>& args, const SecondLevel& level) {
  return K == Kind::nvfp4 && args.rowwise.layout == Layout::values ? SecondLevel{level.sixth, 1.0f} : level;
}

// The number of neighbouring threads that share a row's scaling unit.
template <Kind K>
constexpr int unit_lanes() {
  return unit_size(K) / 8;
}

// The scales of the lane's own rows.
template <Kind K, Format F, class S>
__device__ __forceinline__ void own_scales(const TileArgs<S>& args,
                                           const RowMaxima<unit_lanes<K>(), typename S::Type>& maxima,
                                           const SecondLevel& level, float (&encode)[own_rows<unit_lanes<K>()>()],
                                           typename Scale<K>::Stored (&stored)[own_rows<unit_lanes<K>()>()]) {
  with_options<K>(args.options, [&](auto power_of_two) {
#pragma unroll
    for (int k = 0; k < maxima.rows; ++k)
      encode[k] = Scale<K>::template encode<F, power_of_two()>(maxima.fp32_bits(k), args.options, level, stored[k]);
  });
}

template <Kind K, class S>
__device__ __forceinline__ void store_row_scales(
    const TileArgs<S>& args, const Tile& tile, const typename Scale<K>::Stored (&stored)[own_rows<unit_lanes<K>()>()]) {
  constexpr int sharing = sharing_lanes<unit_lanes<K>()>(), own = own_rows<unit_lanes<K>()>();
  // The lane's own columns may be past the last column even if its block's first column is not.
  const int64_t block = tile.col() / unit_size(K);
  if (threadIdx.x % unit_lanes<K>() >= sharing || block * unit_size(K) >= tile.end) return;
  const bool transposed = K == Kind::block && args.rowwise.layout == Layout::native;
  const int64_t row_step = transposed ? 1 : ceil_div(args.cols, unit_size(K));
  const int64_t block_step = transposed ? round_up(args.rows, 4) : 1;
  const int first = static_cast<int>(threadIdx.x % sharing) * own;
  auto* to = static_cast<typename Scale<K>::Stored*>(args.rowwise.scales) + (tile.first_row() + first) * row_step +
             block * block_step;
#pragma unroll
  for (int k = 0; k < own; ++k)
    if (first + k < tile.live_rows()) to[k * row_step] = stored[k];
}

// Calls `use(i, encode, decode)` for the thread's eight rows in order. STORE: the decode scales are stored, too.
template <Kind K, Format F, bool STORE, class S, class Use>
__device__ __forceinline__ void for_each_row(const TileArgs<S>& args, const Tile& tile,
                                             const Pack<typename S::Type> (&values)[8], const Use& use) {
  if constexpr (K == Kind::rows) {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const float encode = i < tile.live_rows() ? __ldg(args.encode_rows + tile.first_row() + i) : 1.0f;
      use(i, encode, STORE ? 0.0f : decode_scale(encode));
    }
  } else {
    constexpr int lanes = unit_lanes<K>(), own = own_rows<lanes>();
    SecondLevel level{};
    if constexpr (K == Kind::nvfp4) level = args.row_levels[tile.panel.group];
    float encode[own];
    typename Scale<K>::Stored stored[own];
    own_scales<K, F>(args, row_maxima<lanes>(values), level, encode, stored);
    if constexpr (STORE) store_row_scales<K>(args, tile, stored);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const auto of_row = [&](auto value) { return __shfl_sync(~0u, value, i / own, sharing_lanes<lanes>()); };
      use(i, of_row(encode[i % own]),
          STORE ? 0.0f : decode_of<K>(of_row(stored[i % own]), level_of_values<K>(args, level)));
    }
  }
}

template <bool WIDE, Kind K, Format F, bool STOCHASTIC, class S>
__device__ __forceinline__ void quantize_rows(const TileArgs<S>& args, const Tile& tile,
                                              const Pack<typename S::Type> (&values)[8], const Draws& draws) {
  if (!is_live(tile)) return;
  if (void* const out = row_values<K>(args)) {
    for_each_row<K, F, false>(args, tile, values, [&](int i, float encode, float decode) {
      if (i < tile.live_rows() && tile.col() < tile.end)
        store_dequantized<WIDE>(out, tile.first_row() + i, tile.col(), args.cols,
                                encode_row<F, STOCHASTIC>(draws, tile, i, values[i], encode), decode);
    });
  }
  if (has_row_codes<K>(args)) {
    RowCodes<WIDE, F> rows(args, tile);
    for_each_row<K, F, true>(args, tile, values, [&](int i, float encode, float) {
      rows.store(i, encode_row<F, STOCHASTIC>(draws, tile, i, values[i], encode));
    });
  }
}

// Stores rows of codes that columnwise data share.
template <bool WIDE, Kind K, Format F, class S>
__device__ __forceinline__ void store_rows(const TileArgs<S>& args, const Tile& tile, const Codes<F> (&codes)[8],
                                           float decode) {
  if (has_row_codes<K>(args)) {
    RowCodes<WIDE, F> rows(args, tile);
#pragma unroll
    for (int i = 0; i < 8; ++i) rows.store(i, codes[i]);
  }
  if (void* const out = row_values<K>(args)) {
#pragma unroll
    for (int i = 0; i < 8; ++i)
      if (i < tile.live_rows() && tile.col() < tile.end)
        store_dequantized<WIDE>(out, tile.first_row() + i, tile.col(), args.cols, codes[i], decode);
  }
}

}  // namespace octavo::cuda
