// convert_cpu: one plane between the plain and the native layout. Only what the groups hold is read and written.
#include <algorithm>
#include <cstring>

#include "cpu/loops/threads.h"
#include "octavo/dequantize.h"
#include "operand.h"
#include "panels.h"

namespace octavo {

namespace cpu {

namespace {

using octavo_loops::Loops;

struct Buffers {
  alignas(64) uint8_t codes[128 * 128];
  alignas(64) uint8_t turned[128 * 128];
};

class Converter {
 public:
  Converter(const ConvertArgs& args, const Loops& loops)
      : args_(args),
        loops_(loops),
        format_(args.spec.format),
        to_native_(args.to == Layout::native),
        panels_(args.rows, args.groups, args.matrix_rows, args.plan) {}

  int64_t panels() const { return panels_.used(); }

  void convert_panel(int64_t index, Buffers& buffers) const {
    const Panel panel = panels_.at(index);
    if (args_.direction == Direction::rowwise) {
      row_codes(panel);
      if (has_row_blocks()) row_scales(panel);
      return;
    }
    const int rows = plane_rows(args_.spec, args_.direction, panel.rows);
    for (int64_t col = 0; col < args_.cols; col += 128) column_codes(index, panel, rows, col, buffers);
    if (has_row_blocks()) column_scales(index, panel, rows);
  }

  // Scales that do not belong to the rows of one panel: the same array in both layouts.
  void copy_shared_scales() const {
    if (has_row_blocks()) return;
    const QuantizerSpec& spec = args_.spec;
    int64_t count = args_.groups, bytes = 4;
    if (spec.scaling == Scaling::row) {
      count = args_.direction == Direction::rowwise ? rows_in_use() : args_.groups * args_.cols;
    } else if (spec.square) {
      const int size = block_size(spec.scaling);
      count = block_rows_in_use(size) * ceil_div(args_.cols, size);
      bytes = spec.scaling == Scaling::block ? 4 : 1;
    }
    if (count == 0 || !args_.into.scales || !args_.from.scales) return;  // null where the operand has no elements
    std::memcpy(args_.into.scales, args_.from.scales, static_cast<size_t>(count * bytes));
  }

 private:
  bool has_row_blocks() const { return has_blocks(args_.spec) && !args_.spec.square; }

  int64_t rows_in_use() const {
    if (args_.matrix_rows) return args_.rows;
    return args_.plan ? PlanView{args_.plan, args_.rows, args_.groups}.rows_in_use() : 0;
  }

  int64_t block_rows_in_use(int size) const {
    if (args_.matrix_rows) return args_.groups * ceil_div(args_.matrix_rows, size);
    const int height = size == 16 ? HEIGHT_16 : size == 32 ? HEIGHT_32 : HEIGHT_128;
    return args_.plan ? PlanView{args_.plan, args_.rows, args_.groups}.blocks_in_use(height) : 0;
  }

  void row_codes(const Panel& panel) const {
    const auto* from = static_cast<const uint8_t*>(args_.from.codes);
    auto* into = static_cast<uint8_t*>(args_.into.codes);
    if (format_ != Format::e2m1) {
      std::memcpy(into + panel.row0 * args_.cols, from + panel.row0 * args_.cols,
                  static_cast<size_t>(panel.rows * args_.cols));
      return;
    }
    for (int64_t row = panel.row0; row < panel.row0 + panel.rows; ++row) {
      if (to_native_) {
        pack_row(loops_, from + row * args_.cols, args_.cols, into + row * ceil_div(args_.cols, 2));
      } else {
        unpack_row(loops_, from + row * ceil_div(args_.cols, 2), args_.cols, into + row * args_.cols);
      }
    }
  }

  void row_scales(const Panel& panel) const {
    const ScaleIndex from = row_scale_index(args_.spec, args_.from.layout, args_.rows, args_.cols);
    const ScaleIndex into = row_scale_index(args_.spec, args_.into.layout, args_.rows, args_.cols);
    const int64_t blocks = ceil_div(args_.cols, block_size(args_.spec.scaling));
    for (int64_t row = panel.row0; row < panel.row0 + panel.rows; ++row) {
      for (int64_t b = 0; b < blocks; ++b) move_scale(from(row, b), into(row, b));
    }
  }

  void column_codes(int64_t index, const Panel& panel, int rows, int64_t col, Buffers& buffers) const {
    const auto* from = static_cast<const uint8_t*>(args_.from.codes);
    auto* into = static_cast<uint8_t*>(args_.into.codes);
    const int64_t cols = std::min<int64_t>(128, args_.cols - col);
    const int64_t place = (index * args_.cols + col) * panel_height(format_);
    const int64_t row0 = plane_row0(args_.spec, args_.direction, panel);
    if (to_native_) {
      for (int r = 0; r < rows; ++r) {
        std::memcpy(buffers.codes + r * 128, from + (row0 + r) * args_.cols + col, static_cast<size_t>(cols));
      }
      codes_to_columns(loops_, format_, buffers.codes, rows, cols, buffers.turned, into + place);
      return;
    }
    columns_to_codes(loops_, format_, from + place, cols, buffers.turned, buffers.codes);
    for (int r = 0; r < rows; ++r) {
      std::memcpy(into + (row0 + r) * args_.cols + col, buffers.codes + r * 128, static_cast<size_t>(cols));
    }
  }

  void column_scales(int64_t index, const Panel& panel, int rows) const {
    const int size = block_size(args_.spec.scaling);
    const ScaleIndex from = column_scale_index(args_.spec, args_.from.layout, panel, index, args_.cols);
    const ScaleIndex into = column_scale_index(args_.spec, args_.into.layout, panel, index, args_.cols);
    for (int64_t b = 0; b < PANEL_ROWS / size; ++b) {
      for (int64_t c = 0; c < args_.cols; ++c) {
        if (b * size < rows) {
          move_scale(from(c, b), into(c, b));
        } else if (to_native_) {
          static_cast<uint8_t*>(args_.into.scales)[into(c, b)] = 0;  // a zero block's
        }
      }
    }
  }

  void move_scale(int64_t from, int64_t into) const {
    if (args_.spec.scaling == Scaling::block) {
      static_cast<float*>(args_.into.scales)[into] = static_cast<const float*>(args_.from.scales)[from];
    } else {
      static_cast<uint8_t*>(args_.into.scales)[into] = static_cast<const uint8_t*>(args_.from.scales)[from];
    }
  }

  const ConvertArgs& args_;
  const Loops& loops_;
  Format format_;
  bool to_native_;
  Panels panels_;
};

}  // namespace

}  // namespace cpu

Error convert_cpu(const ConvertArgs& args, int threads) {
  if (const Error error = check_convert(args)) return error;
  if (threads < 0) return invalid("threads is negative; give 1 or more");
  const cpu::Converter converter(args, octavo_loops::loops_for(threads));
  const bool good = cpu::split_with<cpu::Buffers>(converter.panels(), PANEL_ROWS * args.cols, threads,
                                                  [&](int64_t first, int64_t last, cpu::Buffers& buffers) {
                                                    for (int64_t index = first; index < last; ++index)
                                                      converter.convert_panel(index, buffers);
                                                  });
  if (!good) return {ErrorCode::unsupported, "no memory for a thread's tile (about 0.1 MB); free some"};
  converter.copy_shared_scales();
  return {};
}

}  // namespace octavo
