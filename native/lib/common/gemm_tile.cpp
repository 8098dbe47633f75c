// Chooses the tile of a grouped GEMM by a model of waves, operand bytes and rows per group; nothing is timed or cached.
#include "gemm_tile.h"

#include <algorithm>

#include "gemm_strides.h"
#include "octavo/layouts.h"

namespace octavo {

namespace {

// Fitted to measurements on an H200 (in benchmarks/results): microseconds, and the work of one of its 132
// multiprocessors per microsecond.
constexpr double FAST_FLOPS = 14.0e6, PROMOTED_FLOPS = 11.5e6, BF16_FLOPS = 7.0e6;
constexpr double MEMORY_BYTES = 33.0e3;  // a multiprocessor's share of device memory
constexpr double LAUNCH = 4.0, TILE_START = 0.5;
constexpr double EXPOSED = 0.25;  // fraction of the shorter of math and memory time that the longer one does not hide
constexpr int COMMON_TILES = 3;   // of every GEMM whose formats are not rare; the others are for scales of columns
// Fraction of the peak rate that each tile reaches: smaller ones load more per product, and 128x128 has fewer bytes in
// flight.
constexpr double REACHED[COMMON_TILES] = {1.0, 0.58, 0.75};
// The same where each column has a scale, so that promotion takes longer than the products: it is shorter per product
// in parts of 192 columns, and of three warpgroups two multiply while one promotes.
constexpr double REACHED_BY_COLUMNS[GEMM_TILE_COUNT] = {0.70, 0.67, 0.63, 0.75, 0.82};

constexpr int K_BLOCK_BYTES = 128;

double flops(const GemmSpec& spec) {
  if (!multiplies_fp8(spec)) return BF16_FLOPS;
  return spec.fast_accumulation ? FAST_FLOPS : PROMOTED_FLOPS;
}

// wgrad whose operands both have a scale for each 128 tokens of a column.
bool scales_columns(const GemmSpec& spec) {
  return spec.gemm == Gemm::wgrad && multiplies_fp8(spec) && spec.scaling == Scaling::block && !spec.right_square;
}

// Fraction of the shorter of a tile's products and its stores that the longer one does not hide. Sums that are added to
// fp32 go out beside the next tile's products in tiles above 128x128, and by a bulk reduction in those of 128x128.
double exposed_store(const GemmSpec& spec, int number) {
  if (!spec.accumulate || spec.out_dtype != DType::f32) return 1.0;
  switch (number) {
    case 0: return multiplies_fp8(spec) && spec.scaling == Scaling::row ? 1.0 : 0.35;   // 128x256
    case 1: return multiplies_fp8(spec) && spec.scaling != Scaling::block ? 0.0 : 0.4;  // 128x128
    case 3: return 0.25;                                                                // 128x192
    case 4: return 0.6;                                                                 // 192x128
    default: return 1.0;
  }
}

double microseconds(const GemmSpec& spec, int number, int64_t tiles, int64_t k_blocks, double bytes, int sms) {
  const GemmTile& tile = GEMM_TILES[number];
  const double depth = K_BLOCK_BYTES / (multiplies_fp8(spec) ? 1.0 : 2.0);
  const double reached = scales_columns(spec) ? REACHED_BY_COLUMNS[number] : REACHED[number];
  const double math = k_blocks * 2.0 * tile.rows * tile.cols * depth / (flops(spec) * reached);
  const double store = double(tile.rows) * tile.cols * dtype_bytes(spec.out_dtype) * (spec.accumulate ? 2 : 1);
  const double left = store / MEMORY_BYTES;
  const double one = TILE_START + std::max(math, left) + exposed_store(spec, number) * std::min(math, left);
  const double products = static_cast<double>(ceil_div(tiles, sms)) * one, memory = bytes / (MEMORY_BYTES * sms);
  return LAUNCH + std::max(products, memory) + EXPOSED * std::min(products, memory);
}

}  // namespace

const GemmTile* gemm_tiles(const GemmSpec& spec, int* count) {
  const bool rare =
      multiplies_fp8(spec) ? spec.right_format != Format::e4m3 : !spec.quantized && spec.dtype != DType::bf16;
  *count = rare ? 1 : scales_columns(spec) ? GEMM_TILE_COUNT : COMMON_TILES;
  return GEMM_TILES;
}

GemmTileChoice gemm_tile(const GemmSpec& spec, int64_t rows, int64_t n, int64_t k, int64_t groups, int sms, int tile) {
  sms = std::max(sms, 1);  // the launch itself says that there is no device, whose multiprocessors are 0
  const bool k_grouped = spec.gemm == Gemm::wgrad;
  const double width = multiplies_fp8(spec) ? 1.0 : 2.0;
  const int64_t out_rows = k_grouped ? n : ceil_div(rows, groups), out_cols = spec.gemm == Gemm::fprop ? n : k;
  const int64_t depth = k_grouped ? ceil_div(rows, groups) : spec.gemm == Gemm::fprop ? k : n;
  const int64_t k_blocks = ceil_div(depth, K_BLOCK_BYTES / static_cast<int64_t>(width));
  const double out_bytes = double(groups) * out_rows * out_cols * dtype_bytes(spec.out_dtype);
  const double bytes =
      width * groups * (double(out_rows) * depth + double(out_cols) * depth) + out_bytes * (spec.accumulate ? 2 : 1);
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
    choice.microseconds = microseconds(spec, number, in_use, k_blocks, bytes, sms);
    if (best.tile < 0 || choice.microseconds < best.microseconds) best = choice;
  }
  return best;
}

}  // namespace octavo
