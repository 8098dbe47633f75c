// A tile's values in fp32: what every pass quantizes.
#include <algorithm>

#include "job.h"

namespace octavo::cpu {

namespace {

// The row of the input where the operand's row `row` stands; -1: nowhere, it is zeros.
int64_t row_of(const Input& input, int64_t row) {
  const RowIndex& index = input.index;
  if (index.of_rows == nullptr) return row;
  const int64_t choice = index.of_rows[row];
  return choice < 0 || choice >= index.count * index.each ? -1 : choice / index.each;
}

// A tile's values, as those of MXFP4 in blocks of 32 along its rows.
void round_to_mxfp4(const Job& job, const Tile& tile, Scratch& scratch) {
  constexpr int block = 32, format = static_cast<int>(Format::e2m1);
  const int64_t blocks = ceil_div(tile.cols, block);
  for (int r = 0; r < tile.rows; ++r) {
    float* values = scratch.values + r * tile.stride;
    job.loops.amax_blocks(values, block, blocks, scratch.amax);
    for (int64_t b = 0; b < blocks; ++b) {
      scratch.bytes[b] = mxfp4_scale(static_cast<uint32_t>(scratch.amax[b]));
      scratch.encode[b] = e8m0_encode(scratch.bytes[b]);
    }
    job.loops.spread(scratch.encode, block, blocks, scratch.spread);
    job.loops.cast(format, values, scratch.spread, tile.cols, scratch.codes);
    job.loops.e8m0_values(scratch.bytes, blocks, scratch.decode);
    job.loops.spread(scratch.decode, block, blocks, scratch.spread);
    job.loops.decode(format, scratch.codes, scratch.spread, tile.cols, values);
  }
}

}  // namespace

void load_tile(const Job& job, const Tile& tile, Scratch& scratch) {
  const Input& input = job.args.input;
  const int dtype = static_cast<int>(input.dtype), bytes = dtype_bytes(input.dtype);
  const auto* data = static_cast<const uint8_t*>(input.data);
  for (int r = 0; r < tile.rows; ++r) {
    const int64_t row = tile.panel.row0 + tile.row + r;
    float* values = scratch.values + r * tile.stride;
    if (job.args.prologue.kind == PrologueKind::none) {
      const int64_t from = row_of(input, row);
      if (from < 0) {
        std::fill(values, values + tile.cols, 0.0f);
      } else {
        job.loops.load(dtype, data + (from * input.row_stride + tile.col) * bytes, values, tile.cols);
      }
    } else {
      prologue_row(job, tile, row, values, scratch);
      job.loops.round(dtype, values, tile.cols);
    }
    std::fill(values + tile.cols, values + tile.padded_cols(), 0.0f);
  }
  if (job.spec().mxfp4) round_to_mxfp4(job, tile, scratch);
}

Tile transform(const Job& job, const Tile& tile, Scratch& scratch) {
  Tile padded = tile;
  padded.rows = static_cast<int>(round_up(tile.rows, 16));
  for (int r = 0; r < padded.rows; r += 16) {
    const int64_t from = r * tile.stride;
    job.loops.hadamard(scratch.values + from, std::min(tile.rows - r, 16), tile.cols, tile.stride,
                       scratch.transformed + from);
  }
  return padded;
}

}  // namespace octavo::cpu
