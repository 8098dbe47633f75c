#include "workspace.h"

#include "cuda/tile/sources.cuh"
#include "cuda/turns/launches.h"
#include "octavo/plan.h"

namespace octavo::cuda {

int64_t product_chunks(const QuantizeArgs& args) { return ceil_div(output_cols(args) / 2, PRODUCT_CHUNK); }

Workspace workspace_of(const QuantizeArgs& args, const Dispatch& dispatch) {
  const int64_t groups = args.input.groups, rows = args.input.rows, cols = output_cols(args);
  size_t end = 0;
  const auto take = [&](bool wanted, int64_t bytes) {
    const size_t at = end;
    if (wanted) end += static_cast<size_t>(round_up(bytes, 256));
    return at;
  };
  Workspace space{};
  space.group = take(dispatch.group_amax, groups * 4);
  space.hadamard = take(dispatch.hadamard_amax, groups * 4);
  space.rows = take(dispatch.rows_amax, rows * 4);
  space.columns = take(dispatch.columns_amax, groups * cols * 4);
  space.array = take(dispatch.array_amax, args.input.index.count * 4);
  space.cleared = end;
  const TurnBytes turns = turn_bytes(args, dispatch.kind == Kind::rows);
  space.order = take(dispatch.may_turn, turns.order);
  space.of_groups = take(dispatch.may_turn, turns.groups);
  space.of_panels = take(dispatch.may_turn, turns.panels);
  space.of_columns = take(dispatch.may_turn, turns.columns);
  space.row_levels = take(dispatch.kind == Kind::nvfp4, groups * sizeof(SecondLevel));
  space.col_levels = take(dispatch.hadamard_amax, groups * sizeof(SecondLevel));
  const bool norm = args.prologue.kind == PrologueKind::norm;
  space.mean = take(norm && args.prologue.norm == Norm::layer && !args.prologue.mean, rows * 4);
  space.rest = take(norm && args.prologue.norm == Norm::layer, rows * 4);
  space.rstd = take(norm && !args.prologue.rstd, rows * 4);
  space.partial_sums = take(args.dbias, panel_bound(rows, groups, args.input.matrix_rows) * cols * 4);
  space.products = take(args.prologue.dprobs && dispatch.sums_products(), product_chunks(args) * rows * 4);
  space.materialized = take(dispatch.materialize && !args.activated, rows * cols * dtype_bytes(args.input.dtype));
  space.bytes = end;
  return space;
}

}  // namespace octavo::cuda
