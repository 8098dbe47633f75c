// NVFP4 in units: what a thread of its kernels holds are 16 rows of eight columns, all rows of eight columnwise blocks.
// Maxima and the Hadamard transform along rows are the thread's own then, and two lanes share a rowwise block.
#pragma once

#include "args.cuh"
#include "draws.cuh"
#include "e2m1_rows.cuh"

namespace octavo::cuda {

constexpr int UNIT_ROWS = unit_size(Kind::nvfp4);
constexpr int UNITS = PANEL_ROWS / UNIT_ROWS;
constexpr int UNIT_THREADS = COLUMN_LANES * UNITS;  // of a tile of 128 x 128
constexpr int UNIT_WARPS = UNIT_THREADS / 32;
constexpr int BLOCKS_ACROSS = TILE_COLS / UNIT_ROWS;

// This thread's unit of a tile.
struct Unit {
  int number;  // from the top of the panel
  int row;     // its first row in the panel
  int live;    // rows within the group

  __device__ static Unit of(const Tile& tile) {
    const int number = static_cast<int>(threadIdx.x / COLUMN_LANES), row = number * UNIT_ROWS;
    return {number, row, min(max(tile.panel.rows - row, 0), UNIT_ROWS)};
  }
};

// All rows before the first is used. Zeros past the group's end, past the last column and where an index names no row.
template <class T>
__device__ __forceinline__ void read_unit(const Plain<T>& source, const Tile& tile, const Unit& unit,
                                          Pack<T> (&values)[UNIT_ROWS]) {
  const int live = tile.col() < tile.end ? unit.live : 0;
  const int64_t first = tile.panel.row0 + unit.row;
  if (source.rows_at.of_rows) {
    // each of the unit's lanes looks one row up
    const int own = static_cast<int>(threadIdx.x % UNIT_ROWS),
              place = own < unit.live ? source.rows_at(first + own) : -1;
#pragma unroll
    for (int i = 0; i < UNIT_ROWS; ++i) {
      const int row = __shfl_sync(~0u, place, i, UNIT_ROWS);
      values[i] = row >= 0 && tile.col() < tile.end ? source.load(row, tile.col()) : zeros<T>();
    }
    return;
  }
  const char* from = source.address(0, first, tile.col());
  const int64_t stride = source.row_bytes(0);
  if (live == UNIT_ROWS) {
#pragma unroll
    for (int i = 0; i < UNIT_ROWS; ++i, from += stride) values[i] = load_pack<T>(from);
    return;
  }
#pragma unroll
  for (int i = 0; i < UNIT_ROWS; ++i, from += stride) values[i] = i < live ? load_pack<T>(from) : zeros<T>();
}

// ---- scales

// The encode scale of every decode code of one group: a thread's blocks look theirs up, and divide nothing.
__device__ __forceinline__ float encode_scale_of(uint32_t code, float factor) {
  const float scale = __frcp_rn(e4m3_value(static_cast<uint8_t>(code)) * factor);
  return scale > FLOAT_MAX ? FLOAT_MAX : scale;
}

constexpr int SCALE_CODES = 128;
static_assert(UNIT_THREADS == SCALE_CODES, "each thread makes one scale of a table");

// Decode codes of the blocks that have these amaxes, the first in the low byte. A product past fp32's largest number
// saturates as that would.
__device__ __forceinline__ uint32_t scale_codes(uint32_t first, uint32_t second, float sixth) {
  return fp8_pair<Format::e4m3>(float_of(first) * sixth, float_of(second) * sixth);
}

// Where E2M1 codes of a group have their signs, see row_codes.
__device__ __forceinline__ uint32_t sign_places(const SecondLevel& level) { return sign_places(level.factor); }

// ---- columns in smem

// Column codes of a tile as units of eight bytes: two columns in a row of 16, swizzled by the lane that holds the
// columns, so that a half warp writes to all banks at once.
struct StagedUnits {
  static __device__ uint32_t slot(uint32_t column, uint32_t unit) {
    return column / 2 * 16 + ((column % 2 * 8 + unit) ^ (column / 8 % 16));
  }

  static __device__ void store(uint32_t* panel, uint32_t column, uint32_t unit, uint32_t low, uint32_t high) {
    reinterpret_cast<uint2*>(panel)[slot(column, unit)] = {low, high};
  }

  // Units 2 q and 2 q + 1.
  static __device__ uint4 quad(const uint32_t* panel, uint32_t column, uint32_t q) {
    const uint32_t at = slot(column, 2 * q);
    const uint4 two = reinterpret_cast<const uint4*>(panel)[at / 2];
    return at % 2 ? uint4{two.z, two.w, two.x, two.y} : two;
  }
};

__device__ __forceinline__ void store_staged_units(const Plane& plane, const Tile& tile, int64_t cols,
                                                   const uint32_t* panel) {
  const uint32_t live_cols = min(tile.end - tile.col0, TILE_COLS);
  uint4* to =
      static_cast<uint4*>(plane.codes) + (static_cast<int64_t>(tile.panel_index) * cols + tile.col0) * 4 + threadIdx.x;
#pragma unroll
  for (uint32_t step = 0; step < TILE_COLS * 4 / UNIT_THREADS; ++step) {
    const uint32_t column = step * (UNIT_THREADS / 4) + threadIdx.x / 4;
    if (column < live_cols) to[step * UNIT_THREADS] = StagedUnits::quad(panel, column, threadIdx.x % 4);
  }
}

// Eight staged scales, 128 bytes apart, of which the first `count` are stored side by side.
__device__ __forceinline__ void store_staged_scales(const uint8_t* from, uint8_t* to, int count) {
  uint32_t words[2] = {};
#pragma unroll
  for (int k = 0; k < 8; ++k) words[k / 4] |= static_cast<uint32_t>(from[k * 128]) << 8 * (k % 4);
  if (count == 8 && reinterpret_cast<uintptr_t>(to) % 8 == 0) {
    *reinterpret_cast<uint2*>(to) = {words[0], words[1]};
    return;
  }
#pragma unroll
  for (int k = 0; k < 8; ++k)
    if (k < count) to[k] = static_cast<uint8_t>(words[k / 4] >> 8 * (k % 4));
}

// ---- the Hadamard transform

// Three of its four steps over the unit's rows, for one column: the last one adds rows i and i + 8 and subtracts them.
template <class T>
__device__ __forceinline__ void hadamard_of_halves(const Pack<T> (&values)[UNIT_ROWS], int column,
                                                   const Multipliers& by, float (&x)[UNIT_ROWS]) {
#pragma unroll
  for (int i = 0; i < UNIT_ROWS; ++i) {
    float value = half_of<T>(values[i].word[column / 2], column % 2, by);
    if constexpr (!std::is_same_v<T, BF16>) value = rounded<BF16>(value);
    x[i] = HADAMARD_SIGNS >> i & 1u ? -value : value;
  }
#pragma unroll
  for (int step = 1; step < 8; step *= 2)
#pragma unroll
    for (int i = 0; i < UNIT_ROWS; ++i)
      if (!(i & step)) {
        const float a = x[i], b = x[i + step];
        x[i] = a + b;
        x[i + step] = a - b;
      }
}

// The transform of the two columns of word k; bf16 values.
template <class T>
__device__ __forceinline__ void hadamard_pair(const Pack<T> (&values)[UNIT_ROWS], int k, const Multipliers& by,
                                              uint32_t (&out)[UNIT_ROWS]) {
  float low[UNIT_ROWS], high[UNIT_ROWS];
  hadamard_of_halves(values, 2 * k, by, low);
  hadamard_of_halves(values, 2 * k + 1, by, high);
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    Pack<BF16> pack;
    pack.set(0, (low[i] + low[i + 8]) * 0.25f, (high[i] + high[i + 8]) * 0.25f);
    pack.set(1, (low[i] - low[i + 8]) * 0.25f, (high[i] - high[i + 8]) * 0.25f);
    out[i] = pack.word[0], out[i + 8] = pack.word[1];
  }
}

// fp32 bits of the largest magnitude of the unit's transform, NaN or infinity where it holds one: of a sum and a
// difference the larger magnitude is the sum of magnitudes, and rounding to bf16 keeps their order.
template <class T>
__device__ __forceinline__ uint32_t hadamard_maximum(const Pack<T> (&values)[UNIT_ROWS], const Multipliers& by) {
  float most = 0.0f;
#pragma unroll
  for (int column = 0; column < 8; ++column) {
    float x[UNIT_ROWS];
    hadamard_of_halves(values, column, by, x);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const float larger = fabsf(x[i]) + fabsf(x[i + 8]);
      asm("max.NaN.f32 %0, %0, %1;" : "+f"(most) : "f"(larger));
    }
  }
  return abs_bits(rounded<BF16>(most * 0.25f));
}

}  // namespace octavo::cuda
