// One operand of a grouped GEMM: its values in fp32, block by block.
#pragma once

#include <algorithm>

#include "cpu/planes/values.h"
#include "octavo/gemm.h"

namespace octavo::cpu {

// Per-thread memory. Loops read whole vectors, so values are defined from the start.
struct SideBuffers : PlaneBuffers {
  alignas(64) float values[128 * 128] = {};
};

class GemmSide {
 public:
  // `shape`: direction, rows, cols, groups, matrix_rows and plan of the operand; the rest is filled in. Along rows: the
  // sum runs over the operand's rows, else over its columns.
  GemmSide(const GemmSpec& spec, const GemmOperand& operand, bool is_left, bool along_rows, DequantizeArgs shape,
           const octavo_loops::Loops& loops)
      : operand_(operand),
        loops_(loops),
        dtype_(spec.dtype),
        quantized_(spec.quantized),
        values_(is_left ? spec.left_values : spec.right_values),
        along_rows_(along_rows),
        cols_(shape.cols),
        plane_(with_plane(spec, operand, is_left, along_rows, shape), loops) {}

  // to[d * stride + o]: o counts the rows or columns of the result, d what is summed.
  void load(const PanelBlock& block, SideBuffers& buffers, float* to, int64_t stride) const {
    if (along_rows_) return fetch(block, buffers, to, stride);
    fetch(block, buffers, buffers.values, 128);
    loops_.transpose_values(buffers.values, 128, block.rows, block.cols, to, stride);
  }

 private:
  static DequantizeArgs with_plane(const GemmSpec& spec, const GemmOperand& operand, bool is_left, bool along_rows,
                                   DequantizeArgs args) {
    args.spec.format = is_left ? spec.left_format : spec.right_format;
    args.spec.scaling = spec.scaling;
    args.spec.square = is_left ? spec.left_square : spec.right_square;
    args.spec.hadamard = spec.hadamard;
    args.direction = along_rows ? Direction::columnwise : Direction::rowwise;
    if (operand.index.of_rows) args.rows = operand.index.count;
    // a Plane is written by quantizers and only read here
    args.plane = {const_cast<void*>(operand.data), const_cast<void*>(operand.scales),
                  const_cast<float*>(operand.global), operand.index.of_rows ? Layout::plain : Layout::native};
    return args;
  }

  // to[r * stride + c] = element (r, c) of the block.
  void fetch(const PanelBlock& block, SideBuffers& buffers, float* to, int64_t stride) const {
    if (values_) return fetch_values(block, buffers, to, stride);
    if (quantized_ && operand_.index.of_rows) return fetch_codes_of_tokens(block, buffers, to, stride);
    if (quantized_) return plane_.load(block, buffers, to, stride);
    const auto* data = static_cast<const uint8_t*>(operand_.data);
    for (int r = 0; r < block.rows; ++r) {
      const int64_t row = operand_.index.at(block.panel.row0 + r);
      const int64_t element = row * operand_.row_stride + block.col;
      if (row < 0) {
        std::fill(to + r * stride, to + r * stride + block.cols, 0.0f);
      } else {
        loops_.load(static_cast<int>(dtype_), data + element * dtype_bytes(dtype_), to + r * stride, block.cols);
      }
    }
  }

  // The same where the rows' codes are those of tokens.
  void fetch_codes_of_tokens(const PanelBlock& block, SideBuffers& buffers, float* to, int64_t stride) const {
    PanelBlock one = block;
    one.rows = 1;
    for (int r = 0; r < block.rows; ++r) {
      one.panel.row0 = operand_.index.at(block.panel.row0 + r);
      if (one.panel.row0 < 0) {
        std::fill(to + r * stride, to + r * stride + block.cols, 0.0f);
      } else {
        plane_.load(one, buffers, to + r * stride, stride);
      }
    }
  }

  // The same of a plane of values: with NVFP4's second level, as those of codes.
  void fetch_values(const PanelBlock& block, SideBuffers& buffers, float* to, int64_t stride) const {
    const int bf16 = static_cast<int>(DType::bf16);
    const auto* data = static_cast<const uint16_t*>(operand_.data);
    if (along_rows_) {
      for (int64_t c = 0; c < block.cols; ++c) {
        loops_.load(bf16, data + (block.index * cols_ + block.col + c) * PANEL_ROWS, buffers.scales, block.rows);
        for (int r = 0; r < block.rows; ++r) to[r * stride + c] = buffers.scales[r];
      }
    } else {
      for (int r = 0; r < block.rows; ++r)
        loops_.load(bf16, data + (block.panel.row0 + r) * cols_ + block.col, to + r * stride, block.cols);
    }
    if (operand_.global == nullptr) return;
    for (int r = 0; r < block.rows; ++r)
      for (int64_t c = 0; c < block.cols; ++c) to[r * stride + c] *= operand_.global[block.panel.group];
  }

  GemmOperand operand_;
  const octavo_loops::Loops& loops_;
  DType dtype_;
  bool quantized_, values_, along_rows_;
  int64_t cols_;
  PlaneValues plane_;
};

}  // namespace octavo::cpu
