#include "route.h"

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

Route route_of(const QuantizeArgs& args) {
  const QuantizerSpec& spec = args.spec;
  const bool rows = args.rowwise.codes || args.dequantized, columns = args.columnwise.codes;
  Route route{};
  route.kind = kind_of(spec);
  route.wide = is_wide(args, output_cols(args));
  const bool plain = args.prologue.kind == PrologueKind::none;
  const bool direct = !plain && route.wide && args.input.dtype == DType::bf16 && !spec.square;
  const bool gradient = args.prologue.kind == PrologueKind::activation_grad;
  const bool swiglu =
      direct && (gradient || args.prologue.kind == PrologueKind::activation) && is_swiglu(args.prologue.activation);
  const int unit = block_size(spec.scaling);
  route.fused = direct && route.kind != Kind::rows;
  route.measured = swiglu && route.kind == Kind::rows && (rows || columns);
  route.materialize = !plain && !route.fused;
  route.values = swiglu && !rows && !columns && args.activated && !args.amax && !args.dbias;
  const bool in_halves = !unit || output_cols(args) / 2 % unit == 0;
  route.halves = swiglu && gradient && (route.fused || route.measured) && in_halves;
  route.joined = swiglu && gradient && route.kind == Kind::block && !in_halves;
  const bool sides = args.amax || args.dbias || args.dequantized || (args.activated && !route.materialize);
  route.row_alone = route.kind == Kind::rows && !columns && !sides && !route.measured;
  route.rows_amax = route.kind == Kind::rows && rows && !route.row_alone;
  route.columns_amax = route.kind == Kind::rows && columns;
  const bool second_level = route.kind == Kind::nvfp4;
  route.hadamard_amax = second_level && spec.hadamard && columns;
  const bool levels_of_values = second_level && (rows || !spec.hadamard || spec.square);
  route.group_amax =
      !route.values && (spec.scaling == Scaling::current || levels_of_values || (second_level && args.amax));
  route.array_amax = args.input.index.of_rows && route.group_amax && !route.hadamard_amax;
  route.may_turn = may_take_turns(args);
  route.turns = route.may_turn && route.wide && takes_turns(args);
  return route;
}

bool stays(const QuantizeArgs& args, const Route& route) {
  if (args.prologue.kind == PrologueKind::none || !route.wide || route.measured || route.sums_products()) return false;
  const bool swiglu = args.prologue.kind == PrologueKind::activation && is_swiglu(args.prologue.activation);
  return !(swiglu && route.fused);
}

bool serves_interleaved(const QuantizeArgs& args, const Route& route) {
  const Input& input = args.input;
  const bool served = route.kind == Kind::known || (route.kind == Kind::block && args.spec.square && !args.spec.mxfp4);
  const int64_t half = (input.interleaved_cols ? input.cols : input.matrix_rows) / 2;
  const int64_t block = input.interleaved_cols + input.interleaved_rows;
  return served && route.wide && input.dtype == DType::bf16 && half % 8 == 0 && (block == 1 || block % 8 == 0);
}

bool in_units(const QuantizeArgs& args, const Route& route) {
  return route.wide && args.prologue.kind == PrologueKind::none && args.input.dtype != DType::f32 &&
         !(args.rowwise.codes && args.rowwise.layout == Layout::plain) && !(args.spec.square && args.spec.stochastic) &&
         !args.amax && !args.dbias && !args.dequantized && !args.activated;
}

}  // namespace octavo::cuda
