// 128 columns of a K-panel, between [row][column] and the columns of the native layout.
#pragma once

#include "cpu/loops/loops.h"
#include "octavo/types.h"
#include "operand.h"

namespace octavo::cpu {

// Bytes of one column of a panel's codes.
inline int64_t panel_height(Format format) { return format == Format::e2m1 ? PANEL_ROWS / 2 : PANEL_ROWS; }

// `codes` is [128][128] with `rows` real rows; the others become zero codes. Writes `cols` columns to `to`.
// `turned` has room for 128 * 128 bytes.
void codes_to_columns(const octavo_loops::Loops& loops, Format format, uint8_t* codes, int rows, int64_t cols,
                      uint8_t* turned, uint8_t* to);

// The inverse: all 128 rows of `cols` columns, to `codes` [128][128].
void columns_to_codes(const octavo_loops::Loops& loops, Format format, const uint8_t* from, int64_t cols,
                      uint8_t* turned, uint8_t* codes);

// Packs one row of `cols` one-byte E2M1 codes into ceil(cols / 2) bytes, an odd last code alone in its byte; and
// unpacks it.
inline void pack_row(const octavo_loops::Loops& loops, const uint8_t* from, int64_t cols, uint8_t* to) {
  loops.pack(from, cols / 2, to);
  if (cols % 2) to[cols / 2] = from[cols - 1] & 0xFu;
}

inline void unpack_row(const octavo_loops::Loops& loops, const uint8_t* from, int64_t cols, uint8_t* to) {
  loops.unpack(from, cols / 2, to);
  if (cols % 2) to[cols - 1] = from[cols / 2] & 0xFu;
}

}  // namespace octavo::cpu
