// Which tile a grouped GEMM is cut into: a model of waves, operand bytes and rows a group, and no timing cache.
#include "gemm_tile.h"

#include <algorithm>

#include "gemm_strides.h"
#include "octavo/layouts.h"

namespace octavo {

namespace {

// Measured on an H200 (docs/performance.md says how): what a multiprocessor does, per microsecond.
constexpr double FP8_FLOPS = 10.5e6, BF16_FLOPS = 5.6e6;   // tensor cores at the clock that power allows
constexpr double L2_BYTES = 55.0e3;                        // from L2 into shared memory
constexpr double MEMORY_BYTES = 4.2e6;                     // of the whole device
constexpr double TILE_START = 0.9;                         // microseconds until a CTA's first K-block has come
constexpr double LAUNCH = 3.0;
// Part of the rate that a tile's instructions reach: narrow ones read the left operand more often.
constexpr double REACHED[] = {1.0, 0.93, 0.90};

constexpr int K_BLOCK_BYTES = 128;

double microseconds(const GemmSpec& spec, const GemmTile& tile, double reached, int64_t tiles, int64_t k_blocks,
                    double bytes, int sms) {
  const bool fp8 = multiplies_fp8(spec);
  const double depth = K_BLOCK_BYTES / (fp8 ? 1.0 : 2.0);
  const double math = 2.0 * tile.rows * tile.cols * depth / ((fp8 ? FP8_FLOPS : BF16_FLOPS) * reached);
  const double load = (tile.rows + tile.cols) * double{K_BLOCK_BYTES} / L2_BYTES;
  const double store = double(tile.rows) * tile.cols * dtype_bytes(spec.out_dtype) * (spec.accumulate ? 2 : 1);
  const double one = k_blocks * std::max(math, load) + TILE_START + store / L2_BYTES;
  const double waves = static_cast<double>(ceil_div(tiles, sms));
  return LAUNCH + std::max(waves * one, bytes / MEMORY_BYTES);
}

}  // namespace

const GemmTile* gemm_tiles(const GemmSpec& spec, int* count) {
  const bool rare = multiplies_fp8(spec) ? spec.right_format != Format::e4m3
                                         : !spec.quantized && spec.dtype != DType::bf16;
  *count = rare ? 1 : GEMM_TILE_COUNT;
  return GEMM_TILES;
}

GemmTileChoice gemm_tile(const GemmSpec& spec, int64_t rows, int64_t n, int64_t k, int64_t groups, int sms, int tile) {
  const bool k_grouped = spec.gemm == Gemm::wgrad;
  const double width = multiplies_fp8(spec) ? 1.0 : 2.0;
  const int64_t out_rows = k_grouped ? n : ceil_div(rows, groups), out_cols = spec.gemm == Gemm::fprop ? n : k;
  const int64_t depth = k_grouped ? ceil_div(rows, groups) : spec.gemm == Gemm::fprop ? k : n;
  const int64_t k_blocks = ceil_div(depth, K_BLOCK_BYTES / static_cast<int64_t>(width));
  const double out_bytes = double(groups) * out_rows * out_cols * dtype_bytes(spec.out_dtype);
  const double bytes = width * groups * (double(out_rows) * depth + double(out_cols) * depth) +
                       out_bytes * (spec.accumulate ? 2 : 1);
  int count = 0;
  const GemmTile* const tiles = gemm_tiles(spec, &count);
  GemmTileChoice best = {-1, 0, 0.0, 0.0, 0.0};
  for (int number = 0; number < count; ++number) {
    if (tile >= 0 && tile != number) continue;
    const GemmTile& one = tiles[number];
    const int64_t in_use = groups * ceil_div(out_rows, one.rows) * ceil_div(out_cols, one.cols);
    GemmTileChoice choice;
    choice.tile = number;
    choice.tiles = in_use;
    choice.waves = static_cast<double>(in_use) / sms;
    choice.filled = in_use == 0 ? 1.0 : double(groups) * out_rows * out_cols / (double(in_use) * one.rows * one.cols);
    choice.microseconds = microseconds(spec, one, REACHED[number], in_use, k_blocks, bytes, sms);
    if (best.tile < 0 || choice.microseconds < best.microseconds) best = choice;
  }
  return best;
}

}  // namespace octavo
