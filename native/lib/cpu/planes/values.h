// Codes and scales of one plane, in either layout, to fp32: what dequantize_cpu stores and what gemm_cpu multiplies.
#pragma once

#include "cpu/loops/loops.h"
#include "octavo/dequantize.h"
#include "operand.h"

namespace octavo::cpu {

// Columns [col, col + cols) of one panel, at most 128. `rows`: of the panel as this plane holds it (plane_rows).
struct PanelBlock {
  int64_t index;
  Panel panel;
  int rows;
  int64_t col, cols;
};

// Per-thread memory.
struct PlaneBuffers {
  alignas(64) uint8_t codes[128 * 128];
  alignas(64) uint8_t turned[128 * 128];
  alignas(64) uint8_t bytes[128];
  alignas(64) float units[128];
  alignas(64) float scales[128];
};

class PlaneValues {
 public:
  // Of `args` all but the output.
  PlaneValues(const DequantizeArgs& args, const octavo_loops::Loops& loops)
      : args_(args),
        loops_(loops),
        columnwise_(args.direction == Direction::columnwise),
        native_(args.plane.layout == Layout::native) {}

  // to[r * stride + c] = element (r, block.col + c) of the panel; NaN canonical.
  void load(const PanelBlock& block, PlaneBuffers& buffers, float* to, int64_t stride) const;

 private:
  void load_codes(const PanelBlock& block, PlaneBuffers& buffers) const;
  void load_units(int64_t first, int64_t step, int64_t count, int32_t group, PlaneBuffers& buffers) const;
  void row_scales(const PanelBlock& block, int r, PlaneBuffers& buffers) const;

  DequantizeArgs args_;
  const octavo_loops::Loops& loops_;
  bool columnwise_, native_;
};

}  // namespace octavo::cpu
