// The entry point: the kernels that a call needs, in order, and the layout of the caller's workspace.
#include "common/check.h"
#include "cuda/device/launch.h"
#include "cuda/reductions/array_amax.cuh"
#include "cuda/reductions/dbias.h"
#include "cuda/reductions/dprobs.h"
#include "cuda/reductions/norm.h"
#include "cuda/scaling/finish.cuh"
#include "cuda/turns/launches.h"
#include "launches.h"

namespace octavo {
namespace cuda {
namespace {

constexpr int SMALL_BLOCK = 256;

uint32_t small_blocks(int64_t count) { return static_cast<uint32_t>(ceil_div(count, SMALL_BLOCK)); }

// What Swiglu, SwigluGrad and JoinedSwigluGrad serve.
bool is_swiglu(Activation activation) {
  return activation == Activation::swiglu || activation == Activation::clamped_swiglu;
}

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
         aligned(args.activated, 16);
}

// How a call is served. `fused` sources are quantized tile by tile; others are materialized first, `measured` ones in
// the amax pass over rows and columns.
struct Route {
  Kind kind;
  bool wide, fused, materialize, measured;
  bool halves;     // SwigluGrad serves it
  bool joined;     // JoinedSwigluGrad
  bool row_alone;  // row scaling of rowwise data only, without a column pass
  bool group_amax, hadamard_amax, rows_amax, columns_amax;
  bool array_amax;       // groups' amaxes from those of the array's rows, which an index repeats
  bool may_turn, turns;  // both passes in one launch: possible with some arrays, and with these
};

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
  route.group_amax = spec.scaling == Scaling::current || levels_of_values || (second_level && args.amax);
  route.array_amax = args.input.index.of_rows && route.group_amax && !route.hadamard_amax;
  route.may_turn = may_take_turns(args);
  route.turns = route.may_turn && route.wide && takes_turns(args);
  return route;
}

// Whether kernels stay on their multiprocessors for the whole call: those of sources that compute (`is_persistent`).
bool stays(const QuantizeArgs& args, const Route& route) {
  if (args.prologue.kind == PrologueKind::none || !route.wide || route.measured || route.halves || route.joined)
    return false;
  const bool swiglu = args.prologue.kind == PrologueKind::activation && is_swiglu(args.prologue.activation);
  return !(swiglu && route.fused);
}

// Whether the kernels of cuda/units serve a call of NVFP4 that asks for column panels.
bool in_units(const QuantizeArgs& args, const Route& route) {
  return route.wide && args.prologue.kind == PrologueKind::none && args.input.dtype != DType::f32 &&
         !(args.rowwise.codes && args.rowwise.layout == Layout::plain) && !(args.spec.square && args.spec.stochastic) &&
         !args.amax && !args.dbias && !args.dequantized && !args.activated;
}

// Byte offsets into the workspace. The arrays that must be zeroed come first, contiguously.
struct Workspace {
  size_t group, hadamard, rows, columns, array, cleared;
  size_t order, of_groups, of_panels, of_columns;  // of turns
  size_t row_levels, col_levels, mean, rest, rstd, partial_sums, products, materialized, bytes;
};

// True if tiles span whole panels, as columnwise codes and column sums need.
bool by_columns(const QuantizeArgs& args) { return args.columnwise.codes || args.dbias; }

int64_t product_chunks(const QuantizeArgs& args) { return ceil_div(output_cols(args) / 2, PRODUCT_CHUNK); }

Workspace workspace_of(const QuantizeArgs& args, const Route& route) {
  const int64_t groups = args.input.groups, rows = args.input.rows, cols = output_cols(args);
  size_t end = 0;
  const auto take = [&](bool wanted, int64_t bytes) {
    const size_t at = end;
    if (wanted) end += static_cast<size_t>(round_up(bytes, 256));
    return at;
  };
  Workspace space{};
  space.group = take(route.group_amax, groups * 4);
  space.hadamard = take(route.hadamard_amax, groups * 4);
  space.rows = take(route.rows_amax, rows * 4);
  space.columns = take(route.columns_amax, groups * cols * 4);
  space.array = take(route.array_amax, args.input.index.count * 4);
  space.cleared = end;
  const TurnBytes turns = turn_bytes(args, route.kind == Kind::rows);
  space.order = take(route.may_turn, turns.order);
  space.of_groups = take(route.may_turn, turns.groups);
  space.of_panels = take(route.may_turn, turns.panels);
  space.of_columns = take(route.may_turn, turns.columns);
  space.row_levels = take(route.kind == Kind::nvfp4, groups * sizeof(SecondLevel));
  space.col_levels = take(route.hadamard_amax, groups * sizeof(SecondLevel));
  const bool norm = args.prologue.kind == PrologueKind::norm;
  space.mean = take(norm && args.prologue.norm == Norm::layer && !args.prologue.mean, rows * 4);
  space.rest = take(norm && args.prologue.norm == Norm::layer, rows * 4);
  space.rstd = take(norm && !args.prologue.rstd, rows * 4);
  space.partial_sums = take(args.dbias, panel_bound(rows, groups, args.input.matrix_rows) * cols * 4);
  space.products = take(args.prologue.dprobs && (route.halves || route.joined), product_chunks(args) * rows * 4);
  space.materialized = take(route.materialize && !args.activated, rows * cols * dtype_bytes(args.input.dtype));
  space.bytes = end;
  return space;
}

class Call {
 public:
  Call(const QuantizeArgs& args, const Route& route, const Workspace& space, cudaStream_t stream)
      : args_(args), route_(route), space_(space), stream_(stream), cols_(output_cols(args)) {
    const Input& input = args.input;
    panels_ = cols_ ? panel_bound(input.rows, input.groups, input.matrix_rows) : 0;
    const PlanView plan{input.plan, input.rows, input.groups};
    groups_ = {input.matrix_rows ? nullptr : plan.panels(), input.matrix_rows, nullptr};
  }

  Error run() {
    if (!route_.turns) clear_amaxes();
    if (Error error = statistics()) return error;
    switch (args_.input.dtype) {
      case DType::bf16: by_source<BF16>(); break;
      case DType::f16: by_source<F16>(); break;
      case DType::f32: by_source<F32>(); break;
    }
    if (args_.dbias) {
      if (Error error =
              sum_panels(at<float>(space_.partial_sums), args_.dbias, args_.input.rows, cols_, args_.input.groups,
                         args_.input.matrix_rows, args_.input.plan, args_.unchanged, stream_))
        return error;
    }
    if (args_.prologue.dprobs) {
      if (Error error = probabilities()) return error;
    }
    return launched();
  }

 private:
  template <class T>
  T* at(size_t offset) const {
    return reinterpret_cast<T*>(static_cast<char*>(args_.workspace) + offset);
  }

  void clear_words(uint32_t* words, int64_t count) const {
    if (count) clear<<<small_blocks(count), SMALL_BLOCK, 0, stream_>>>(words, count, args_.unchanged);
  }

  void clear_amaxes() const {
    clear_words(at<uint32_t>(0), static_cast<int64_t>(space_.cleared / 4));
    // Delayed scaling clears its amax together with storing its scales.
    if (args_.amax && !route_.group_amax && args_.spec.scaling != Scaling::delayed)
      clear_words(reinterpret_cast<uint32_t*>(args_.amax), args_.input.groups);
  }

  float* mean() const {
    if (args_.prologue.norm != Norm::layer) return nullptr;
    return args_.prologue.mean ? args_.prologue.mean : at<float>(space_.mean);
  }
  float* rstd() const { return args_.prologue.rstd ? args_.prologue.rstd : at<float>(space_.rstd); }

  Error statistics() const {
    if (args_.prologue.kind != PrologueKind::norm) return {};
    const Input& input = args_.input;
    return norm_statistics(input.data, input.dtype, input.rows, input.cols, input.row_stride, args_.prologue.norm,
                           args_.prologue.epsilon, mean(), mean() ? at<float>(space_.rest) : nullptr, rstd(),
                           input.plan, args_.unchanged, stream_);
  }

  template <class T>
  Plain<T> plain() const {
    return {static_cast<const char*>(args_.input.data), args_.input.row_stride, RowsAt::of(args_.input.index)};
  }

  Error probabilities() const {
    if (route_.halves || route_.joined)
      return sum_chunks(at<float>(space_.products), product_chunks(args_), args_.input, args_.prologue.dprobs,
                        args_.unchanged, stream_);
    const int64_t features = is_gated(args_.prologue.activation) ? cols_ / 2 : cols_;
    return sum_products(args_.input, args_.prologue, features, route_.wide, args_.prologue.dprobs, args_.unchanged,
                        stream_);
  }

  template <class T>
  void by_source() {
    const Prologue& prologue = args_.prologue;
    if (args_.input.mxfp4_scales)
      return encode(Packed{static_cast<const uint8_t*>(args_.input.data), args_.input.mxfp4_scales, args_.input.cols});
    if constexpr (!std::is_same_v<T, F16>) {
      if (args_.spec.mxfp4) return encode(Rounded<T>{plain<T>()});
    }
    [[maybe_unused]] const bool clamped = prologue.activation == Activation::clamped_swiglu;
    switch (prologue.kind) {
      case PrologueKind::none: return quantize(plain<T>());
      case PrologueKind::activation:
        if constexpr (std::is_same_v<T, BF16>) {
          const Swiglu<T> source{plain<T>(), prologue.probs, cols_, clamped};
          if (route_.fused && is_swiglu(prologue.activation)) return quantize(source);
          if (route_.measured) return measure(source);
        }
        return prepare(Activated<T>{plain<T>(), prologue.probs, cols_, prologue.activation});
      case PrologueKind::activation_grad:
        if constexpr (std::is_same_v<T, BF16>) {
          if (route_.halves || route_.joined) {
            const Plain<T> dy{static_cast<const char*>(prologue.dy), prologue.dy_stride};
            const SwigluGrad<T> source{plain<T>(), dy, prologue.probs, cols_ / 2, clamped, nullptr, args_.input.rows};
            if (route_.measured) return measure(source);
            if (route_.joined) return encode(JoinedSwigluGrad<T>{source});
            return quantize(source);
          }
        }
        return prepare(ActivationGrad<T>{plain<T>(),
                                         {static_cast<const char*>(prologue.dy), prologue.dy_stride},
                                         prologue.probs,
                                         is_gated(prologue.activation) ? cols_ / 2 : cols_,
                                         prologue.activation});
      case PrologueKind::norm:
        return prepare(
            Normalized<T>{plain<T>(), prologue.gamma, prologue.beta, mean(), at<float>(space_.rest), rstd()});
    }
  }

  // A source with a prologue: fused into the tiles, or materialized first.
  template <class S>
  void prepare(const S& source) {
    using T = typename S::Type;
    if constexpr (std::is_same_v<T, BF16>) {
      if (route_.fused) return quantize(source);
    }
    if (!panels_) return quantize(plain<T>());
    TileArgs<S> tile = common(source);
    without_groups(tile);
    void* to = materialized();
    tile.activated = to;
    launch_materialize(tile, route_.wide, stream_);
    quantize(Plain<T>{static_cast<const char*>(to), cols_});
  }

  // Materializes the source in the amax pass.
  template <class S>
  void measure(S source) {
    using T = typename S::Type;
    if (!panels_) return quantize(plain<T>());
    if constexpr (makes_halves<S>) source.products = products();
    void* to = materialized();
    amaxes(source, to);
    encode(Plain<T>{static_cast<const char*>(to), cols_});
  }

  void* materialized() {
    materialized_ = true;
    return args_.activated ? args_.activated : at<void>(space_.materialized);
  }

  float* products() const { return args_.prologue.dprobs ? at<float>(space_.products) : nullptr; }

  template <class S>
  TileArgs<S> common(const S& source) const {
    TileArgs<S> tile{};
    tile.source = source;
    if constexpr (makes_halves<S> || joins_halves<S>) tile.source.products = products();
    tile.tiles.groups = groups_;
    tile.tiles.most_ctas = most_ctas();
    tile.panels = panels_;
    tile.rows = args_.input.rows;
    tile.cols = cols_;
    tile.unchanged = args_.unchanged;
    return tile;
  }

  // Tiles of full panels, for kernels to which it does not matter which group a row belongs to.
  template <class Args>
  void without_groups(Args& tile) const {
    const Input& input = args_.input;
    tile.tiles.groups = {nullptr, input.matrix_rows ? input.rows : 0, input.matrix_rows ? nullptr : input.plan};
    tile.panels = ceil_div(input.rows, PANEL_ROWS);
  }

  uint32_t most_ctas() const { return static_cast<uint32_t>(args_.ctas); }

  ScaleOptions options() const { return {args_.spec.amax_epsilon, args_.spec.power_of_two}; }

  template <class S>
  void quantize(const S& source) {
    if constexpr (std::is_same_v<S, Plain<BF16>>) {
      if (route_.turns && panels_) return quantize_in_turns(source);
    }
    if (route_.row_alone) {
      if constexpr (std::is_same_v<S, Plain<typename S::Type>>) return quantize_rows_alone(source);
    }
    amaxes(source, nullptr);
    encode(source);
  }

  void quantize_in_turns(const Plain<BF16>& source) const {
    const bool by_rows = route_.kind == Kind::rows;
    const auto out = [&](const Plane& plane) {
      return !plane.codes ? nullptr : route_.kind == Kind::nvfp4 ? plane.global : static_cast<float*>(plane.scales);
    };
    TurnArgs<Plain<BF16>> turn{};
    turn.tile = planes_of(source);
    turn.turns.order = at<uint32_t>(space_.order);
    turn.turns.of_groups = by_rows ? nullptr : at<uint32_t>(space_.of_groups);
    turn.turns.of_panels = by_rows ? at<uint32_t>(space_.of_panels) : nullptr;
    turn.turns.of_columns = by_rows ? at<uint32_t>(space_.of_columns) : nullptr;
    turn.group = route_.group_amax ? at<uint32_t>(space_.group) : nullptr;
    turn.rows = route_.rows_amax ? at<uint32_t>(space_.rows) : nullptr;
    turn.columns = route_.columns_amax ? at<uint32_t>(space_.columns) : nullptr;
    turn.levels = at<SecondLevel>(space_.row_levels);
    turn.row_out = out(args_.rowwise);
    turn.col_out = out(args_.columnwise);
    turn.amax = args_.amax;
    launch_in_turns(args_, turn, at<uint32_t>(0), static_cast<int64_t>(space_.cleared / 4), stream_);
  }

  // Planes, and the scales that an amax pass makes.
  template <class S>
  TileArgs<S> planes_of(const S& source) const {
    TileArgs<S> tile = common(source);
    tile.rowwise = args_.rowwise;
    tile.columnwise = args_.columnwise;
    tile.encode = args_.spec.scaling == Scaling::delayed ? args_.encode_scales : at<float>(space_.group);
    tile.encode_rows = at<float>(space_.rows);
    tile.encode_cols = at<float>(space_.columns);
    tile.row_levels = at<SecondLevel>(space_.row_levels);
    tile.col_levels = route_.hadamard_amax ? at<SecondLevel>(space_.col_levels) : tile.row_levels;
    tile.options = options();
    return tile;
  }

  // Everything after the amax pass.
  template <class S>
  void encode(const S& source) const {
    scales();
    if (!panels_) return;
    TileArgs<S> tile = planes_of(source);
    tile.poison_infinities = args_.spec.scaling == Scaling::delayed;
    tile.amax = route_.group_amax ? nullptr : reinterpret_cast<uint32_t*>(args_.amax);
    tile.dequantized = args_.dequantized;
    tile.activated = materialized_ ? nullptr : args_.activated;
    tile.partial_sums = args_.dbias ? at<float>(space_.partial_sums) : nullptr;
    tile.seed = args_.seed;
    tile.group_offset = args_.group_offset;
    tile.group_offset_device = args_.group_offset_device;
    tile.operand = args_.spec.operand;
    tile.square_columns = args_.spec.square_columns;
    tile.reverse = space_.cleared > 0;
    const bool columns = args_.columnwise.codes;
    const Choice choice{route_.kind,       args_.spec.format,     args_.spec.square,
                        by_columns(args_), args_.spec.stochastic, args_.spec.hadamard && columns,
                        route_.wide};
    const bool own_rows = route_.kind == Kind::block || route_.kind == Kind::mxfp8 || route_.kind == Kind::rows;
    if (own_rows && !choice.columns && !choice.square && !args_.amax && route_.wide) without_groups(tile);
    launch_tiles(tile, choice, stream_);
  }

  template <class T>
  void quantize_rows_alone(const Plain<T>& source) const {
    if (!args_.input.rows) return;
    RowArgs<Plain<T>> row{
        source,        args_.input.rows, cols_,          args_.input.matrix_rows ? nullptr : args_.input.plan,
        args_.rowwise, options(),        args_.unchanged};
    launch_rows(row, args_.spec.format, route_.wide, stream_);
  }

  // `to`: where the source is materialized, or null.
  template <class S>
  void amaxes(const S& source, void* to) const {
    if (!space_.cleared || !panels_) return;
    if constexpr (is_plain<S>) {
      if (route_.array_amax) return array_amaxes(source);
    }
    const Amax what = route_.kind == Kind::rows ? Amax::rows_and_columns
                      : route_.hadamard_amax    ? Amax::hadamard
                                                : Amax::group;
    const AmaxArgs<S> amax{source,
                           {groups_, 0, 0, 0, 0, 0, {}, {}, most_ctas()},
                           panels_,
                           cols_,
                           route_.group_amax ? at<uint32_t>(space_.group) : nullptr,
                           at<uint32_t>(space_.hadamard),
                           route_.rows_amax ? at<uint32_t>(space_.rows) : nullptr,
                           route_.columns_amax ? at<uint32_t>(space_.columns) : nullptr,
                           to,
                           args_.unchanged};
    launch_amax(amax, what, route_.wide, stream_);
  }

  // Each row of the array is read once, however many rows of the operand are copies of it.
  template <class T>
  void array_amaxes(const Plain<T>& source) const {
    const int64_t count = args_.input.index.count;
    uint32_t* const rows = at<uint32_t>(space_.array);
    AmaxArgs<Plain<T>> amax{};
    amax.source = {source.data, source.stride};
    amax.tiles.groups = {nullptr, count, nullptr};
    amax.panels = ceil_div(count, PANEL_ROWS);
    amax.cols = cols_;
    amax.rows = rows;
    amax.unchanged = args_.unchanged;
    launch_amax(amax, Amax::rows_and_columns, route_.wide, stream_);
    gather_amaxes<<<static_cast<uint32_t>(panels_), PANEL_ROWS, 0, stream_>>>(
        rows, source.rows_at, groups_, at<uint32_t>(space_.group), args_.unchanged);
  }

  // Scales of whole groups, rows and columns, including those of groups without rows.
  void scales() const {
    const int64_t groups = args_.input.groups;
    float* row_out = static_cast<float*>(args_.rowwise.codes ? args_.rowwise.scales : nullptr);
    float* col_out = static_cast<float*>(args_.columnwise.codes ? args_.columnwise.scales : nullptr);
    switch (args_.spec.scaling) {
      case Scaling::delayed:
        store_decode_scales<<<small_blocks(groups), SMALL_BLOCK, 0, stream_>>>(args_.encode_scales, groups, row_out,
                                                                               col_out, args_.amax, args_.unchanged);
        break;
      case Scaling::current: finish(space_.group, groups, row_out, col_out, args_.amax); break;
      case Scaling::row:
        if (route_.rows_amax) finish(space_.rows, args_.input.rows, row_out, nullptr, nullptr);
        if (route_.columns_amax) finish(space_.columns, groups * cols_, nullptr, col_out, nullptr);
        break;
      case Scaling::nvfp4: second_levels(); break;
      default: break;
    }
  }

  void finish(size_t bits, int64_t count, float* first, float* second, float* amax) const {
    if (!count) return;
    finish_scales<<<small_blocks(count), SMALL_BLOCK, 0, stream_>>>(at<uint32_t>(bits), count, args_.spec.format,
                                                                    options(), first, second, amax, args_.unchanged);
  }

  void second_levels() const {
    const int64_t groups = args_.input.groups;
    float* row_out = args_.rowwise.codes ? args_.rowwise.global : nullptr;
    float* col_out = args_.columnwise.codes ? args_.columnwise.global : nullptr;
    if (route_.group_amax)
      finish_levels<<<small_blocks(groups), SMALL_BLOCK, 0, stream_>>>(
          at<uint32_t>(space_.group), groups, at<SecondLevel>(space_.row_levels), row_out,
          route_.hadamard_amax ? nullptr : col_out, args_.amax, args_.unchanged);
    if (route_.hadamard_amax)
      finish_levels<<<small_blocks(groups), SMALL_BLOCK, 0, stream_>>>(at<uint32_t>(space_.hadamard), groups,
                                                                       at<SecondLevel>(space_.col_levels), col_out,
                                                                       nullptr, nullptr, args_.unchanged);
  }

  const QuantizeArgs& args_;
  const Route& route_;
  const Workspace& space_;
  cudaStream_t stream_;
  int64_t cols_;
  int64_t panels_;
  Groups groups_;
  bool materialized_ = false;
};

}  // namespace
}  // namespace cuda

size_t quantize_workspace_cuda(const QuantizeArgs& args) {
  return cuda::workspace_of(args, cuda::route_of(args)).bytes;
}

Error quantize_cuda(const QuantizeArgs& args, void* stream) {
  if (Error error = check_quantize(args)) return error;
  const int64_t panels = panel_bound(args.input.rows, args.input.groups, args.input.matrix_rows);
  if (panels * ceil_div(output_cols(args), cuda::TILE_COLS) > 0x7FFFFFFF)
    return unsupported("x has more than 2^31 tiles of 128 x 128 elements; split it by rows");
  if (args.columnwise.layout == Layout::native && !aligned(args.columnwise.codes, 16))
    return invalid("columnwise panels are not 16-byte aligned; give memory that is");
  const cuda::Route route = cuda::route_of(args);
  if (args.ctas > 0 && !cuda::stays(args, route))
    return unsupported(
        "ctas was given and every kernel of this call has a CTA for each tile, which ends within microseconds; give 0, "
        "and a stream of higher priority to what must not wait");
  if (args.columnwise.layout == Layout::values && route.kind == cuda::Kind::nvfp4 && !cuda::in_units(args, route))
    return unsupported(
        "columnwise values of nvfp4 are made of bf16 and f16 whose rows are aligned to 16 bytes, without a prologue or "
        "other outputs, and in square blocks without stochastic rounding; ask for codes in the native layout");
  const cuda::Workspace space = cuda::workspace_of(args, route);
  if (space.bytes > args.workspace_bytes)
    return {ErrorCode::workspace_too_small, "workspace is smaller than workspace_bytes says; allocate that many bytes"};
  return cuda::Call(args, route, space, static_cast<cudaStream_t>(stream)).run();
}

}  // namespace octavo
