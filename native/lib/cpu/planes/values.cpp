#include "values.h"

#include <algorithm>
#include <cstring>

#include "octavo/numerics.h"
#include "panels.h"

namespace octavo::cpu {

void PlaneValues::load(const PanelBlock& block, PlaneBuffers& buffers, float* to, int64_t stride) const {
  load_codes(block, buffers);
  for (int r = 0; r < block.rows; ++r) {
    row_scales(block, r, buffers);
    loops_.decode(static_cast<int>(args_.spec.format), buffers.codes + r * 128, buffers.scales, block.cols,
                  to + r * stride);
  }
}

void PlaneValues::load_codes(const PanelBlock& block, PlaneBuffers& buffers) const {
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
void PlaneValues::load_units(int64_t first, int64_t step, int64_t count, int32_t group, PlaneBuffers& buffers) const {
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

// One decode scale per element of row r of the block, in buffers.scales.
void PlaneValues::row_scales(const PanelBlock& block, int r, PlaneBuffers& buffers) const {
  const QuantizerSpec& spec = args_.spec;
  const int size = block_size(spec.scaling);
  const int64_t row = block.panel.row0 + r;
  const int32_t group = block.panel.group;
  if (size == 0) {
    const bool each_column = columnwise_ && spec.scaling == Scaling::row;
    if (r > 0 && (each_column || has_group_scales(spec))) return;
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

}  // namespace octavo::cpu
