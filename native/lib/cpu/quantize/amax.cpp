// Amaxes that must be known before the first code is written: of groups, and of the columns of a group.
#include <algorithm>
#include <cstring>

#include "cpu/loops/threads.h"
#include "job.h"

namespace octavo::cpu {

namespace {

int32_t tile_amax(const Job& job, const Tile& tile, const float* values) {
  int32_t amax = 0;
  for (int r = 0; r < tile.rows; ++r) {
    amax = std::max(amax, job.loops.amax_all(values + r * tile.stride, tile.cols));
  }
  return amax;
}

// [G] from [P]; groups without rows have 0.
void reduce_panels(const Job& job, const int32_t* panel_amax) {
  std::fill(job.group_amax, job.group_amax + job.groups(), 0);
  for (int64_t index = 0; index < job.panels.used(); ++index) {
    int32_t& amax = job.group_amax[job.panels.at(index).group];
    amax = std::max(amax, panel_amax[index]);
  }
}

void nvfp4_groups(const Job& job, const GroupScales& scales, float* stored) {
  for (int64_t g = 0; g < job.groups(); ++g) {
    const float global = nvfp4_global(static_cast<uint32_t>(job.group_amax[g]));
    scales.factor[g] = decode_scale(global);
    scales.sixth[g] = nvfp4_sixth(global);
    if (stored != nullptr) stored[g] = scales.factor[g];
  }
}

void copy_scales(const Plane& plane, const float* decode, int64_t groups) {
  if (plane.scales != nullptr) std::memcpy(plane.scales, decode, static_cast<size_t>(groups) * sizeof(float));
}

}  // namespace

bool panel_amax_pass(const Job& job) {
  const bool wide = job.transformed_amax == nullptr;
  return split_with<Scratch>(job.panels.used(), job.panel_bytes(), job.threads,
                             [&](int64_t first, int64_t last, Scratch& scratch) {
                               for (int64_t index = first; index < last; ++index) {
                                 int32_t amax = 0, transformed = 0;
                                 begin_panel(job, job.panels.at(index), scratch);
                                 each_tile(job, index, wide, 0, job.cols, scratch, [&](const Tile& tile) {
                                   amax = std::max(amax, tile_amax(job, tile, scratch.values));
                                   if (job.transformed_amax == nullptr) return;
                                   const Tile padded = transform(job, tile, scratch);
                                   transformed = std::max(transformed, tile_amax(job, padded, scratch.transformed));
                                 });
                                 job.panel_amax[index] = amax;
                                 if (job.transformed_amax != nullptr) job.transformed_amax[index] = transformed;
                               }
                             });
}

bool column_amax_pass(const Job& job) {
  const int64_t cols = job.cols, all = job.groups() * cols;
  auto* scales = static_cast<float*>(job.args.columnwise.scales);
  // Threads take columns, so that no two of them reduce into the same element.
  const int64_t bytes_each = job.args.input.rows * 128 * dtype_bytes(job.args.input.dtype);
  const bool good = split_with<Scratch>(
      ceil_div(cols, 128), bytes_each, job.threads, [&](int64_t first, int64_t last, Scratch& scratch) {
        const int64_t begin = first * 128, end = std::min(last * 128, cols);
        for (int64_t g = 0; g < job.groups(); ++g) {
          std::fill(job.column_amax + g * cols + begin, job.column_amax + g * cols + end, 0);
        }
        for (int64_t index = 0; index < job.panels.used(); ++index) {
          begin_panel(job, job.panels.at(index), scratch);
          each_tile(job, index, true, begin, end, scratch, [&](const Tile& tile) {
            int32_t* amax = job.column_amax + tile.panel.group * cols + tile.col;
            for (int r = 0; r < tile.rows; ++r) {
              job.loops.amax_columns(scratch.values + r * tile.stride, tile.cols, amax);
            }
          });
        }
      });
  // The encode scales are recomputed where they are used: the workspace has room for [G, C] amaxes only.
  constexpr int64_t CHUNK = 1024;
  float encode[CHUNK];
  for (int64_t i = 0; i < all; i += CHUNK) {
    job.loops.fp32_scales(job.format(), job.column_amax + i, std::min(CHUNK, all - i), job.spec().amax_epsilon,
                          job.spec().power_of_two, encode, scales + i);
  }
  return good;
}

void group_scales(const Job& job) {
  const QuantizeArgs& args = job.args;
  if (has_group_scales(job.spec())) {
    float* decode = job.row_groups.sixth;  // not otherwise used by these scalings
    if (job.spec().scaling == Scaling::delayed) {
      std::copy(args.encode_scales, args.encode_scales + job.groups(), job.row_groups.encode);
      for (int64_t g = 0; g < job.groups(); ++g) decode[g] = decode_scale(job.row_groups.encode[g]);
    } else {
      reduce_panels(job, job.panel_amax);
      job.loops.fp32_scales(job.format(), job.group_amax, job.groups(), job.spec().amax_epsilon,
                            job.spec().power_of_two, job.row_groups.encode, decode);
    }
    copy_scales(args.rowwise, decode, job.groups());
    copy_scales(args.columnwise, decode, job.groups());
  } else if (job.spec().scaling == Scaling::nvfp4) {
    reduce_panels(job, job.panel_amax);
    if (job.row_pass()) nvfp4_groups(job, job.row_groups, args.rowwise.global);
    if (args.columnwise.global != nullptr && job.spec().shares_codes()) {
      std::copy(job.row_groups.factor, job.row_groups.factor + job.groups(), args.columnwise.global);
    }
    if (!job.column_pass()) return;
    if (job.transformed_amax != nullptr) reduce_panels(job, job.transformed_amax);
    nvfp4_groups(job, job.column_groups, args.columnwise.global);
  }
}

void write_amax(const Job& job) {
  reduce_panels(job, job.panel_amax);
  for (int64_t g = 0; g < job.groups(); ++g) {
    job.args.amax[g] = canonical(float_of(static_cast<uint32_t>(job.group_amax[g])));
  }
}

void row_scales(const Job& job, int64_t index, Scratch& scratch) {
  std::fill(scratch.row_amax, scratch.row_amax + 128, 0);
  each_tile(job, index, true, 0, job.cols, scratch, [&](const Tile& tile) {
    for (int r = 0; r < tile.rows; ++r) {
      int32_t& amax = scratch.row_amax[tile.row + r];
      amax = std::max(amax, job.loops.amax_all(scratch.values + r * tile.stride, tile.cols));
    }
  });
  const Panel panel = job.panels.at(index);
  job.loops.fp32_scales(job.format(), scratch.row_amax, panel.rows, job.spec().amax_epsilon, job.spec().power_of_two,
                        scratch.row_encode, scratch.row_decode);
  if (!job.row_wanted) return;
  auto* scales = static_cast<float*>(job.args.rowwise.scales) + panel.row0;
  std::copy(scratch.row_decode, scratch.row_decode + panel.rows, scales);
}

}  // namespace octavo::cpu
