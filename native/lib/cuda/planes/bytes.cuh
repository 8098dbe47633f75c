// Grid-stride loops over bytes that do not depend on groups: copies, packed E2M1, Blackwell's scale tiles. Called by
// all threads of a one-dimensional grid.
#pragma once

#include "cuda/device/values.cuh"
#include "octavo/dequantize.h"

namespace octavo::cuda {

__device__ __forceinline__ int64_t thread_number() { return int64_t{blockIdx.x} * blockDim.x + threadIdx.x; }
__device__ __forceinline__ int64_t thread_count() { return int64_t{gridDim.x} * blockDim.x; }

__device__ __forceinline__ void copy_bytes(const uint8_t* __restrict__ from, uint8_t* __restrict__ into,
                                           int64_t count) {
  const bool vectors = (reinterpret_cast<uintptr_t>(from) | reinterpret_cast<uintptr_t>(into)) % 16 == 0;
  const int64_t whole = vectors ? count / 16 : 0;
#pragma unroll 4
  for (int64_t i = thread_number(); i < whole; i += thread_count()) {
    reinterpret_cast<uint4*>(into)[i] = __ldg(reinterpret_cast<const uint4*>(from) + i);
  }
  for (int64_t i = 16 * whole + thread_number(); i < count; i += thread_count()) into[i] = __ldg(from + i);
}

// One-byte codes [rows, cols] to two codes per byte [rows, ceil(cols / 2)], or back. `vectors`: cols is even, so that
// rows are contiguous, and the addresses are multiples of 16 (one-byte side) and 8 (packed side).
__device__ __forceinline__ void pack_nibbles(const uint8_t* __restrict__ from, uint8_t* __restrict__ into, int64_t rows,
                                             int64_t cols, bool pack, bool vectors) {
  const int64_t pitch = (cols + 1) / 2, packed = rows * pitch, whole = vectors ? packed / 8 : 0;
  for (int64_t i = thread_number(); i < whole; i += thread_count()) {
    if (pack) {
      const uint4 codes = __ldg(reinterpret_cast<const uint4*>(from) + i);
      reinterpret_cast<uint2*>(into)[i] = {gather_nibbles(codes.x) | gather_nibbles(codes.y) << 16,
                                           gather_nibbles(codes.z) | gather_nibbles(codes.w) << 16};
    } else {
      const uint2 codes = __ldg(reinterpret_cast<const uint2*>(from) + i);
      reinterpret_cast<uint4*>(into)[i] = {spread_nibbles(codes.x & 0xFFFFu), spread_nibbles(codes.x >> 16),
                                           spread_nibbles(codes.y & 0xFFFFu), spread_nibbles(codes.y >> 16)};
    }
  }
  for (int64_t i = 8 * whole + thread_number(); i < packed; i += thread_count()) {
    const int64_t row = i / pitch, col = 2 * (i - row * pitch), at = row * cols + col;
    const bool pair = col + 1 < cols;
    if (pack) {
      into[i] = static_cast<uint8_t>((__ldg(from + at) & 0xFu) | (pair ? __ldg(from + at + 1) & 0xFu : 0u) << 4);
    } else {
      const uint8_t byte = __ldg(from + i);
      into[at] = byte & 0xFu;
      if (pair) into[at + 1] = byte >> 4;
    }
  }
}

// A tile of 512 bytes has 32 rows of 16: row r holds four blocks for each of the outer indices r, r + 32, r + 64, r
// + 96.
constexpr int TILE_OUTER = 128, TILE_BLOCKS = 4, SWIZZLED_ROWS = 32;

// Rows of 16 bytes in the swizzled array.
OCTAVO_HD int64_t swizzle_rows(const SwizzleArgs& args) {
  return ceil_div(args.outer, TILE_OUTER) * ceil_div(args.blocks, TILE_BLOCKS) * SWIZZLED_ROWS;
}

// Eight neighbouring threads take neighbouring tiles, whose plain bytes are contiguous; across the warp, four
// consecutive rows of 16 bytes are contiguous in the swizzled array.
OCTAVO_HD void swizzled_row(int64_t thread, int64_t tiles_wide, int64_t& tile, int64_t& row) {
  const int64_t strip = tiles_wide / 8 * 8 * SWIZZLED_ROWS;  // rows of a tile row that groups of eight tiles cover
  const int64_t whole = tiles_wide * SWIZZLED_ROWS, tile_row = thread / whole, within = thread % whole;
  if (within < strip) {
    const int64_t eight = within / (8 * SWIZZLED_ROWS), rest = within % (8 * SWIZZLED_ROWS);
    tile = tile_row * tiles_wide + eight * 8 + rest / 4 % 8;
    row = rest / 32 * 4 + rest % 4;
  } else {
    tile = tile_row * tiles_wide + within / SWIZZLED_ROWS;
    row = within % SWIZZLED_ROWS;
  }
}

__device__ __forceinline__ void swizzle_tiles(const SwizzleArgs& args) {
  const int64_t tiles_wide = ceil_div(args.blocks, TILE_BLOCKS), count = swizzle_rows(args);
  const uintptr_t addresses = reinterpret_cast<uintptr_t>(args.from) | reinterpret_cast<uintptr_t>(args.into);
  const bool words = args.blocks % 4 == 0 && addresses % 4 == 0;
  for (int64_t i = thread_number(); i < count; i += thread_count()) {
    int64_t tile, row;
    swizzled_row(i, tiles_wide, tile, row);
    const int64_t block0 = tile % tiles_wide * TILE_BLOCKS, outer0 = tile / tiles_wide * TILE_OUTER + row;
    const int64_t swizzled = tile * (TILE_OUTER * TILE_BLOCKS) + row * 16;
#pragma unroll
    for (int part = 0; part < 4; ++part) {
      const int64_t outer = outer0 + 32 * part, plain = outer * args.blocks + block0;
      if (words) {
        const bool present = outer < args.outer;
        if (args.to_swizzled) {
          uint32_t word = 0;
          if (present) word = __ldg(reinterpret_cast<const uint32_t*>(args.from + plain));
          *reinterpret_cast<uint32_t*>(args.into + swizzled + 4 * part) = word;
        } else if (present) {
          *reinterpret_cast<uint32_t*>(args.into + plain) =
              __ldg(reinterpret_cast<const uint32_t*>(args.from + swizzled + 4 * part));
        }
        continue;
      }
      for (int block = 0; block < TILE_BLOCKS; ++block) {
        const bool present = outer < args.outer && block0 + block < args.blocks;
        const int64_t at = swizzled + 4 * part + block;
        if (args.to_swizzled) {
          args.into[at] = present ? __ldg(args.from + plain + block) : uint8_t{0};
        } else if (present) {
          args.into[plain + block] = __ldg(args.from + at);
        }
      }
    }
  }
}

}  // namespace octavo::cuda
