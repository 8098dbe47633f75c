// 128 rows by 64 columns of one-byte codes in smem, between row-major payloads and panels.
//
// Word (column, k) holds rows 4 k to 4 k + 3 of a column. A thread moves 4 x 4 codes with one transposition in
// registers; with a pitch of 33 words per column neither direction has more than two-way bank conflicts.
#pragma once

#include "cuda/device/transpose.cuh"
#include "cuda/device/values.cuh"
#include "planes.cuh"

namespace octavo::cuda {

constexpr int CODE_TILE_COLS = 64;
constexpr int CODE_TILE_THREADS = 256;
constexpr int CODE_TILE_WARPS = CODE_TILE_THREADS / 32;
constexpr int COLUMN_WORDS = PANEL_ROWS / 4;
constexpr int COLUMN_PITCH = COLUMN_WORDS + 1;

struct CodeTile {
  uint32_t word[CODE_TILE_COLS * COLUMN_PITCH];
};

// Block `i` (0 to 511) of 4 x 4 codes: from column 4 * col4 and row 4 * row4 on.
struct Block4 {
  int col4, row4;
};
OCTAVO_HD Block4 block4(int i) { return {i % (CODE_TILE_COLS / 4), i / (CODE_TILE_COLS / 4)}; }

__device__ __forceinline__ void get_rows(const CodeTile& tile, const Block4& block, uint32_t (&row)[4]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) row[i] = tile.word[(4 * block.col4 + i) * COLUMN_PITCH + block.row4];
  transpose_bytes(row[0], row[1], row[2], row[3]);
}

__device__ __forceinline__ void put_rows(CodeTile& tile, const Block4& block, uint32_t (&row)[4]) {
  transpose_bytes(row[0], row[1], row[2], row[3]);
#pragma unroll
  for (int i = 0; i < 4; ++i) tile.word[(4 * block.col4 + i) * COLUMN_PITCH + block.row4] = row[i];
}

// The first `count` (up to four) bytes of a row, the others 0. `words`: the address is aligned to 4 and count is 4.
__device__ __forceinline__ uint32_t load_row4(const uint8_t* __restrict__ from, int count, bool words) {
  if (words) return __ldg(reinterpret_cast<const uint32_t*>(from));
  uint32_t word = 0;
  for (int i = 0; i < count; ++i) word |= static_cast<uint32_t>(__ldg(from + i)) << (8 * i);
  return word;
}

__device__ __forceinline__ void store_row4(uint8_t* into, uint32_t word, int count, bool words) {
  if (words) {
    *reinterpret_cast<uint32_t*>(into) = word;
  } else {
    for (int i = 0; i < count; ++i) into[i] = static_cast<uint8_t>(word >> (8 * i));
  }
}

// Rows [row0, row0 + rows) and columns from `col0` on of a payload [.., cols]; zeros outside of it.
__device__ __forceinline__ void load_rows(CodeTile& tile, const uint8_t* __restrict__ codes, int64_t row0, int rows,
                                          int64_t col0, int64_t cols, bool words) {
#pragma unroll
  for (int i = threadIdx.x; i < CODE_TILE_COLS * COLUMN_WORDS / 4; i += CODE_TILE_THREADS) {
    const Block4 block = block4(i);
    const int64_t col = col0 + 4 * block.col4;
    const int count = col >= cols ? 0 : cols - col < 4 ? static_cast<int>(cols - col) : 4;
    uint32_t row[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const int r = 4 * block.row4 + j;
      row[j] = r < rows && count ? load_row4(codes + (row0 + r) * cols + col, count, words) : 0u;
    }
    put_rows(tile, block, row);
  }
}

__device__ __forceinline__ void store_rows(const CodeTile& tile, uint8_t* __restrict__ codes, int64_t row0, int rows,
                                           int64_t col0, int64_t cols, bool words) {
#pragma unroll
  for (int i = threadIdx.x; i < CODE_TILE_COLS * COLUMN_WORDS / 4; i += CODE_TILE_THREADS) {
    const Block4 block = block4(i);
    const int64_t col = col0 + 4 * block.col4;
    const int count = col >= cols ? 0 : cols - col < 4 ? static_cast<int>(cols - col) : 4;
    uint32_t row[4];
    get_rows(tile, block, row);
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const int r = 4 * block.row4 + j;
      if (r < rows && count) store_row4(codes + (row0 + r) * cols + col, row[j], count, words);
    }
  }
}

// Columns from `col0` on of a panel [cols][128], E2M1 [cols][64]: one contiguous range. The panel is 4-byte aligned.
template <bool packed>
__device__ __forceinline__ void load_panel(CodeTile& tile, const uint8_t* __restrict__ panel, int64_t col0,
                                           int64_t cols) {
  constexpr int words = packed ? COLUMN_WORDS / 2 : COLUMN_WORDS;
  const uint32_t* from = reinterpret_cast<const uint32_t*>(panel) + col0 * words;
  const int count = (cols - col0 < CODE_TILE_COLS ? static_cast<int>(cols - col0) : CODE_TILE_COLS) * words;
#pragma unroll
  for (int i = threadIdx.x; i < CODE_TILE_COLS * words; i += CODE_TILE_THREADS) {
    const uint32_t word = i < count ? __ldg(from + i) : 0u;
    const int at = i / words * COLUMN_PITCH;
    if constexpr (packed) {
      tile.word[at + 2 * (i % words)] = spread_nibbles(word & 0xFFFFu);
      tile.word[at + 2 * (i % words) + 1] = spread_nibbles(word >> 16);
    } else {
      tile.word[at + i % words] = word;
    }
  }
}

template <bool packed>
__device__ __forceinline__ void store_panel(const CodeTile& tile, uint8_t* __restrict__ panel, int64_t col0,
                                            int64_t cols) {
  constexpr int words = packed ? COLUMN_WORDS / 2 : COLUMN_WORDS;
  uint32_t* into = reinterpret_cast<uint32_t*>(panel) + col0 * words;
  const int count = (cols - col0 < CODE_TILE_COLS ? static_cast<int>(cols - col0) : CODE_TILE_COLS) * words;
#pragma unroll
  for (int i = threadIdx.x; i < CODE_TILE_COLS * words; i += CODE_TILE_THREADS) {
    if (i >= count) continue;
    const int at = i / words * COLUMN_PITCH;
    if constexpr (packed) {
      into[i] = gather_nibbles(tile.word[at + 2 * (i % words)]) | gather_nibbles(tile.word[at + 2 * (i % words) + 1])
                                                                      << 16;
    } else {
      into[i] = tile.word[at + i % words];
    }
  }
}

}  // namespace octavo::cuda
