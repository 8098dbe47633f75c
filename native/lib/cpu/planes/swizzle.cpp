// Byte layouts that do not depend on groups: Blackwell's scale tiles, packed E2M1.
#include <cstring>

#include "octavo/dequantize.h"
#include "octavo/layouts.h"
#include "panels.h"

namespace octavo {

namespace {

constexpr int64_t TILE_OUTER = 128, TILE_BLOCKS = 4;

// Byte of element (outer, block) in the swizzled array: tiles of 512 bytes, row-major over [outer / 128, blocks / 4].
int64_t swizzled_byte(int64_t outer, int64_t block, int64_t tiles_wide) {
  const int64_t tile = outer / TILE_OUTER * tiles_wide + block / TILE_BLOCKS, row = outer % TILE_OUTER;
  return tile * (TILE_OUTER * TILE_BLOCKS) + row % 32 * 16 + row / 32 * 4 + block % TILE_BLOCKS;
}

}  // namespace

Error swizzle_scales_cpu(const SwizzleArgs& args) {
  if (const Error error = check_swizzle(args)) return error;
  if (args.outer * args.blocks == 0) return {};
  const int64_t tiles_wide = ceil_div(args.blocks, TILE_BLOCKS);
  if (args.to_swizzled) {
    std::memset(args.into, 0, static_cast<size_t>(round_up(args.outer, TILE_OUTER) * tiles_wide * TILE_BLOCKS));
  }
  for (int64_t outer = 0; outer < args.outer; ++outer) {
    for (int64_t block = 0; block < args.blocks; ++block) {
      const int64_t plain = outer * args.blocks + block, swizzled = swizzled_byte(outer, block, tiles_wide);
      args.into[args.to_swizzled ? swizzled : plain] = args.from[args.to_swizzled ? plain : swizzled];
    }
  }
  return {};
}

Error pack_e2m1_cpu(const PackArgs& args) {
  if (const Error error = check_pack(args)) return error;
  const octavo_loops::Loops& loops = octavo_loops::loops_for(1);
  const int64_t packed_cols = ceil_div(args.cols, 2);
  for (int64_t row = 0; row < args.rows; ++row) {
    if (args.pack) {
      cpu::pack_row(loops, args.from + row * args.cols, args.cols, args.into + row * packed_cols);
    } else {
      cpu::unpack_row(loops, args.from + row * packed_cols, args.cols, args.into + row * args.cols);
    }
  }
  return {};
}

}  // namespace octavo
