// dequantize_cpu: codes and scales of one plane, in either layout, to values in either layout.
#include "octavo/dequantize.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <memory>
#include <new>

#include "octavo/numerics.h"
#include "operand.h"
#include "panels.h"
#include "threads.h"

namespace octavo {

namespace cpu {

namespace {

using octavo_loops::Loops;

struct Buffers {
  alignas(64) uint8_t codes[128 * 128];
  alignas(64) uint8_t turned[128 * 128];
  alignas(64) float values[128 * 128];
  alignas(64) uint8_t bytes[128];
  alignas(64) float units[128];
  alignas(64) float scales[128];
};

// Columns [col, col + cols) of one panel.
struct Block {
  int64_t index;
  Panel panel;
  int rows;  // in this plane
  int64_t col, cols;
};

class Dequantizer {
 public:
  Dequantizer(const DequantizeArgs& args, const Loops& loops)
      : args_(args),
        loops_(loops),
        columnwise_(args.direction == Direction::columnwise),
        native_(args.plane.layout == Layout::native) {}

  void run(const Block& block, Buffers& buffers) const {
    load_codes(block, buffers);
    for (int r = 0; r < block.rows; ++r) {
      row_scales(block, r, buffers);
      loops_.decode(static_cast<int>(args_.spec.format), buffers.codes + r * 128, buffers.scales, block.cols,
                    buffers.values + r * 128);
    }
    store(block, buffers);
  }

 private:
  void load_codes(const Block& block, Buffers& buffers) const {
    const auto* codes = static_cast<const uint8_t*>(args_.plane.codes);
    const Format format = args_.spec.format;
    if (columnwise_ && native_) {
      const int64_t place = (block.index * args_.cols + block.col) * panel_height(format);
      return columns_to_codes(loops_, format, codes + place, block.cols, buffers.turned, buffers.codes);
    }
    const int64_t row0 = plane_row0(args_.spec, args_.direction, block.panel);
    for (int r = 0; r < block.rows; ++r) {
      uint8_t* to = buffers.codes + r * 128;
      if (native_ && format == Format::e2m1) {
        unpack_row(loops_, codes + (row0 + r) * ceil_div(args_.cols, 2) + block.col / 2, block.cols, to);
      } else {
        std::memcpy(to, codes + (row0 + r) * args_.cols + block.col, static_cast<size_t>(block.cols));
      }
    }
  }

  // Decode scales of `count` units, `step` elements apart from `first` on, in buffers.units.
  void load_units(int64_t first, int64_t step, int64_t count, int32_t group, Buffers& buffers) const {
    const Scaling scaling = args_.spec.scaling;
    if (scaling != Scaling::mxfp8 && scaling != Scaling::nvfp4) {
      const auto* scales = static_cast<const float*>(args_.plane.scales);
      for (int64_t i = 0; i < count; ++i) buffers.units[i] = scales[first + i * step];
      return;
    }
    const auto* scales = static_cast<const uint8_t*>(args_.plane.scales);
    for (int64_t i = 0; i < count; ++i) buffers.bytes[i] = scales[first + i * step];
    if (scaling == Scaling::mxfp8) {
      loops_.e8m0_values(buffers.bytes, count, buffers.units);
    } else {
      loops_.nvfp4_values(buffers.bytes, count, args_.plane.global[group], buffers.units);
    }
  }

  // One decode scale an element of row r of the block, in buffers.scales.
  void row_scales(const Block& block, int r, Buffers& buffers) const {
    const QuantizerSpec& spec = args_.spec;
    const int size = block_size(spec.scaling);
    const int64_t row = block.panel.row0 + r;
    const int32_t group = block.panel.group;
    if (size == 0) {
      const bool each_column = columnwise_ && spec.scaling == Scaling::row;
      if (each_column) {
        load_units(group * args_.cols + block.col, 1, block.cols, group, buffers);
        std::copy(buffers.units, buffers.units + block.cols, buffers.scales);
      } else {
        const float scale = static_cast<const float*>(args_.plane.scales)[has_group_scales(spec) ? group : row];
        std::fill(buffers.scales, buffers.scales + block.cols, scale);
      }
      return;
    }
    if (columnwise_ && !spec.square) {
      if (r % size == 0) {
        const ScaleIndex index = column_scale_index(spec, args_.plane.layout, block.panel, block.index, args_.cols);
        load_units(index(block.col, r / size), index.per_outer, block.cols, group, buffers);
        std::copy(buffers.units, buffers.units + block.cols, buffers.scales);
      }
      return;
    }
    const int64_t count = ceil_div(block.cols, size), block0 = block.col / size;
    if (spec.square) {
      if (r % size != 0) return;
      const int64_t unit_row = first_block(block.panel, block.index, size) + r / size;
      load_units(unit_row * ceil_div(args_.cols, size) + block0, 1, count, group, buffers);
    } else {
      const int64_t rows = args_.rows;
      const ScaleIndex index = row_scale_index(spec, args_.plane.layout, rows, args_.cols);
      load_units(index(row, block0), index.per_block, count, group, buffers);
    }
    loops_.spread(buffers.units, size, count, buffers.scales);
  }

  void store(const Block& block, Buffers& buffers) const {
    const int dtype = static_cast<int>(args_.out_dtype), bytes = dtype_bytes(args_.out_dtype);
    auto* out = static_cast<uint8_t*>(args_.out);
    if (args_.out_layout == Layout::plain) {
      const int64_t row0 = plane_row0(args_.spec, args_.direction, block.panel);
      for (int r = 0; r < block.rows; ++r) {
        uint8_t* to = out + ((row0 + r) * args_.cols + block.col) * bytes;
        loops_.store(dtype, buffers.values + r * 128, to, block.cols);
      }
      return;
    }
    alignas(64) float column[PANEL_ROWS] = {};
    for (int64_t c = 0; c < block.cols; ++c) {
      for (int r = 0; r < block.rows; ++r) column[r] = buffers.values[r * 128 + c];
      loops_.store(dtype, column, out + (block.index * args_.cols + block.col + c) * PANEL_ROWS * bytes, PANEL_ROWS);
    }
  }

  const DequantizeArgs& args_;
  const Loops& loops_;
  bool columnwise_, native_;
};

// Rows of the plain output that no group has are +0.
void zero_tail(const DequantizeArgs& args) {
  const PlanView plan = {args.plan, args.rows, args.groups};
  const bool padded = args.spec.hadamard && args.direction == Direction::columnwise;
  const int64_t all = padded ? block_bound(args.rows, args.groups, 16) * 16 : args.rows;
  const int64_t used = args.matrix_rows ? all : !args.plan ? 0 : padded ? plan.blocks_in_use(HEIGHT_16) * 16
                                                                        : plan.rows_in_use();
  const int64_t row_bytes = args.cols * dtype_bytes(args.out_dtype);
  if (all == used || row_bytes == 0) return;  // memset takes no null pointer, not even for nothing
  std::memset(static_cast<uint8_t*>(args.out) + used * row_bytes, 0, static_cast<size_t>((all - used) * row_bytes));
}

}  // namespace

}  // namespace cpu

Error dequantize_cpu(const DequantizeArgs& args, int threads) {
  if (const Error error = check_dequantize(args)) return error;
  if (threads < 0) return invalid("threads is negative; give 1 or more");
  const cpu::Panels panels(args.rows, args.groups, args.matrix_rows, args.plan);
  const cpu::Dequantizer dequantizer(args, octavo_loops::loops_for(threads));
  std::atomic<bool> good = true;
  cpu::split(panels.used(), PANEL_ROWS * args.cols, threads, [&](int64_t first, int64_t last) {
    const auto buffers = std::unique_ptr<cpu::Buffers>(new (std::nothrow) cpu::Buffers);
    if (!buffers) {
      good = false;
      return;
    }
    for (int64_t index = first; index < last; ++index) {
      const Panel panel = panels.at(index);
      const int rows = cpu::plane_rows(args.spec, args.direction, panel.rows);
      for (int64_t col = 0; col < args.cols; col += 128) {
        dequantizer.run({index, panel, rows, col, std::min<int64_t>(128, args.cols - col)}, *buffers);
      }
    }
  });
  if (!good) return {ErrorCode::unsupported, "no memory for a thread's tile (about 0.1 MB); free some"};
  if (args.out_layout == Layout::plain) cpu::zero_tail(args);
  return {};
}

}  // namespace octavo
