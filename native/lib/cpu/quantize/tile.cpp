// Codes and scales of one tile.
#include <algorithm>
#include <cstring>

#include "cpu/planes/panels.h"
#include "job.h"

namespace octavo::cpu {

namespace {

// The encode scales of `count` units from their amaxes, in scratch.encode; what is stored, in scratch.decode (fp32) or
// scratch.bytes. `factor` and `sixth` are the group's second level.
void unit_scales(const Job& job, const int32_t* amax, int64_t count, const GroupScales& groups, int32_t group,
                 Scratch& scratch) {
  const QuantizerSpec& spec = job.spec();
  if (spec.scaling == Scaling::mxfp8) {
    job.loops.e8m0_scales(job.format(), amax, count, scratch.encode, scratch.bytes);
  } else if (spec.scaling == Scaling::nvfp4) {
    job.loops.nvfp4_scales(amax, count, groups.sixth[group], groups.factor[group], scratch.encode, scratch.bytes);
  } else {
    job.loops.fp32_scales(job.format(), amax, count, spec.amax_epsilon, spec.power_of_two, scratch.encode,
                          scratch.decode);
  }
}

// Values have no scales beside them.
void put_scale(const Job& job, void* scales, int64_t element, int64_t unit, const Scratch& scratch) {
  if (scales == nullptr) return;
  if (job.spec().scaling == Scaling::block) {
    static_cast<float*>(scales)[element] = scratch.decode[unit];
  } else {
    static_cast<uint8_t*>(scales)[element] = scratch.bytes[unit];
  }
}

// Amaxes of the row units of a tile: [units of rows][blocks], one row high or square.
void row_unit_amax(const Job& job, const Tile& tile, int size, int64_t blocks, Scratch& scratch) {
  if (!job.spec().square) {
    for (int r = 0; r < tile.rows; ++r) {
      job.loops.amax_blocks(scratch.values + r * tile.stride, size, blocks, scratch.amax + r * blocks);
    }
    return;
  }
  alignas(64) int32_t columns[128];
  for (int r = 0; r < tile.rows; r += size) {
    std::fill(columns, columns + 128, 0);
    for (int i = r; i < std::min(r + size, tile.rows); ++i) {
      job.loops.amax_columns(scratch.values + i * tile.stride, 128, columns);
    }
    for (int64_t b = 0; b < blocks; ++b) {
      scratch.amax[r / size * blocks + b] = *std::max_element(columns + b * size, columns + (b + 1) * size);
    }
  }
}

// Stored scales of a tile's row units, where they go.
void store_row_scales(const Job& job, const Tile& tile, int size, int64_t blocks, const Scratch& scratch) {
  const QuantizeArgs& args = job.args;
  const int64_t block0 = tile.col / size;
  if (!job.spec().square) {
    const ScaleIndex index = row_scale_index(job.spec(), args.rowwise.layout, args.input.rows, job.cols);
    for (int r = 0; r < tile.rows; ++r) {
      const int64_t row = tile.panel.row0 + tile.row + r;
      for (int64_t b = 0; b < blocks; ++b) {
        put_scale(job, args.rowwise.scales, index(row, block0 + b), r * blocks + b, scratch);
      }
    }
    return;
  }
  const int64_t each = ceil_div(job.cols, size), first = first_block(tile.panel, tile.panel_index, size);
  for (int64_t unit_row = 0; unit_row < ceil_div(tile.rows, size); ++unit_row) {
    for (int64_t b = 0; b < blocks; ++b) {
      const int64_t element = (first + unit_row) * each + block0 + b;
      if (job.row_wanted) put_scale(job, args.rowwise.scales, element, unit_row * blocks + b, scratch);
      if (job.column_wanted) put_scale(job, args.columnwise.scales, element, unit_row * blocks + b, scratch);
    }
  }
}

bool has_values(const Plane& plane) { return plane.codes != nullptr && plane.layout == Layout::values; }

// Stored block scales as fp32, in scratch.decode, for the dequantized copy or, with a factor of 1, for values.
void decode_units(const Job& job, int64_t count, float factor, Scratch& scratch) {
  if (job.spec().scaling == Scaling::mxfp8) {
    job.loops.e8m0_values(scratch.bytes, count, scratch.decode);
  } else if (job.spec().scaling == Scaling::nvfp4) {
    job.loops.nvfp4_values(scratch.bytes, count, factor, scratch.decode);
  }
}

// A row's scales, one per element, in scratch.spread: block scales from `units`, otherwise `whole`.
const float* spread_scales(const Job& job, const Tile& tile, const float* units, float whole, Scratch& scratch) {
  const int size = block_size(job.spec().scaling);
  if (size != 0) {
    job.loops.spread(units, size, ceil_div(tile.cols, size), scratch.spread);
  } else {
    std::fill(scratch.spread, scratch.spread + tile.cols, whole);
  }
  return scratch.spread;
}

uint32_t group_number(const Job& job, const Panel& panel) {
  const uint32_t* device = job.args.group_offset_device;
  return job.args.group_offset + (device ? *device : 0) + static_cast<uint32_t>(panel.group);
}

void cast_row(const Job& job, const float* values, const float* encode, const uint16_t* draws, int64_t n,
              uint8_t* codes) {
  if (draws != nullptr) {
    job.loops.cast_stochastic(values, encode, draws, n, codes);
  } else {
    job.loops.cast(job.format(), values, encode, n, codes);
  }
  // Scales from history cannot be poisoned by this step's Inf, which alone must not saturate.
  if (job.spec().scaling == Scaling::delayed) job.loops.mark_non_finite(values, n, nan_code(job.spec().format), codes);
}

void store_panel(const Job& job, const Tile& tile, Scratch& scratch) {
  const Format format = job.spec().format;
  const int64_t place = (tile.panel_index * job.cols + tile.col) * panel_height(format);
  codes_to_columns(job.loops, format, scratch.codes, tile.rows, tile.cols, scratch.turned,
                   static_cast<uint8_t*>(job.args.columnwise.codes) + place);
}

void store_row(const Job& job, const Tile& tile, int64_t row, const uint8_t* codes) {
  auto* to = static_cast<uint8_t*>(job.args.rowwise.codes);
  if (job.spec().format == Format::e2m1 && job.args.rowwise.layout == Layout::native) {
    pack_row(job.loops, codes, tile.cols, to + row * ceil_div(job.cols, 2) + tile.col / 2);
  } else {
    std::memcpy(to + row * job.cols + tile.col, codes, static_cast<size_t>(tile.cols));
  }
}

void store_dequantized(const Job& job, const Tile& tile, int64_t row, const uint8_t* codes, const float* decode,
                       void* out, Scratch& scratch) {
  job.loops.decode(job.format(), codes, decode, tile.cols, scratch.decoded);
  auto* to = static_cast<uint16_t*>(out) + row * job.cols + tile.col;
  job.loops.store(static_cast<int>(DType::bf16), scratch.decoded, to, tile.cols);
}

// Zeros for the tile's columns of a panel of values, whose rows past the group's end stay so.
void clear_value_columns(const Job& job, const Tile& tile) {
  const int64_t place = (tile.panel_index * job.cols + tile.col) * PANEL_ROWS;
  std::fill_n(static_cast<uint16_t*>(job.args.columnwise.codes) + place, tile.cols * PANEL_ROWS, uint16_t{0});
}

// Row `row` of the panel, as values.
void store_value_columns(const Job& job, const Tile& tile, int row, const uint8_t* codes, const float* decode,
                         Scratch& scratch) {
  alignas(64) uint16_t values[128];
  job.loops.decode(job.format(), codes, decode, tile.cols, scratch.decoded);
  job.loops.store(static_cast<int>(DType::bf16), scratch.decoded, values, tile.cols);
  const int64_t place = (tile.panel_index * job.cols + tile.col) * PANEL_ROWS;
  auto* to = static_cast<uint16_t*>(job.args.columnwise.codes) + place + row;
  for (int64_t c = 0; c < tile.cols; ++c) to[c * PANEL_ROWS] = values[c];
}

// Where a tile's columns have their scales: square blocks have one for all of them.
ScaleIndex column_scales_of(const Job& job, const Tile& tile) {
  const Layout layout = job.args.columnwise.layout;
  if (!job.spec().square_columns) return column_scale_index(job.spec(), layout, tile.panel, tile.panel_index, job.cols);
  const int64_t row = first_block(tile.panel, tile.panel_index, PANEL_ROWS);
  return {row * ceil_div(job.cols, PANEL_ROWS) + tile.col / PANEL_ROWS, 0, 0};
}

}  // namespace

void row_codes(const Job& job, const Tile& tile, Scratch& scratch) {
  const QuantizeArgs& args = job.args;
  const int32_t group = tile.panel.group;
  const int size = block_size(job.spec().scaling);
  const int64_t blocks = size ? ceil_div(tile.cols, size) : 0;
  const int unit_rows = job.spec().square ? size : 1;
  const bool valued = has_values(args.rowwise) || has_values(args.columnwise);
  if (size != 0) {
    const int64_t units = ceil_div(tile.rows, unit_rows) * blocks;
    row_unit_amax(job, tile, size, blocks, scratch);
    unit_scales(job, scratch.amax, units, job.row_groups, group, scratch);
    store_row_scales(job, tile, size, blocks, scratch);
    const float factor = args.dequantized != nullptr && job.row_groups.factor ? job.row_groups.factor[group] : 1.0f;
    if (args.dequantized != nullptr || valued) decode_units(job, units, factor, scratch);
  }
  const bool shared = job.column_wanted && job.spec().shares_codes();
  const bool shared_values = shared && has_values(args.columnwise);
  if (shared_values) clear_value_columns(job, tile);
  const bool shared_plain = shared && args.columnwise.layout == Layout::plain;
  for (int r = 0; r < tile.rows; ++r) {
    const int64_t row = tile.panel.row0 + tile.row + r, units = r / unit_rows * blocks;
    const float* values = scratch.values + r * tile.stride;
    uint8_t* codes = scratch.codes + r * tile.stride;
    float encode = 0.0f, decode = 0.0f;
    if (has_group_scales(job.spec())) {
      encode = job.row_groups.encode[group];
      decode = decode_scale(encode);
    } else if (job.spec().scaling == Scaling::row) {
      encode = scratch.row_encode[tile.row + r];
      decode = scratch.row_decode[tile.row + r];
    }
    const uint16_t* draws = nullptr;
    if (job.spec().stochastic) {
      const auto outer = static_cast<uint32_t>(tile.panel.local * PANEL_ROWS + tile.row + r);
      job.loops.draws_row(outer, static_cast<uint32_t>(tile.col / 16), ceil_div(tile.cols, 16),
                          8 * static_cast<uint32_t>(job.spec().operand), group_number(job, tile.panel), args.seed,
                          scratch.draws);
      draws = scratch.draws;
    }
    const float* scales = spread_scales(job, tile, scratch.encode + units, encode, scratch);
    cast_row(job, values, scales, draws, tile.cols, codes);
    void* const out = has_values(args.rowwise) ? args.rowwise.codes : args.dequantized;
    if (out != nullptr || shared_values) {
      scales = spread_scales(job, tile, scratch.decode + units, decode, scratch);
      if (out != nullptr) store_dequantized(job, tile, row, codes, scales, out, scratch);
      if (shared_values) store_value_columns(job, tile, tile.row + r, codes, scales, scratch);
    }
    if (shared_plain) {
      auto* to = static_cast<uint8_t*>(args.columnwise.codes) + row * job.cols + tile.col;
      std::memcpy(to, codes, static_cast<size_t>(tile.cols));
    }
    if (job.row_wanted && !has_values(args.rowwise)) store_row(job, tile, row, codes);
  }
  if (shared && !shared_plain && !shared_values) store_panel(job, tile, scratch);
}

void column_codes(const Job& job, const Tile& given, Scratch& scratch) {
  const QuantizeArgs& args = job.args;
  const QuantizerSpec& spec = job.spec();
  const Tile tile = spec.hadamard ? transform(job, given, scratch) : given;
  const float* values = spec.hadamard ? scratch.transformed : scratch.values;
  const int32_t group = tile.panel.group;
  const int size = block_size(spec.scaling), height = size ? size : PANEL_ROWS;
  const bool native = args.columnwise.layout != Layout::plain, valued = has_values(args.columnwise);
  if (valued) clear_value_columns(job, tile);
  ScaleIndex index = {0, 0, 0};
  if (size != 0) index = column_scales_of(job, tile);
  for (int r = 0; r < tile.rows; r += height) {
    const int end = std::min(r + height, tile.rows);
    const int32_t* amax = scratch.amax;
    if (size != 0) {
      std::fill(scratch.amax, scratch.amax + tile.cols, 0);
      for (int i = r; i < end; ++i) {
        job.loops.amax_columns(values + i * tile.stride, tile.cols, scratch.amax);
      }
      if (spec.square_columns) {
        int32_t* const end_of_columns = scratch.amax + tile.cols;
        std::fill(scratch.amax, end_of_columns, *std::max_element(scratch.amax, end_of_columns));
      }
    } else {
      amax = job.column_amax + group * job.cols + tile.col;
    }
    unit_scales(job, amax, tile.cols, job.column_groups, group, scratch);
    if (valued) decode_units(job, tile.cols, 1.0f, scratch);
    if (size != 0) {
      for (int64_t c = 0; c < tile.cols; ++c) {
        put_scale(job, args.columnwise.scales, index(tile.col + c, r / height), c, scratch);
      }
    }
    if (spec.stochastic) {
      job.loops.draws_columns(
          static_cast<uint32_t>(tile.col), tile.cols, static_cast<uint32_t>(tile.panel.local * 8 + r / 16),
          8 * static_cast<uint32_t>(spec.operand) + 2, group_number(job, tile.panel), args.seed, scratch.draws, 128);
    }
    for (int i = r; i < end; ++i) {
      const uint16_t* draws = spec.stochastic ? scratch.draws + (i - r) * 128 : nullptr;
      cast_row(job, values + i * tile.stride, scratch.encode, draws, tile.cols, scratch.codes + i * 128);
      if (valued) store_value_columns(job, tile, tile.row + i, scratch.codes + i * 128, scratch.decode, scratch);
    }
  }
  if (valued) return;
  if (!native) {
    auto* to = static_cast<uint8_t*>(args.columnwise.codes);
    const int64_t row0 = plane_row0(spec, Direction::columnwise, tile.panel);
    for (int r = 0; r < tile.rows; ++r) {
      std::memcpy(to + (row0 + r) * job.cols + tile.col, scratch.codes + r * 128, static_cast<size_t>(tile.cols));
    }
    return;
  }
  if (size != 0 && size != PANEL_ROWS) {
    // Blocks past the group's end have the scale of a zero block.
    auto* scales = static_cast<uint8_t*>(args.columnwise.scales);
    for (int64_t block = ceil_div(tile.rows, size); block < PANEL_ROWS / size; ++block) {
      for (int64_t c = 0; c < tile.cols; ++c) scales[index(tile.col + c, block)] = 0;
    }
  }
  store_panel(job, tile, scratch);
}

}  // namespace octavo::cpu
