#include "launches.h"

#include <algorithm>

#include "fp8_kernel.cuh"
#include "order.cuh"
#include "units_kernel.cuh"

namespace octavo::cuda {
namespace {

constexpr uint32_t ORDER_THREADS = 256;

// docs/decisions/0064 has what these were measured with. Bytes of x per group, on average, up to which one launch pays,
// and of all of x, below which it stays in the L2 cache between two.
constexpr int64_t MOST_GROUP_BYTES = 20'000'000, MOST_BYTES_BY_ROWS = 15'000'000, LEAST_BYTES = 32'000'000;
// Larger groups, among small ones, begin with their last panel.
constexpr int64_t MOST_FORWARD_BYTES = 20'000'000;
// Each warp that places a panel looks at all groups.
constexpr int64_t MOST_GROUPS = 1024;

// Tiles of amaxes between a group's last one and its first codes: as many as hide the wait for them, and fewer where
// the group itself leaves less of the L2 cache.
int64_t lag_tiles(const Input& input, bool columns) {
  const int64_t group = input.rows * input.cols / input.groups / (PANEL_ROWS * TILE_COLS);
  return columns ? std::clamp<int64_t>(480 - group, 128, 320) : std::clamp<int64_t>(800 - group, 256, 448);
}

Fill filled(void* at, int64_t count, float value) {
  return {static_cast<uint32_t*>(at), at ? count : 0, bits_of(value)};
}

template <int LANES>
void launch(void (*kernel)(TurnArgs<Plain<BF16>>), const QuantizeArgs& call, TurnArgs<Plain<BF16>>& args,
            const Fill& cleared, cudaStream_t stream, int threads) {
  const Input& input = call.input;
  const QuantizerSpec& spec = call.spec;
  const PlanView plan{input.plan, input.rows, input.groups};
  const int64_t panels = args.tile.panels, cols = args.tile.cols;
  Turns& turns = args.turns;
  turns.groups = args.tile.tiles.groups;
  turns.shape = shape_for<LANES>(cols);
  turns.across = static_cast<uint32_t>(ceil_div(cols, turns.shape.cols()));
  turns.a_panel = turns.across << turns.shape.part_bits();
  turns.by_across = Divisor::of(turns.across);
  turns.by_panel = Divisor::of(turns.a_panel);

  const bool by_rows = spec.scaling == Scaling::row;
  const float encode = spec.scaling == Scaling::nvfp4
                           ? nvfp4_global(0)
                           : fp32_scale(0, format_max(spec.format), spec.amax_epsilon, spec.power_of_two);
  OrderArgs order{};
  order.fills[0] = cleared;
  order.fills[1] = filled(args.row_out, by_rows ? input.rows : input.groups, decode_scale(encode));
  order.fills[2] = filled(args.col_out, by_rows ? input.groups * cols : input.groups, decode_scale(encode));
  order.fills[3] = filled(args.amax, input.groups, 0.0f);
  order.turns = turns;
  order.order = const_cast<uint32_t*>(turns.order);
  order.panel_start = input.matrix_rows ? nullptr : plan.block_start(HEIGHT_128);
  order.panels = panels;
  order.count = input.groups;
  order.lag = ceil_div(lag_tiles(input, LANES == COLUMN_LANES), int64_t{turns.a_panel});
  order.most_forward = MOST_FORWARD_BYTES / (cols * 2 * PANEL_ROWS);
  order.unchanged = call.unchanged;
  int64_t most = std::max(32 * panels, input.groups * (by_rows ? turns.across : 1));
  for (const Fill& fill : order.fills) most = std::max(most, fill.count);
  order_turns<<<static_cast<uint32_t>(ceil_div(most, ORDER_THREADS)), ORDER_THREADS, 0, stream>>>(order);
  kernel<<<static_cast<uint32_t>(2 * panels * turns.a_panel), threads, 0, stream>>>(args);
}

template <Format F>
void launch_fp8(const QuantizeArgs& call, TurnArgs<Plain<BF16>>& args, const Fill& cleared, cudaStream_t stream) {
  if (call.spec.scaling == Scaling::row)
    return launch<COLUMN_LANES>(quantize_in_turns<BF16, Kind::rows, F, true>, call, args, cleared, stream, THREADS);
  if (call.columnwise.codes)
    return launch<COLUMN_LANES>(quantize_in_turns<BF16, Kind::known, F, true>, call, args, cleared, stream, THREADS);
  launch<ROW_LANES>(quantize_in_turns<BF16, Kind::known, F, false>, call, args, cleared, stream, THREADS);
}

}  // namespace

TurnBytes turn_bytes(const QuantizeArgs& args, bool row_scaling) {
  const Input& input = args.input;
  const int64_t panels = panel_bound(input.rows, input.groups, input.matrix_rows);
  if (!row_scaling) return {8 * panels, 4 * input.groups, 0, 0};
  return {8 * panels, 0, 4 * panels, 4 * input.groups * ceil_div(input.cols, TILE_COLS)};
}

bool may_take_turns(const QuantizeArgs& args) {
  const Input& input = args.input;
  if (args.prologue.kind != PrologueKind::none || input.index.of_rows || input.mxfp4_scales) return false;
  if (input.is_interleaved()) return false;  // two loads of a value leave room for fewer CTAs that wait
  if (input.dtype != DType::bf16 || !input.rows || !input.cols || input.groups > MOST_GROUPS) return false;
  const int64_t bytes = input.rows * input.cols * 2;
  const int64_t most = args.spec.scaling == Scaling::row ? MOST_BYTES_BY_ROWS : MOST_GROUP_BYTES;
  if (bytes < LEAST_BYTES || bytes > most * input.groups) return false;
  const int64_t panels = panel_bound(input.rows, input.groups, input.matrix_rows);
  if (2 * panels * ceil_div(input.cols, TILE_COLS) > 0x7FFFFFFF) return false;
  switch (args.spec.scaling) {
    case Scaling::current: return args.rowwise.codes || args.columnwise.codes;
    case Scaling::row: return args.columnwise.codes && !args.amax;
    case Scaling::nvfp4: return args.spec.square && !args.spec.stochastic && args.columnwise.codes && !args.amax;
    default: return false;
  }
}

bool takes_turns(const QuantizeArgs& args) {
  if (args.dbias || args.dequantized || args.activated) return false;
  return args.spec.scaling != Scaling::nvfp4 ||
         (args.columnwise.layout == Layout::native && (!args.rowwise.codes || args.rowwise.layout == Layout::native));
}

void launch_in_turns(const QuantizeArgs& call, TurnArgs<Plain<BF16>> args, uint32_t* cleared, int64_t cleared_count,
                     cudaStream_t stream) {
  const Fill clear{cleared, cleared_count, 0};
  switch (call.spec.format) {
    case Format::e4m3: return launch_fp8<Format::e4m3>(call, args, clear, stream);
    case Format::e5m2: return launch_fp8<Format::e5m2>(call, args, clear, stream);
    case Format::e2m1:
      return launch<COLUMN_LANES>(quantize_square_units_in_turns<BF16>, call, args, clear, stream, UNIT_THREADS);
  }
}

}  // namespace octavo::cuda
