// gemm_cpu: one thread per tile of the result. For every 128 elements along K both operands are converted to fp32 and
// their products are accumulated; the order of a sum depends on its length alone.
#include "octavo/gemm.h"

#include <algorithm>
#include <cstring>

#include "common/gemm_strides.h"
#include "cpu/loops/threads.h"
#include "cpu/planes/turns.h"
#include "octavo/interleave.h"
#include "side.h"

namespace octavo {

namespace cpu {

namespace {

using octavo_loops::Loops;

constexpr int64_t TILE_ROWS = PANEL_ROWS, TILE_COLS = 256, DEPTH = PANEL_ROWS;
// `multiply` processes rows in sixes: up to five past a tile.
constexpr int64_t SPARE_ROWS = 5;
// An odd number of cache lines: with a power of two the cache would map all rows to a few of its sets.
constexpr int64_t LEFT_STRIDE = TILE_ROWS + 16, RIGHT_STRIDE = TILE_COLS + 16;

struct Scratch {
  SideBuffers buffers;
  alignas(64) float left[DEPTH * LEFT_STRIDE] = {};
  alignas(64) float right[DEPTH * RIGHT_STRIDE] = {};
  alignas(64) float sums[(TILE_ROWS + SPARE_ROWS) * TILE_COLS];
};

// Part of the result: of matrix `group` of dw, or of y and dx.
struct Tile {
  int64_t group, row, rows, col, cols;
};

class GroupedGemm {
 public:
  GroupedGemm(const GemmArgs& args, const Loops& loops)
      : args_(args),
        spec_(args.spec),
        loops_(loops),
        panels_(args.rows, args.groups, 0, args.plan),
        left_(spec_, args.left, true, weights(), ragged(left_cols(args)), loops),
        right_(spec_, args.right, false, spec_.gemm != Gemm::fprop, weights() ? ragged(args.k) : stacked(), loops),
        col_tiles_(ceil_div(out_cols(args), TILE_COLS)) {}

  int64_t tiles() const {
    return weights() ? args_.groups * ceil_div(args_.n, TILE_ROWS) * col_tiles_ : panels_.used() * col_tiles_;
  }

  // Bytes of both operands' values for a tile of average size, as an estimate of its time.
  int64_t tile_bytes() const {
    const int64_t sides = std::min(TILE_ROWS, weights() ? args_.n : args_.rows) + std::min(TILE_COLS, out_cols(args_));
    return 4 * sides * (weights() ? ceil_div(args_.rows, args_.groups) : length());
  }

  void run(int64_t index, Scratch& scratch) const {
    if (weights()) {
      gradient_tile(index, scratch);
    } else {
      row_tile(index, scratch);
    }
  }

  // Rows of y and dx that belong to no group are +0.
  void zero_tail() const {
    const int64_t used = args_.plan ? plan().rows_in_use() : 0;
    const size_t bytes = static_cast<size_t>(out_cols(args_) * dtype_bytes(spec_.out_dtype));
    for (int64_t row = used; row < args_.rows; ++row) std::memset(out_at(0, row, 0), 0, bytes);
  }

 private:
  bool weights() const { return spec_.gemm == Gemm::wgrad; }
  PlanView plan() const { return {args_.plan, args_.rows, args_.groups}; }
  // K of fprop and dgrad.
  int64_t length() const { return left_cols(args_); }

  DequantizeArgs ragged(int64_t cols) const {
    DequantizeArgs shape;
    shape.rows = args_.rows, shape.cols = cols, shape.groups = args_.groups, shape.plan = args_.plan;
    return shape;
  }
  DequantizeArgs stacked() const {
    DequantizeArgs shape;
    shape.rows = args_.groups * args_.n, shape.cols = args_.k, shape.groups = args_.groups, shape.matrix_rows = args_.n;
    return shape;
  }

  void row_tile(int64_t index, Scratch& scratch) const {
    const int64_t panel_index = index / col_tiles_, col = index % col_tiles_ * TILE_COLS;
    const Panel panel = panels_.at(panel_index);
    const Tile tile = {panel.group, panel.row0, panel.rows, col, std::min(TILE_COLS, out_cols(args_) - col)};
    clear(tile, scratch);
    const int64_t first_matrix = panel.group * ceil_div(args_.n, PANEL_ROWS);
    for (int64_t at = 0; at < length(); at += DEPTH) {
      const int64_t depth = std::min(DEPTH, length() - at);
      left_.load({panel_index, panel, panel.rows, at, depth}, scratch.buffers, scratch.left, LEFT_STRIDE);
      for (int64_t c = 0; c < tile.cols; c += PANEL_ROWS) {
        const int64_t place = first_matrix + (spec_.gemm == Gemm::fprop ? col + c : at) / PANEL_ROWS;
        const Panel rows = stacked_panel(place, args_.n);
        const PanelBlock block = spec_.gemm == Gemm::fprop
                                     ? PanelBlock{place, rows, rows.rows, at, depth}
                                     : PanelBlock{place, rows, rows.rows, col + c, std::min(DEPTH, tile.cols - c)};
        right_.load(block, scratch.buffers, scratch.right + c, RIGHT_STRIDE);
      }
      multiply(tile, depth, scratch);
    }
    store(tile, scratch);
  }

  void gradient_tile(int64_t index, Scratch& scratch) const {
    // groups innermost: sizes differ, and every thread gets a share of each group
    const int64_t group = index % args_.groups, place = index / args_.groups;
    const int64_t row = place / col_tiles_ * TILE_ROWS, col = place % col_tiles_ * TILE_COLS;
    const Tile tile = {group, row, std::min(TILE_ROWS, args_.n - row), col, std::min(TILE_COLS, args_.k - col)};
    const int64_t* starts = args_.plan ? plan().block_start(HEIGHT_128) : nullptr;
    const int64_t first = starts ? starts[group] : 0, last = starts ? starts[group + 1] : 0;
    if (first == last && spec_.accumulate) return;
    clear(tile, scratch);
    for (int64_t panel_index = first; panel_index < last; ++panel_index) {
      const Panel panel = panels_.at(panel_index);
      const int rows = spec_.hadamard ? static_cast<int>(round_up(panel.rows, 16)) : panel.rows;
      left_.load({panel_index, panel, rows, row, tile.rows}, scratch.buffers, scratch.left, LEFT_STRIDE);
      for (int64_t c = 0; c < tile.cols; c += PANEL_ROWS) {
        const PanelBlock block = {panel_index, panel, rows, col + c, std::min<int64_t>(PANEL_ROWS, tile.cols - c)};
        right_.load(block, scratch.buffers, scratch.right + c, RIGHT_STRIDE);
      }
      multiply(tile, rows, scratch);
    }
    store(tile, scratch);
  }

  static void clear(const Tile& tile, Scratch& scratch) {
    std::fill(scratch.sums, scratch.sums + (tile.rows + SPARE_ROWS) * TILE_COLS, 0.0f);
  }

  void multiply(const Tile& tile, int64_t depth, Scratch& scratch) const {
    loops_.multiply(scratch.left, LEFT_STRIDE, scratch.right, RIGHT_STRIDE, depth, tile.rows, tile.cols, scratch.sums,
                    TILE_COLS);
  }

  uint8_t* out_at(int64_t group, int64_t row, int64_t col) const {
    const int64_t element = group * args_.out_group_stride + row * args_.out_row_stride + col;
    return static_cast<uint8_t*>(args_.out) + element * dtype_bytes(spec_.out_dtype);
  }

  // The row of dw where one of the left operand's columns stands.
  int64_t row_of(int64_t row) const {
    return spec_.left_interleave ? interleaved_at(row, args_.n / 2, spec_.left_interleave) : row;
  }

  // A row of dw whose columns take turns.
  void store_interleaved(const Tile& tile, float* sums, uint8_t* out, float* other) const {
    const int dtype = static_cast<int>(spec_.out_dtype), bytes = dtype_bytes(spec_.out_dtype);
    const auto each = [&](const auto& body) {
      each_run(tile.col, tile.cols, args_.k / 2, spec_.right_interleave, body);
    };
    if (spec_.accumulate) {
      each([&](int64_t at, int64_t c, int64_t run) { loops_.load(dtype, out + at * bytes, other + c, run); });
      loops_.add(other, tile.cols, sums);
    }
    each([&](int64_t at, int64_t c, int64_t run) { loops_.store(dtype, sums + c, out + at * bytes, run); });
  }

  void store(const Tile& tile, Scratch& scratch) const {
    const int dtype = static_cast<int>(spec_.out_dtype);
    float* other = scratch.buffers.values;  // of a row: the bias, or what is accumulated
    if (args_.bias != nullptr) {
      const auto* bias = static_cast<const uint8_t*>(args_.bias);
      const int64_t element = tile.group * out_cols(args_) + tile.col;
      loops_.load(static_cast<int>(args_.bias_dtype), bias + element * dtype_bytes(args_.bias_dtype), other, tile.cols);
    }
    for (int64_t r = 0; r < tile.rows; ++r) {
      float* sums = scratch.sums + r * TILE_COLS;
      if (spec_.right_interleave) {
        store_interleaved(tile, sums, out_at(tile.group, tile.row + r, 0), other);
        continue;
      }
      uint8_t* out = out_at(weights() ? tile.group : 0, weights() ? row_of(tile.row + r) : tile.row + r, tile.col);
      if (args_.bias != nullptr) {
        const float scale = args_.bias_scales ? args_.bias_scales[tile.row + r] : 1.0f;
        for (int64_t c = 0; c < tile.cols; ++c) sums[c] += scale * other[c];
      }
      if (spec_.accumulate) {
        loops_.load(dtype, out, other, tile.cols);
        loops_.add(other, tile.cols, sums);
      }
      loops_.store(dtype, sums, out, tile.cols);
    }
  }

  const GemmArgs& args_;
  const GemmSpec& spec_;
  const Loops& loops_;
  Panels panels_;
  GemmSide left_, right_;
  int64_t col_tiles_;
};

}  // namespace

}  // namespace cpu

size_t gemm_workspace_cpu(const GemmArgs&) { return 0; }

Error gemm_cpu(const GemmArgs& given, int threads) {
  if (const Error error = check_gemm(given, false)) return error;
  if (threads < 0) return invalid("threads is negative; give 1 or more");
  const GemmArgs args = with_strides(given);
  const cpu::GroupedGemm gemm(args, octavo_loops::loops_for(threads));
  const bool good = cpu::split_with<cpu::Scratch>(gemm.tiles(), gemm.tile_bytes(), threads,
                                                  [&](int64_t first, int64_t last, cpu::Scratch& scratch) {
                                                    for (int64_t index = first; index < last; ++index)
                                                      gemm.run(index, scratch);
                                                  });
  if (!good) return {ErrorCode::unsupported, "no memory for a thread's tile (about 0.5 MB); free some"};
  if (args.spec.gemm != Gemm::wgrad) gemm.zero_tail();
  return {};
}

}  // namespace octavo
