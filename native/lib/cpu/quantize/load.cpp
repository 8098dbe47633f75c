// A tile's values in fp32: what every pass quantizes.
#include <algorithm>

#include "cpu/planes/turns.h"
#include "job.h"
#include "octavo/interleave.h"

namespace octavo::cpu {

namespace {

// The row of the input where the operand's row `row` stands; -1: nowhere, it is zeros.
int64_t row_of(const Input& input, int64_t row) {
  if (input.interleaved_rows) {
    const int64_t matrix = input.matrix_rows, local = row % matrix;
    return row - local + interleaved_at(local, matrix / 2, input.interleaved_rows);
  }
  return input.index.at(row);
}

// A tile's columns of one row, of halves that take turns in it.
void load_interleaved(const Job& job, const Tile& tile, const uint8_t* row, float* values) {
  const Input& input = job.args.input;
  const int dtype = static_cast<int>(input.dtype), bytes = dtype_bytes(input.dtype);
  each_run(tile.col, tile.cols, input.cols / 2, input.interleaved_cols,
           [&](int64_t at, int64_t c, int64_t run) { job.loops.load(dtype, row + at * bytes, values + c, run); });
}

constexpr int MXFP4_BLOCK = 32;

// `count` values side by side, 1024 at most, as those of MXFP4; those up to a whole number of blocks are zeros.
void round_run(const Job& job, float* values, int64_t count, Scratch& scratch) {
  constexpr int format = static_cast<int>(Format::e2m1);
  const int64_t blocks = ceil_div(count, MXFP4_BLOCK);
  job.loops.amax_blocks(values, MXFP4_BLOCK, blocks, scratch.amax);
  for (int64_t b = 0; b < blocks; ++b) {
    scratch.bytes[b] = mxfp4_scale(static_cast<uint32_t>(scratch.amax[b]));
    scratch.encode[b] = e8m0_encode(scratch.bytes[b]);
  }
  job.loops.spread(scratch.encode, MXFP4_BLOCK, blocks, scratch.spread);
  job.loops.cast(format, values, scratch.spread, count, scratch.codes);
  job.loops.e8m0_values(scratch.bytes, blocks, scratch.decode);
  job.loops.spread(scratch.decode, MXFP4_BLOCK, blocks, scratch.spread);
  job.loops.decode(format, scratch.codes, scratch.spread, count, values);
}

// A tile that begins at a panel's first row, in blocks of 32 down its columns, 32 of which are turned at a time.
void round_columns(const Job& job, const Tile& tile, Scratch& scratch) {
  constexpr int B = MXFP4_BLOCK;
  alignas(64) float turned[B * B];
  for (int row = 0; row < tile.rows; row += B) {
    for (int col = 0; col < tile.cols; col += B) {
      float* values = scratch.values + row * tile.stride + col;
      const int rows = std::min<int>(tile.rows - row, B), cols = std::min<int>(tile.cols - col, B);
      std::fill(turned, turned + B * B, 0.0f);
      for (int r = 0; r < rows; ++r)
        for (int c = 0; c < cols; ++c) turned[c * B + r] = values[r * tile.stride + c];
      round_run(job, turned, B * B, scratch);
      for (int r = 0; r < rows; ++r)
        for (int c = 0; c < cols; ++c) values[r * tile.stride + c] = turned[c * B + r];
    }
  }
}

// A tile's values, as those of MXFP4.
void round_to_mxfp4(const Job& job, const Tile& tile, Scratch& scratch) {
  if (*job.spec().mxfp4 == Direction::columnwise) return round_columns(job, tile, scratch);
  for (int r = 0; r < tile.rows; ++r) round_run(job, scratch.values + r * tile.stride, tile.cols, scratch);
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
      } else if (input.interleaved_cols) {
        load_interleaved(job, tile, data + from * input.row_stride * bytes, values);
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
