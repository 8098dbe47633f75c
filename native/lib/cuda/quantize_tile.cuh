// The quantize kernel: one tile to row codes, column codes or both, in one pass over the input.
#pragma once

#include "scales.cuh"
#include "tile.cuh"

namespace octavo::cuda {

template <class Source>
struct TileArgs {
  Source source;
  Tiles tiles;  // of `panels` panels; the launch counts them
  int64_t panels;
  int64_t rows, cols;
  Plane rowwise, columnwise;
  const float* encode;             // known: [G]
  const float* encode_rows;        // rows: [M]
  const float* encode_cols;        // rows: [G, C]
  const SecondLevel* row_levels;   // nvfp4: [G]
  const SecondLevel* col_levels;
  ScaleOptions options;
  bool poison_infinities;          // delayed: scales from history do not know of this step's Inf
  uint32_t* amax;                  // [G] or null, zeroed before
  void* dequantized;               // bf16 [M, C] or null
  void* activated;                 // [M, C] of the source's dtype or null
  float* partial_sums;             // [P, C] or null
  const uint32_t* seed;
  uint32_t group_offset;
  const uint32_t* group_offset_device;
  Operand operand;
  const int32_t* unchanged;
  bool reverse;                    // last tile first: what a pass before has left in the L2 cache is read from there
};

template <Kind K>
constexpr int column_units() {  // row blocks in a panel
  return unit_size(K) ? PANEL_ROWS / unit_size(K) : 1;
}

constexpr int ENCODE_STRIDE = TILE_COLS + 4;

template <class T>
constexpr int maxima_stride() {  // words; keeps a column's partial maxima in different banks
  return TILE_COLS / Pack<T>::per_word + 4;
}

template <class T, Kind K, Format F>
struct Shared {
  // [warp][column], each warp's 16 rows
  alignas(16) uint32_t maxima[WARPS * maxima_stride<T>()];
  alignas(16) float encode[column_units<K>() * ENCODE_STRIDE];
  // column codes, [column][chunk of eight rows]; chunks are swizzled by the column, see `chunk_of`
  alignas(16) uint32_t panel[TILE_COLS * 16 * Codes<F>::bytes / 4];
};

struct Nothing {};

// Where chunk `rows8` (eight rows) of a column stands within the column: a half warp writes 16 different columns' chunks
// at once, which then fall into different banks.
__device__ __forceinline__ int chunk_of(int column, int rows8) { return rows8 ^ (column / 8 % 16); }

__device__ __forceinline__ uint32_t philox_group(const uint32_t* offset_device, uint32_t offset, int32_t group) {
  return static_cast<uint32_t>(group) + offset + (offset_device ? *offset_device : 0u);
}

// ---- rows

// Codes of one row of eight values that start at `col`, one by one where they are not aligned.
template <bool WIDE, Format F>
__device__ __forceinline__ void store_row_codes(const Plane& plane, int64_t row, int64_t col, int64_t cols,
                                                const Codes<F>& codes) {
  if (F == Format::e2m1 && plane.layout == Layout::native) {
    uint8_t* to = static_cast<uint8_t*>(plane.codes) + row * ((cols + 1) / 2) + col / 2;
    if constexpr (WIDE) {
      *reinterpret_cast<uint32_t*>(to) = codes.low;
    } else {
#pragma unroll
      for (int pair = 0; pair < 4; ++pair) {
        const bool second = col + 2 * pair + 1 < cols;
        const uint32_t byte = code_at(codes, 2 * pair) | (second ? code_at(codes, 2 * pair + 1) << 4 : 0);
        if (col + 2 * pair < cols) to[pair] = static_cast<uint8_t>(byte);
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
      if (col + i < cols) to[i] = code_at(codes, i);
  }
}

// Row codes of a thread's eight rows. Aligned ones go to an address that grows by a row, under one condition each.
template <bool WIDE, Format F>
class RowCodes {
 public:
  template <class S>
  __device__ RowCodes(const TileArgs<S>& args, const Place& place)
      : place_(place), plane_(args.rowwise), cols_(args.cols), live_(place.col() < args.cols ? place.live_rows() : 0) {
    direct_ = WIDE && (F != Format::e2m1 || plane_.layout == Layout::native);
    constexpr int codes_a_byte = F == Format::e2m1 ? 2 : 1;
    stride_ = args.cols / codes_a_byte;
    to_ = static_cast<uint8_t*>(plane_.codes) + place.first_row() * stride_ + place.col() / codes_a_byte;
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
  const Place& place_;
  const Plane& plane_;
  int64_t cols_, stride_;
  uint8_t* to_;
  int live_;
  bool direct_;
};

// bf16 of code times stored scale: the row the GEMM would see.
template <bool WIDE, Format F>
__device__ __forceinline__ void store_dequantized(void* out, int64_t row, int64_t col, int64_t cols,
                                                  const Codes<F>& codes, float decode) {
  Pack<BF16> pack;
#pragma unroll
  for (int pair = 0; pair < 4; ++pair)
    pack.set(pair, value_of(F, code_at(codes, 2 * pair)) * decode, value_of(F, code_at(codes, 2 * pair + 1)) * decode);
  make_canonical(pack);
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
template <Format F, bool STOCHASTIC, class S>
__device__ __forceinline__ Codes<F> encode_row(const TileArgs<S>& args, const Place& place, int i,
                                               const Pack<typename S::Type>& values, float encode) {
  float scaled[8];
#pragma unroll
  for (int j = 0; j < 8; ++j) scaled[j] = values.value(j) * encode;
  if constexpr (STOCHASTIC) {
    const uint32_t group = philox_group(args.group_offset_device, args.group_offset, place.panel.group);
    const uint32_t row = static_cast<uint32_t>(place.panel.local * PANEL_ROWS + place.row() + i);
    const uint32_t col = static_cast<uint32_t>(place.col());
    return encode8_stochastic(scaled,
                              draws(row, col / 16, Direction::rowwise, col / 8 % 2, args.operand, group, args.seed));
  } else {
    return encode8<F>(scaled);
  }
}

// Infinities as NaN, where a scale from history would let them saturate.
template <class T>
__device__ __forceinline__ void poison_infinities(Pack<T> (&values)[8]) {
  using P = Pack<T>;
  uint32_t most = 0;
#pragma unroll
  for (int i = 0; i < 8; ++i)
#pragma unroll
    for (int k = 0; k < P::words; ++k) most = P::maximum(most, P::magnitudes(values[i].word[k]));
  if (P::fp32_bits(P::across(most), 0) < INF_BITS) return;
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

// Encode scales of the thread's eight rows. What is stored of them goes to memory where `STORE`: the lanes that share a
// block share its rows.
template <Kind K, Format F, bool STORE, class S>
__device__ __forceinline__ void row_scales(const TileArgs<S>& args, const Place& place,
                                           const Pack<typename S::Type> (&values)[8], const SecondLevel& level,
                                           float (&encode)[8], float (&decode)[8]) {
  if constexpr (K == Kind::rows) {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      encode[i] = i < place.live_rows() ? __ldg(args.encode_rows + place.first_row() + i) : 1.0f;
      if constexpr (!STORE) decode[i] = decode_scale(encode[i]);
    }
  } else {
    constexpr int lanes = unit_size(K) / 8, kept = lanes < 8 ? lanes : 8;
    using Stored = typename Scale<K>::Stored;
    const auto maxima = row_maxima<lanes>(values);
    Stored stored[8];
    with_options<K>(args.options, [&](auto power_of_two) {
#pragma unroll
      for (int i = 0; i < 8; ++i)
        encode[i] = Scale<K>::template encode<F, power_of_two()>(maxima.fp32_bits(i), args.options, level, stored[i]);
    });
    if constexpr (!STORE) {
#pragma unroll
      for (int i = 0; i < 8; ++i) decode[i] = decode_of<K>(stored[i], level);
    } else {
      // the lane's own columns may be past the last one where its block's first are not
      const int lane = static_cast<int>(threadIdx.x % lanes);
      const int64_t block = place.col() / unit_size(K);
      const int live = lane < kept && block * unit_size(K) < args.cols ? place.live_rows() - lane : 0;
      const bool transposed = K == Kind::block && args.rowwise.layout == Layout::native;
      const int64_t row_step = transposed ? 1 : ceil_div(args.cols, unit_size(K));
      const int64_t block_step = transposed ? round_up(args.rows, 4) : 1;
      Stored* to = static_cast<Stored*>(args.rowwise.scales) + (place.first_row() + lane) * row_step + block * block_step;
#pragma unroll
      for (int first = 0; first < 8; first += kept) {
        Stored mine = stored[first];
#pragma unroll
        for (int k = 1; k < kept; ++k) mine = lane == k ? stored[first + k] : mine;
        if (first < live) *to = mine;
        to += kept * row_step;
      }
    }
  }
}

template <bool WIDE, Kind K, Format F, bool STOCHASTIC, class S>
__device__ __forceinline__ void quantize_rows(const TileArgs<S>& args, const Place& place,
                                              const Pack<typename S::Type> (&values)[8]) {
  SecondLevel level{};
  if constexpr (K == Kind::nvfp4) level = args.row_levels[place.panel.group];
  float encode[8], decode[8];
  if (args.rowwise.codes) {
    row_scales<K, F, true>(args, place, values, level, encode, decode);
    RowCodes<WIDE, F> rows(args, place);
#pragma unroll
    for (int i = 0; i < 8; ++i) rows.store(i, encode_row<F, STOCHASTIC>(args, place, i, values[i], encode[i]));
  }
  if (args.dequantized) {
    row_scales<K, F, false>(args, place, values, level, encode, decode);
#pragma unroll
    for (int i = 0; i < 8; ++i)
      if (i < place.live_rows() && place.col() < args.cols)
        store_dequantized<WIDE>(args.dequantized, place.first_row() + i, place.col(), args.cols,
                                encode_row<F, STOCHASTIC>(args, place, i, values[i], encode[i]), decode[i]);
  }
}

// Rows of codes that columns share.
template <bool WIDE, Format F, class S>
__device__ __forceinline__ void store_rows(const TileArgs<S>& args, const Place& place, const Codes<F> (&codes)[8],
                                           float decode) {
  if (args.rowwise.codes) {
    RowCodes<WIDE, F> rows(args, place);
#pragma unroll
    for (int i = 0; i < 8; ++i) rows.store(i, codes[i]);
  }
  if (args.dequantized) {
#pragma unroll
    for (int i = 0; i < 8; ++i)
      if (i < place.live_rows() && place.col() < args.cols)
        store_dequantized<WIDE>(args.dequantized, place.first_row() + i, place.col(), args.cols, codes[i], decode);
  }
}

// ---- columns

// Codes of eight rows of one of the thread's columns into the swizzled panel.
template <class Sh, Format F>
__device__ __forceinline__ void stage_column(Sh& shared, int column, int rows8, const Codes<F>& codes) {
  const int at = column * 16 + chunk_of(column, rows8);
  if constexpr (F == Format::e2m1) {
    shared.panel[at] = codes.low;
  } else {
    reinterpret_cast<uint2*>(shared.panel)[at] = {codes.low, codes.high};
  }
}

// 16 bytes of a staged column: chunks 2 q, 2 q + 1 (FP8) or 4 q to 4 q + 3 (E2M1).
template <Format F, class Sh>
__device__ __forceinline__ uint4 staged_quad(const Sh& shared, int column, int quad) {
  const int swizzle = column / 8 % 16;
  const uint4* from = reinterpret_cast<const uint4*>(shared.panel);
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

template <Format F, class Sh>
__device__ __forceinline__ uint8_t staged_code(const Sh& shared, int column, int row) {
  const int chunk = column * 16 + chunk_of(column, row / 8), within = row % 8;
  if constexpr (F == Format::e2m1) {
    return static_cast<uint8_t>(shared.panel[chunk] >> (4 * within) & 0xFu);
  } else {
    return reinterpret_cast<const uint8_t*>(shared.panel)[chunk * 8 + within];
  }
}

// The staged panel to memory: whole columns side by side, or in the input's own orientation.
template <Format F, bool HADAMARD, class S, class Sh>
__device__ __forceinline__ void store_columns(const TileArgs<S>& args, const Place& place, const Sh& shared) {
  const int live_cols = static_cast<int>(min(args.cols - place.col0, int64_t{TILE_COLS}));
  if (args.columnwise.layout == Layout::native) {
    constexpr int quads = Codes<F>::bytes;  // 16-byte words of a column: 8 or 4
    uint4* to = static_cast<uint4*>(args.columnwise.codes) + (static_cast<int64_t>(place.panel_index) * args.cols + place.col0) * quads;
#pragma unroll
    for (int step = 0; step < TILE_COLS * quads / THREADS; ++step) {
      const int at = step * THREADS + static_cast<int>(threadIdx.x), column = at / quads;
      if (column < live_cols) to[at] = staged_quad<F>(shared, column, at % quads);
    }
    return;
  }
  // Hadamard data stand in groups padded to 16 rows
  const int rows = HADAMARD ? static_cast<int>(round_up(place.panel.rows, 16)) : place.panel.rows;
  const int64_t row0 = HADAMARD ? static_cast<int64_t>(place.panel.first16) * 16 : int64_t{place.panel.row0};
  uint8_t* to = static_cast<uint8_t*>(args.columnwise.codes) + row0 * args.cols + place.col0;
  const int column = static_cast<int>(threadIdx.x % TILE_COLS);
  if (column >= live_cols) return;
  for (int row = static_cast<int>(threadIdx.x / TILE_COLS); row < rows; row += THREADS / TILE_COLS)
    to[row * args.cols + column] = staged_code<F>(shared, column, row);
}

// Encode scales of the tile's column units from the warps' maxima, into shared memory; stored scales to memory.
template <Kind K, Format F, class T, class S, class Sh>
__device__ __forceinline__ void column_scales(const TileArgs<S>& args, const Place& place, Sh& shared,
                                              const SecondLevel& level) {
  constexpr int units = column_units<K>(), warps_a_unit = WARPS / units;
  using Stored = typename Scale<K>::Stored;
  const bool native = args.columnwise.layout == Layout::native;
  const int live_units = static_cast<int>(ceil_div(place.panel.rows, unit_size(K)));
#pragma unroll
  for (int step = 0; step < ceil_div(units * TILE_COLS, THREADS); ++step) {
    const int at = step * THREADS + static_cast<int>(threadIdx.x);
    if (at >= units * TILE_COLS) break;
    // the order in which the layout stores them
    const int unit = native ? at % units : at / TILE_COLS, column = native ? at / units : at % TILE_COLS;
    constexpr int per_word = Pack<T>::per_word;
    uint32_t most = 0;
#pragma unroll
    for (int k = 0; k < warps_a_unit; ++k)
      most = Pack<T>::maximum(
          most, shared.maxima[(unit * warps_a_unit + k) * maxima_stride<T>() + column / per_word]);
    Stored stored;
    const uint32_t amax = Pack<T>::fp32_bits(most, column % per_word);
    shared.encode[unit * ENCODE_STRIDE + column] =
        Scale<K>::template encode_any<F>(amax, args.options, level, stored);
    const int64_t col = place.col0 + column;
    if (col >= args.cols) continue;
    Stored* to = static_cast<Stored*>(args.columnwise.scales);
    if (K == Kind::block) {
      to[static_cast<int64_t>(place.panel_index) * (native ? round_up(args.cols, 4) : args.cols) + col] = stored;
    } else if (native) {
      to[(static_cast<int64_t>(place.panel_index) * args.cols + col) * units + unit] = stored;
    } else if (unit < live_units) {
      const int64_t first = K == Kind::mxfp8 ? place.panel.first32 : place.panel.first16;
      to[(first + unit) * args.cols + col] = stored;
    }
  }
}

template <Kind K, class T, class Sh>
__device__ __forceinline__ void share_column_maxima(Sh& shared, const Pack<T> (&values)[8]) {
  uint32_t words[Pack<T>::words];
  column_maxima(values, words);
  const int warp = static_cast<int>(threadIdx.x / 32), lane = static_cast<int>(threadIdx.x % 32);
  if (lane < 16) {
    uint4* to = reinterpret_cast<uint4*>(shared.maxima + warp * maxima_stride<T>() + lane * Pack<T>::words);
#pragma unroll
    for (int k = 0; k < Pack<T>::words / 4; ++k)
      to[k] = {words[4 * k], words[4 * k + 1], words[4 * k + 2], words[4 * k + 3]};
  }
}

// Column codes of the thread's eight columns, into the staged panel.
template <Format F, bool STOCHASTIC, class T, class S, class Sh>
__device__ __forceinline__ void stage_columns(const TileArgs<S>& args, const Place& place, Sh& shared,
                                              const Pack<T> (&values)[8], const float (&encode)[8]) {
  const int rows8 = place.row() / 8, column = (place.col() - place.col0);
  const uint32_t group = STOCHASTIC ? philox_group(args.group_offset_device, args.group_offset, place.panel.group) : 0;
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    float scaled[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) scaled[i] = values[i].value(j) * encode[j];
    if constexpr (STOCHASTIC) {
      const uint32_t block = static_cast<uint32_t>(place.panel.local * (PANEL_ROWS / 16) + place.row() / 16);
      stage_column(shared, column + j, rows8,
                   encode8_stochastic(scaled, draws(static_cast<uint32_t>(place.col() + j), block, Direction::columnwise,
                                                    rows8 % 2, args.operand, group, args.seed)));
    } else {
      stage_column(shared, column + j, rows8, encode8<F>(scaled));
    }
  }
}

// ---- what else a tile leaves behind

// Column sums of the tile: a thread's eight rows in order, two half warps, then the warps in order.
template <class T, class S, class Sh>
__device__ __forceinline__ void store_partial_sums(const TileArgs<S>& args, const Place& place, Sh& shared,
                                                   const Pack<T> (&values)[8]) {
  static_assert(sizeof(shared.panel) >= WARPS * TILE_COLS * sizeof(float));
  __syncthreads();  // the tile before has left the staged panel
  float* sums = reinterpret_cast<float*>(shared.panel);
  const int warp = static_cast<int>(threadIdx.x / 32), lane = static_cast<int>(threadIdx.x % 32);
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    float sum = values[0].value(j);
#pragma unroll
    for (int i = 1; i < 8; ++i) sum += values[i].value(j);
    sum += __shfl_down_sync(~0u, sum, 16);
    if (lane < 16) sums[warp * TILE_COLS + lane * 8 + j] = sum;
  }
  __syncthreads();
  const int column = static_cast<int>(threadIdx.x);
  if (column < TILE_COLS && place.col0 + column < args.cols) {
    float sum = sums[column];
    for (int k = 1; k < WARPS; ++k) sum += sums[k * TILE_COLS + column];
    args.partial_sums[static_cast<int64_t>(place.panel_index) * args.cols + place.col0 + column] = sum;
  }
  __syncthreads();
}

template <bool WIDE, class T, class S>
__device__ __forceinline__ void store_activated(const TileArgs<S>& args, const Place& place,
                                                const Pack<T> (&values)[8]) {
  if (place.col() >= args.cols) return;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    if (i >= place.live_rows()) break;
    const int64_t at = (place.first_row() + i) * args.cols + place.col();
    if constexpr (WIDE) {
      Pack<T> pack = values[i];
      make_canonical(pack);
      store_pack(static_cast<char*>(args.activated) + at * Pack<T>::bytes, pack);
    } else {
#pragma unroll
      for (int j = 0; j < 8; ++j)
        if (place.col() + j < args.cols) store_value<T>(args.activated, at + j, values[i].value(j));
    }
  }
}

template <bool WIDE, bool COLUMNS, class T, class S, class Sh>
__device__ __forceinline__ void side_outputs(const TileArgs<S>& args, const Place& place, Sh& shared,
                                             const Pack<T> (&values)[8]) {
  if (args.amax) {
    const uint32_t bits = warp_maximum(values);
    if (threadIdx.x % 32 == 0) raise(args.amax + place.panel.group, bits);
  }
  if (args.activated) store_activated<WIDE>(args, place, values);
  if constexpr (COLUMNS) {
    if (args.partial_sums) store_partial_sums(args, place, shared, values);
  }
}

// ---- the kernel

extern __shared__ __align__(16) unsigned char dynamic_shared[];

template <class S, Kind K, Format F, bool STOCHASTIC, bool HADAMARD, class Sh>
__device__ __forceinline__ void quantize_columns(const TileArgs<S>& args, const Place& place, Sh& shared,
                                                 const Pack<typename S::Type> (&values)[8]) {
  using T = typename S::Type;
  const int column = (place.col() - place.col0);
  const int64_t group = place.panel.group;
  float encode[8];
  if constexpr (K == Kind::rows) {
#pragma unroll
    for (int j = 0; j < 8; ++j)
      encode[j] = place.col() + j < args.cols ? __ldg(args.encode_cols + group * args.cols + place.col() + j) : 1.0f;
    __syncthreads();  // the tile before has left the staged panel
    stage_columns<F, false>(args, place, shared, values, encode);
  } else {
    SecondLevel level{};
    if constexpr (K == Kind::nvfp4) level = args.col_levels[group];
    const auto finish = [&](const auto& source) {
      using V = std::conditional_t<HADAMARD, BF16, T>;
      share_column_maxima<K>(shared, source);
      __syncthreads();
      column_scales<K, F, V>(args, place, shared, level);
      __syncthreads();
      const int unit = static_cast<int>(threadIdx.x / 32) / (WARPS / column_units<K>());
      const float4* from = reinterpret_cast<const float4*>(shared.encode + unit * ENCODE_STRIDE + column);
      const float4 low = from[0], high = from[1];
      encode[0] = low.x, encode[1] = low.y, encode[2] = low.z, encode[3] = low.w;
      encode[4] = high.x, encode[5] = high.y, encode[6] = high.z, encode[7] = high.w;
      stage_columns<F, STOCHASTIC>(args, place, shared, source, encode);
    };
    if constexpr (HADAMARD) {
      Pack<BF16> transformed[8];
      hadamard_rows(values, transformed);
      finish(transformed);
    } else {
      finish(values);
    }
  }
  __syncthreads();
  store_columns<F, HADAMARD>(args, place, shared);
}

// Codes that are rows' and columns' at once, staged and stored as columns.
template <Format F, class S, class Sh>
__device__ __forceinline__ void store_transposed(const TileArgs<S>& args, const Place& place, Sh& shared,
                                                 Codes<F> (&codes)[8]) {
  transpose(codes);
  __syncthreads();  // the tile before has left the staged panel
#pragma unroll
  for (int j = 0; j < 8; ++j)
    stage_column(shared, (place.col() - place.col0) + j, place.row() / 8, codes[j]);
  __syncthreads();
  store_columns<F, false>(args, place, shared);
}

// CTAs of a multiprocessor, and so the registers of a thread: what fits without spilling. WIDE: loads and stores of eight
// neighbours are aligned; the others are for the odd shapes that no GEMM takes. `heavy` kernels need more registers.
template <class S, bool COLUMNS, bool HEAVY, bool WIDE>
constexpr int ctas() {
  if (!WIDE || Pack<typename S::Type>::bytes == 4 || S::inputs == 3) return 1;
  if (S::inputs == 2) return 2;
  return (COLUMNS ? 3 : 4) - (HEAVY || S::computes ? 1 : 0);
}

template <class S, Kind K, Format F, bool COLUMNS, bool STOCHASTIC, bool HADAMARD, bool WIDE>
__global__ void __launch_bounds__(THREADS, ctas<S, COLUMNS, STOCHASTIC || HADAMARD, WIDE>())
    quantize_tile(const __grid_constant__ TileArgs<S> args) {
  using T = typename S::Type;
  constexpr int LANES = COLUMNS ? COLUMN_LANES : ROW_LANES;
  __shared__ std::conditional_t<COLUMNS, Shared<T, K, F>, Nothing> shared;
  if (args.unchanged && *args.unchanged) return;
  const auto work = [&](const Place& place, Pack<T>(&values)[8]) {
    const int64_t group = place.panel.group;
    side_outputs<WIDE, COLUMNS>(args, place, shared, values);
    if constexpr (K == Kind::known) {
      const float scale = __ldg(args.encode + group), stored = decode_scale(scale);
      Codes<F> codes[8];
      if (args.poison_infinities) poison_infinities(values);
#pragma unroll
      for (int i = 0; i < 8; ++i) codes[i] = encode_row<F, false>(args, place, i, values[i], scale);
      store_rows<WIDE>(args, place, codes, stored);
      if constexpr (COLUMNS) {
        if (args.columnwise.codes) store_transposed(args, place, shared, codes);
      }
    } else {
      quantize_rows<WIDE, K, F, STOCHASTIC>(args, place, values);
      if constexpr (COLUMNS) {
        if (args.columnwise.codes)
          quantize_columns<S, K, F, STOCHASTIC, HADAMARD>(args, place, shared, values);
      }
    }
  };
  for_each_tile<LANES, WIDE>(args.source, args.tiles, args.reverse, args.cols, dynamic_shared, work);
}

}  // namespace octavo::cuda
