// dequantize_cpu: codes and scales of one plane, in either layout, to values in either layout.
#include "octavo/dequantize.h"

#include <algorithm>
#include <cstring>

#include "cpu/loops/threads.h"
#include "octavo/numerics.h"
#include "values.h"

namespace octavo {

namespace cpu {

namespace {

using octavo_loops::Loops;

struct Buffers : PlaneBuffers {
  alignas(64) float values[128 * 128];
};

void store(const DequantizeArgs& args, const Loops& loops, const PanelBlock& block, const float* values) {
  const int dtype = static_cast<int>(args.out_dtype), bytes = dtype_bytes(args.out_dtype);
  auto* out = static_cast<uint8_t*>(args.out);
  if (args.out_layout == Layout::plain) {
    const int64_t row0 = plane_row0(args.spec, args.direction, block.panel);
    for (int r = 0; r < block.rows; ++r) {
      uint8_t* to = out + ((row0 + r) * args.cols + block.col) * bytes;
      loops.store(dtype, values + r * 128, to, block.cols);
    }
    return;
  }
  alignas(64) float column[PANEL_ROWS] = {};
  for (int64_t c = 0; c < block.cols; ++c) {
    for (int r = 0; r < block.rows; ++r) column[r] = values[r * 128 + c];
    loops.store(dtype, column, out + (block.index * args.cols + block.col + c) * PANEL_ROWS * bytes, PANEL_ROWS);
  }
}

// Rows of the plain output that belong to no group are +0.
void zero_tail(const DequantizeArgs& args) {
  const PlanView plan = {args.plan, args.rows, args.groups};
  const bool padded = args.spec.hadamard && args.direction == Direction::columnwise;
  const int64_t all = padded ? block_bound(args.rows, args.groups, 16) * 16 : args.rows;
  const int64_t used = args.matrix_rows ? all
                       : !args.plan     ? 0
                       : padded         ? plan.blocks_in_use(HEIGHT_16) * 16
                                        : plan.rows_in_use();
  const int64_t row_bytes = args.cols * dtype_bytes(args.out_dtype);
  if (all == used || row_bytes == 0) return;  // memset must not get a null pointer, even for 0 bytes
  std::memset(static_cast<uint8_t*>(args.out) + used * row_bytes, 0, static_cast<size_t>((all - used) * row_bytes));
}

}  // namespace

}  // namespace cpu

Error dequantize_cpu(const DequantizeArgs& args, int threads) {
  if (const Error error = check_dequantize(args)) return error;
  if (threads < 0) return invalid("threads is negative; give 1 or more");
  const cpu::Panels panels(args.rows, args.groups, args.matrix_rows, args.plan);
  const octavo_loops::Loops& loops = octavo_loops::loops_for(threads);
  const cpu::PlaneValues plane(args, loops);
  const bool good = cpu::split_with<cpu::Buffers>(
      panels.used(), PANEL_ROWS * args.cols, threads, [&](int64_t first, int64_t last, cpu::Buffers& buffers) {
        for (int64_t index = first; index < last; ++index) {
          const Panel panel = panels.at(index);
          const int rows = cpu::plane_rows(args.spec, args.direction, panel.rows);
          for (int64_t col = 0; col < args.cols; col += 128) {
            const cpu::PanelBlock block = {index, panel, rows, col, std::min<int64_t>(128, args.cols - col)};
            plane.load(block, buffers, buffers.values, 128);
            cpu::store(args, loops, block, buffers.values);
          }
        }
      });
  if (!good) return {ErrorCode::unsupported, "no memory for a thread's tile (about 0.1 MB); free some"};
  if (args.out_layout == Layout::plain) cpu::zero_tail(args);
  return {};
}

}  // namespace octavo
