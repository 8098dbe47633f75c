#include "dispatch.h"

#include "common/check.h"
#include "cuda/turns/launches.h"

namespace octavo::cuda {
namespace {

Kind kind_of(const QuantizerSpec& spec) {
  switch (spec.scaling) {
    case Scaling::row: return Kind::rows;
    case Scaling::block: return Kind::block;
    case Scaling::mxfp8: return Kind::mxfp8;
    case Scaling::nvfp4: return Kind::nvfp4;
    default: return Kind::known;
  }
}

// 16-byte loads of every input, and stores of eight neighbours of every output.
bool is_wide(const QuantizeArgs& args, int64_t cols) {
  const Prologue& prologue = args.prologue;
  const int64_t width = 16 / dtype_bytes(args.input.dtype);
  const bool halves = prologue.kind == PrologueKind::activation_grad && is_gated(prologue.activation);
  return cols % (halves ? 16 : 8) == 0 && args.input.row_stride % width == 0 && prologue.dy_stride % width == 0 &&
         aligned(args.input.data, 16) && aligned(prologue.dy, 16) && aligned(prologue.gamma, 16) &&
         aligned(prologue.beta, 16) && aligned(args.rowwise.codes, 8) && aligned(args.dequantized, 16) &&
         aligned(args.activated, 16) && aligned(prologue.forward, 16);
}

}  // namespace

bool is_swiglu(Activation activation) {
  return activation == Activation::swiglu || activation == Activation::clamped_swiglu;
}

Dispatch dispatch_of(const QuantizeArgs& args) {
  const QuantizerSpec& spec = args.spec;
  const bool rows = args.rowwise.codes || args.dequantized, columns = args.columnwise.codes;
  Dispatch dispatch{};
  dispatch.kind = kind_of(spec);
  dispatch.wide = is_wide(args, output_cols(args));
  const bool plain = args.prologue.kind == PrologueKind::none;
  const bool direct = !plain && dispatch.wide && args.input.dtype == DType::bf16 && !spec.square;
  const bool gradient = args.prologue.kind == PrologueKind::activation_grad;
  const bool swiglu =
      direct && (gradient || args.prologue.kind == PrologueKind::activation) && is_swiglu(args.prologue.activation);
  const int unit = block_size(spec.scaling);
  dispatch.fused = direct && dispatch.kind != Kind::rows;
  dispatch.measured = swiglu && dispatch.kind == Kind::rows && (rows || columns);
  dispatch.materialize = !plain && !dispatch.fused;
  dispatch.values_alone = swiglu && !rows && !columns && args.activated && !args.amax && !args.dbias;
  const bool in_halves = !unit || output_cols(args) / 2 % unit == 0;
  dispatch.swiglu_grad = swiglu && gradient && (dispatch.fused || dispatch.measured) && in_halves;
  dispatch.joined_swiglu_grad = swiglu && gradient && dispatch.kind == Kind::block && !in_halves;
  const bool sides = args.amax || args.dbias || args.dequantized || (args.activated && !dispatch.materialize);
  dispatch.row_alone = dispatch.kind == Kind::rows && !columns && !sides && !dispatch.measured;
  dispatch.rows_amax = dispatch.kind == Kind::rows && rows && !dispatch.row_alone;
  dispatch.columns_amax = dispatch.kind == Kind::rows && columns;
  const bool second_level = dispatch.kind == Kind::nvfp4;
  dispatch.hadamard_amax = second_level && spec.hadamard && columns;
  const bool levels_of_values = second_level && (rows || !spec.hadamard || spec.square);
  dispatch.group_amax =
      !dispatch.values_alone && (spec.scaling == Scaling::current || levels_of_values || (second_level && args.amax));
  dispatch.array_amax = args.input.index.of_rows && dispatch.group_amax && !dispatch.hadamard_amax;
  dispatch.may_turn = may_take_turns(args);
  dispatch.turns = dispatch.may_turn && dispatch.wide && takes_turns(args);
  return dispatch;
}

bool has_persistent_kernels(const QuantizeArgs& args, const Dispatch& dispatch) {
  if (args.prologue.kind == PrologueKind::none || !dispatch.wide || dispatch.measured || dispatch.sums_products())
    return false;
  const bool swiglu = args.prologue.kind == PrologueKind::activation && is_swiglu(args.prologue.activation);
  return !(swiglu && dispatch.fused);
}

bool serves_interleaved(const QuantizeArgs& args, const Dispatch& dispatch) {
  const Input& input = args.input;
  const bool served =
      dispatch.kind == Kind::known || (dispatch.kind == Kind::block && args.spec.square && !args.spec.mxfp4);
  const int64_t half = (input.interleaved_cols ? input.cols : input.matrix_rows) / 2;
  const int64_t block = input.interleaved_cols + input.interleaved_rows;
  return served && dispatch.wide && input.dtype == DType::bf16 && half % 8 == 0 && (block == 1 || block % 8 == 0);
}

bool in_units(const QuantizeArgs& args, const Dispatch& dispatch) {
  return dispatch.wide && args.prologue.kind == PrologueKind::none && args.input.dtype != DType::f32 &&
         !(args.rowwise.codes && args.rowwise.layout == Layout::plain) && !(args.spec.square && args.spec.stochastic) &&
         !args.amax && !args.dbias && !args.dequantized && !args.activated;
}

}  // namespace octavo::cuda
