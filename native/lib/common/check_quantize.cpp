// Argument checks of the quantizers, shared by both devices. Pointers are compared and never dereferenced.
#include <cmath>

#include "check_operand.h"

namespace octavo {

namespace {

// A plane that a quantizer writes, which may be one of values.
Error check_output_plane(const QuantizeArgs& args, const Plane& plane, int64_t elements) {
  if (plane.layout != Layout::values) return check_plane(args.spec, plane, elements);
  if (!is_emulated(args.spec.scaling)) {
    return invalid("a plane's layout is values, which are made of mxfp8 and nvfp4; give plain or native with others");
  }
  if (plane.scales != nullptr) return invalid("a plane of values has scales, which are in the values; leave them null");
  if (!aligned(plane.codes, 16)) return invalid("a plane of values is not aligned to 16 bytes; allocate it so");
  return check_second_level(args.spec, plane, elements);
}

Error check_activation(const QuantizeArgs& args) {
  const Prologue& prologue = args.prologue;
  const int64_t elements = args.input.rows * args.input.cols;
  if (!named(prologue.activation, Activation::clamped_swiglu)) {
    return invalid("activation is not a valid Activation; give a number from 0 to 7");
  }
  const bool gated = is_gated(prologue.activation);
  if (gated && args.input.cols % 2 != 0) {
    return invalid("cols is odd and the activation is gated; the input holds gate and up side by side, [rows, 2 F]");
  }
  if (!aligned(prologue.probs, 4)) return invalid("probs is not aligned to 4 bytes; it is fp32 [rows]");
  if (prologue.kind == PrologueKind::activation) return {};
  if (prologue.dy == nullptr && elements > 0) {
    return invalid("dy is null and the prologue is activation_grad; give the gradient of the activation's output");
  }
  if (!aligned(prologue.dy, dtype_bytes(args.input.dtype))) {
    return invalid("dy is not aligned to its elements; it has the dtype of the input");
  }
  if (prologue.dy_stride < (gated ? args.input.cols / 2 : args.input.cols)) {
    return invalid("dy_stride is less than the columns of dy; give the elements from one row to the next");
  }
  if (prologue.dy_stride > MAX_STRIDE) return invalid("dy_stride is past 2^32 elements; copy dy closer together");
  return {};
}

Error check_norm(const QuantizeArgs& args) {
  const Prologue& prologue = args.prologue;
  const int bytes = dtype_bytes(args.input.dtype);
  if (!named(prologue.norm, Norm::layer)) return invalid("norm is not a valid Norm; give rms or layer (0, 1)");
  if (prologue.gamma == nullptr && args.input.cols > 0) {
    return invalid("gamma is null and the prologue is norm; give the weights [cols], ones for none");
  }
  if (prologue.norm == Norm::rms && prologue.beta != nullptr) {
    return invalid("beta was given with RMSNorm, which has none; leave it null");
  }
  if (!aligned(prologue.gamma, bytes) || !aligned(prologue.beta, bytes)) {
    return invalid("gamma or beta is not aligned to its elements; they have the dtype of the input");
  }
  if (!(prologue.epsilon >= 0.0f) || !std::isfinite(prologue.epsilon)) {
    return invalid("epsilon is negative, infinite or NaN; give the norm's small constant, 0 or more");
  }
  if (prologue.probs != nullptr) {
    return invalid("probs was given with a norm prologue; it belongs to activations, so leave it null");
  }
  if (!aligned(prologue.mean, 4) || !aligned(prologue.rstd, 4)) {
    return invalid("mean or rstd is not aligned to 4 bytes; they are fp32 [rows]");
  }
  return {};
}

Error check_prologue(const QuantizeArgs& args) {
  switch (args.prologue.kind) {
    case PrologueKind::none: return {};
    case PrologueKind::activation:
    case PrologueKind::activation_grad: return check_activation(args);
    case PrologueKind::norm: return check_norm(args);
  }
  return invalid("prologue is not a valid PrologueKind; give a number from 0 to 3");
}

// `data` [count, cols] is read at rows that are not known on the host.
Error check_index(const QuantizeArgs& args) {
  const RowIndex& index = args.input.index;
  if (const Error error = check_row_index(index)) return error;
  if (index.of_rows == nullptr) return {};
  if (args.input.matrix_rows > 0) {
    return invalid("index was given with stacked matrices; it is for ragged rows, so leave it null");
  }
  if (args.prologue.kind != PrologueKind::none) {
    return invalid("index was given with a prologue, whose kernels read rows in their order; permute the rows first");
  }
  return {};
}

// Halves of columns or of rows that take turns in the array.
Error check_interleaved(const QuantizeArgs& args) {
  const Input& input = args.input;
  if (!input.is_interleaved()) return {};
  if (input.interleaved_cols < 0 || input.interleaved_rows < 0 || (input.interleaved_cols && input.interleaved_rows))
    return invalid("interleaved_cols or interleaved_rows is negative, or both are given; give one of them, 1 or more");
  if (input.matrix_rows == 0)
    return invalid("interleaved_cols or interleaved_rows was given with ragged rows; they are for stacked matrices");
  if (args.prologue.kind != PrologueKind::none || input.mxfp4_scales != nullptr)
    return invalid("interleaved_cols or interleaved_rows was given with a prologue or mxfp4_scales; leave them 0");
  const int64_t length = input.interleaved_cols ? input.cols : input.matrix_rows;
  if (length % 2 || length / 2 % (input.interleaved_cols + input.interleaved_rows))
    return invalid("interleaved_cols or interleaved_rows does not divide half of them; give a divisor of half");
  return {};
}

Error check_rounded(const QuantizeArgs& args) {
  const Input& input = args.input;
  if (!args.spec.mxfp4) return {};
  const bool more = args.amax || args.dbias || args.dequantized || args.activated;
  if (args.prologue.kind != PrologueKind::none || more || input.index.of_rows)
    return invalid("mxfp4 is for values as they are and for planes alone; give no prologue, index or other output");
  if (input.mxfp4_scales != nullptr)
    return invalid("mxfp4_scales was given and the quantizer rounds to MXFP4 first; its values need none, so drop one");
  if (input.dtype == DType::f16) return invalid("mxfp4 is for bf16 and fp32 and dtype is f16; convert the input first");
  return {};
}

Error check_packed(const QuantizeArgs& args) {
  const Input& input = args.input;
  if (input.mxfp4_scales == nullptr) return {};
  const bool as_spec = args.spec.scaling == Scaling::block && args.spec.square && args.spec.format == Format::e4m3;
  if (!as_spec)
    return invalid("mxfp4_scales was given, and codes are not E4M3 in square blocks of 128; expand it first");
  const bool more = args.amax || args.dbias || args.dequantized || args.activated;
  if (args.prologue.kind != PrologueKind::none || more)
    return invalid("mxfp4_scales was given with a prologue or an output beside the planes; expand it first");
  if (input.dtype != DType::bf16)
    return invalid("mxfp4_scales was given and dtype is not bf16, which holds its values");
  if (input.matrix_rows == 0) return invalid("mxfp4_scales was given with ragged rows; it is for stacked matrices");
  if (input.cols % 32 || input.row_stride != input.cols)
    return invalid("mxfp4_scales was given, so cols is a multiple of 32 and row_stride is cols");
  if (!aligned(input.data, 4) || !aligned(args.rowwise.codes, 8))
    return invalid("MXFP4 codes are not 4-byte aligned, or rowwise codes not 8-byte aligned; give memory that is");
  return {};
}

Error check_input(const Input& input) {
  if (!named(input.dtype, DType::bf16)) return invalid("dtype is not a valid DType; give f32, f16 or bf16 (0 to 2)");
  const Error shape = check_shape(input.rows, input.cols, input.groups, input.matrix_rows, input.plan);
  if (shape) return shape;
  if (input.data == nullptr && (input.index.of_rows ? input.index.count : input.rows) * input.cols > 0) {
    return invalid("the input is null; give the address of its first element");
  }
  if (!aligned(input.data, dtype_bytes(input.dtype))) {
    return invalid("the input is not aligned to its elements; give an address that is a multiple of their size");
  }
  if (input.row_stride < input.cols) {
    return invalid("row_stride is less than cols; give the elements from one row to the next, rows being contiguous");
  }
  if (input.row_stride > MAX_STRIDE) return invalid("row_stride is past 2^32 elements; copy the rows closer together");
  return {};
}

Error check_outputs(const QuantizeArgs& args) {
  if (args.prologue.dprobs != nullptr && args.prologue.kind != PrologueKind::activation_grad) {
    return invalid("dprobs was given and the prologue is not activation_grad, which alone makes it; leave it null");
  }
  if (args.prologue.forward != nullptr && args.prologue.kind != PrologueKind::activation_grad) {
    return invalid("forward was given and the prologue is not activation_grad, which alone makes it; leave it null");
  }
  if (!aligned(args.prologue.forward, dtype_bytes(args.input.dtype))) {
    return invalid("forward is not aligned to its elements; it has the dtype of the input");
  }
  if (!aligned(args.prologue.dprobs, 4)) return invalid("dprobs is not aligned to 4 bytes; it is fp32 [rows]");
  if (!aligned(args.amax, 4)) return invalid("amax is not aligned to 4 bytes; it is fp32 [groups]");
  if (!aligned(args.dbias, 4)) return invalid("dbias is not aligned to 4 bytes; it is fp32 [groups, cols]");
  if (!aligned(args.dequantized, 2)) return invalid("dequantized is not aligned to 2 bytes; it is bf16 [rows, cols]");
  if (!aligned(args.activated, dtype_bytes(args.input.dtype))) {
    return invalid("activated is not aligned to its elements; it has the dtype of the input");
  }
  if (args.dequantized != nullptr && args.rowwise.codes == nullptr) {
    return invalid("dequantized holds rowwise data and no rowwise plane is requested; give its codes and scales, too");
  }
  if (args.dequantized != nullptr && args.rowwise.layout == Layout::values) {
    return invalid("dequantized was given and the rowwise plane has values already; leave one of them out");
  }
  return {};
}

Error check_scalars(const QuantizeArgs& args) {
  const bool delayed = args.spec.scaling == Scaling::delayed;
  if (delayed && args.encode_scales == nullptr) {
    return invalid("encode_scales is null and scaling is delayed; give the encode scales [groups] of its state");
  }
  if (!delayed && args.encode_scales != nullptr) {
    return invalid("encode_scales was given and the scaling makes its own; leave it null unless scaling is delayed");
  }
  if (!aligned(args.encode_scales, 4)) return invalid("encode_scales is not aligned to 4 bytes; it is fp32 [groups]");
  if (args.spec.stochastic && args.seed == nullptr) {
    return invalid("seed is null and rounding is stochastic; give two uint32 words, another seed each step");
  }
  if (!aligned(args.seed, 4) || !aligned(args.group_offset_device, 4) || !aligned(args.unchanged, 4)) {
    return invalid("seed, group_offset_device or unchanged is not aligned to 4 bytes; they are 32-bit words");
  }
  // Every CPU allocator aligns to 16 bytes; quantize_cuda lays its arrays out at multiples of 256.
  if (!aligned(args.workspace, 16)) return invalid("workspace is not aligned to 16 bytes; allocate it so");
  return check_ctas(args.ctas);
}

}  // namespace

Error check_quantize(const QuantizeArgs& args) {
  if (const Error error = check_spec(args.spec)) return error;
  if (const Error error = check_input(args.input)) return error;
  if (const Error error = check_prologue(args)) return error;
  if (const Error error = check_index(args)) return error;
  if (const Error error = check_interleaved(args)) return error;
  if (const Error error = check_rounded(args)) return error;
  if (const Error error = check_packed(args)) return error;
  const int64_t elements = args.input.rows * output_cols(args);
  if (const Error error = check_output_plane(args, args.rowwise, elements)) return error;
  if (const Error error = check_output_plane(args, args.columnwise, elements)) return error;
  const bool of_activation =
      args.prologue.kind == PrologueKind::activation || args.prologue.kind == PrologueKind::activation_grad;
  const bool values_alone = of_activation && args.activated != nullptr;
  if (elements > 0 && args.rowwise.codes == nullptr && args.columnwise.codes == nullptr && !values_alone) {
    return invalid(
        "no plane is requested; give codes and scales of the rowwise plane, the columnwise one, or both, or activated "
        "of an activation or its gradient");
  }
  if (args.spec.hadamard && args.input.matrix_rows > 0 && args.columnwise.codes != nullptr) {
    return invalid(HADAMARD_STACKED);
  }
  if (const Error error = check_outputs(args)) return error;
  return check_scalars(args);
}

}  // namespace octavo
