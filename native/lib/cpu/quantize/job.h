// One call of quantize_cpu: its arguments, what follows from them, and the arrays in its workspace.
#pragma once

#include "cpu/loops/loops.h"
#include "cpu/planes/operand.h"
#include "octavo/numerics.h"

namespace octavo::cpu {

using octavo_loops::Loops;

// Up to TILE elements of one panel in fp32: `rows` rows of `cols` columns from (row, col) of the panel on, `stride`
// apart. Columns from cols to the next multiple of 128 are zeros.
constexpr int64_t TILE = 128 * 128;
struct Tile {
  int64_t panel_index;
  Panel panel;
  int row, rows;
  int64_t col, cols, stride;

  int64_t padded_cols() const { return round_up(cols, 128); }
};

// Per-thread memory of a pass.
struct Scratch {
  alignas(64) float values[TILE];       // what is quantized
  alignas(64) float transformed[TILE];  // its Hadamard transform
  alignas(64) float encode[TILE / 16];  // of the units of a tile, or of a row's elements
  alignas(64) float decode[TILE / 16];
  alignas(64) float spread[1024];
  alignas(64) float decoded[1024];
  alignas(64) int32_t amax[TILE / 16];
  alignas(64) float row_encode[128];  // of the panel's rows, row scaling
  alignas(64) float row_decode[128];
  alignas(64) int32_t row_amax[128];
  alignas(64) uint16_t draws[TILE];
  alignas(64) uint8_t bytes[TILE / 16];
  alignas(64) uint8_t codes[TILE];
  alignas(64) uint8_t turned[TILE];
  alignas(64) float gate[1024], up[1024], other[1024];  // of a row, under a prologue
  double mean[128], rstd[128];                          // of the panel's rows, under a norm prologue
};

// Scales that groups share, [G] each.
struct GroupScales {
  float* encode = nullptr;  // delayed, current
  float* factor = nullptr;  // NVFP4: the stored second level
  float* sixth = nullptr;   // NVFP4: fl(S / 6)
};

struct Job {
  const QuantizeArgs& args;
  const Loops& loops;
  int threads;
  Panels panels;
  int64_t cols;  // of what is quantized
  bool row_wanted, column_wanted;

  // workspace; null where the call needs none
  int32_t* panel_amax = nullptr;        // [P] of what is quantized
  int32_t* transformed_amax = nullptr;  // [P] of its Hadamard transform
  int32_t* group_amax = nullptr;        // [G] from either
  int32_t* column_amax = nullptr;       // [G, C], row scaling's columnwise data
  float* panel_sums = nullptr;          // [P, C], dbias
  GroupScales row_groups, column_groups;

  Job(const QuantizeArgs& given, int thread_count)
      : args(given),
        loops(octavo_loops::loops_for(thread_count)),
        threads(thread_count < 1 ? 1 : thread_count),
        panels(given.input.rows, given.input.groups, given.input.matrix_rows, given.input.plan),
        cols(output_cols(given)),
        row_wanted(wanted(given.rowwise)),
        column_wanted(wanted(given.columnwise)) {}

  // An operand without elements has no codes, yet may have scales of groups and columns.
  static bool wanted(const Plane& plane) { return plane.codes || plane.scales || plane.global; }

  const QuantizerSpec& spec() const { return args.spec; }
  int format() const { return static_cast<int>(args.spec.format); }
  int64_t groups() const { return args.input.groups; }
  // Columnwise data with codes of their own.
  bool column_pass() const { return column_wanted && !spec().shares_codes(); }
  // Row codes, of the rowwise plane or shared.
  bool row_pass() const { return row_wanted || (column_wanted && spec().shares_codes()); }
  // Scales of units that span the group need its amax before the first code.
  bool needs_group_amax() const { return spec().scaling == Scaling::current || spec().scaling == Scaling::nvfp4; }
  int64_t panel_bytes() const { return PANEL_ROWS * cols * dtype_bytes(args.input.dtype); }
};

// Assigns the workspace's arrays and returns its size; with a null base only the size is meaningful.
size_t lay_out_workspace(Job& job, void* base);

// ---- prologue.cpp

// Computes the row statistics of a panel that the prologue needs before tiles are loaded: scratch.mean, scratch.rstd.
void begin_panel(const Job& job, const Panel& panel, Scratch& scratch);
// prologue.dprobs of the rows of a panel.
void probability_gradients(const Job& job, const Panel& panel, Scratch& scratch);
// prologue.forward of the rows of a panel.
void forward_values(const Job& job, const Panel& panel, Scratch& scratch);
// The prologue's values of one row of a tile, in fp32 and not yet rounded; `row` counts from the operand's first.
void prologue_row(const Job& job, const Tile& tile, int64_t row, float* out, Scratch& scratch);

// ---- load.cpp

// The tile's values, after the prologue, in scratch.values.
void load_tile(const Job& job, const Tile& tile, Scratch& scratch);
// scratch.transformed from scratch.values; returns the tile with its rows padded to 16.
Tile transform(const Job& job, const Tile& tile, Scratch& scratch);

// Calls `visit(tile)` for the tiles of a panel's columns [first, last), first a multiple of 128, each already loaded.
// wide: 16 rows of 1024 columns, the order in which memory is read fastest; else 128 rows of 128 columns.
template <typename Visit>
void each_tile(const Job& job, int64_t index, bool wide, int64_t first, int64_t last, Scratch& scratch,
               const Visit& visit) {
  const Panel panel = job.panels.at(index);
  const int height = wide ? 16 : 128;
  const int64_t width = TILE / height;
  for (int row = 0; row < panel.rows; row += height) {
    for (int64_t col = first; col < last; col += width) {
      const int rows = panel.rows - row < height ? panel.rows - row : height;
      const int64_t cols = last - col < width ? last - col : width;
      const Tile tile = {index, panel, row, rows, col, cols, width};
      load_tile(job, tile, scratch);
      visit(tile);
    }
  }
}

// ---- amax.cpp: amaxes that must be known before the first code, and the scales that groups share

// Panel amaxes; false where memory ran out.
bool panel_amax_pass(const Job& job);
// Row scaling's columnwise amaxes and the scales [G, C] from them; false where memory ran out.
bool column_amax_pass(const Job& job);
// Scales of groups, to the planes and to the workspace.
void group_scales(const Job& job);
// args.amax from the panel amaxes.
void write_amax(const Job& job);
// scratch.row_encode and row_decode of one panel under row scaling.
void row_scales(const Job& job, int64_t index, Scratch& scratch);

// ---- tile.cpp: codes and scales of one tile

// Row codes, and the columnwise plane where it shares them.
void row_codes(const Job& job, const Tile& tile, Scratch& scratch);
// Columnwise codes of their own.
void column_codes(const Job& job, const Tile& tile, Scratch& scratch);

}  // namespace octavo::cpu
