#include "call.h"

#include "amax_scales.h"
#include "cuda/activations/swiglu_values.h"
#include "cuda/device/launch.h"
#include "cuda/quantize/launches.h"
#include "cuda/reductions/array_amax.cuh"
#include "cuda/reductions/dbias.h"
#include "cuda/reductions/dprobs.h"
#include "cuda/reductions/norm.h"
#include "cuda/turns/launches.h"

namespace octavo::cuda {
namespace {

// True if tiles span whole panels, as columnwise codes and column sums need.
bool by_columns(const QuantizeArgs& args) { return args.columnwise.codes || args.dbias; }

class Call {
 public:
  Call(const QuantizeArgs& args, const Dispatch& dispatch, const Workspace& space, cudaStream_t stream)
      : args_(args), dispatch_(dispatch), space_(space), stream_(stream), cols_(output_cols(args)) {
    const Input& input = args.input;
    panels_ = cols_ ? panel_bound(input.rows, input.groups, input.matrix_rows) : 0;
    const PlanView plan{input.plan, input.rows, input.groups};
    groups_ = {input.matrix_rows ? nullptr : plan.panels(), input.matrix_rows, nullptr};
  }

  Error run() {
    if (!dispatch_.turns) clear_amaxes(args_, dispatch_, space_, stream_);
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
    if (args_.prologue.forward && !dispatch_.values_alone) {
      switch (args_.input.dtype) {
        case DType::bf16: forward_values<BF16>(); break;
        case DType::f16: forward_values<F16>(); break;
        case DType::f32: forward_values<F32>(); break;
      }
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
    if (dispatch_.sums_products())
      return sum_chunks(at<float>(space_.products), product_chunks(args_), args_.input, args_.prologue.dprobs,
                        args_.unchanged, stream_);
    const int64_t features = is_gated(args_.prologue.activation) ? cols_ / 2 : cols_;
    return sum_products(args_.input, args_.prologue, features, dispatch_.wide, args_.prologue.dprobs, args_.unchanged,
                        stream_);
  }

  template <class T>
  void by_source() {
    const Prologue& prologue = args_.prologue;
    if (args_.input.mxfp4_scales)
      return encode(Packed{static_cast<const uint8_t*>(args_.input.data), args_.input.mxfp4_scales, args_.input.cols});
    if constexpr (std::is_same_v<T, BF16>) {
      if (args_.input.is_interleaved()) return quantize_interleaved(Interleaved<T>::of(plain<T>(), args_.input));
    }
    if constexpr (!std::is_same_v<T, F16>) {
      if (args_.spec.mxfp4 == Direction::columnwise) return encode(RoundedColumns<T>{plain<T>()});
      if (args_.spec.mxfp4) return encode(Rounded<T>{plain<T>()});
    }
    [[maybe_unused]] const bool clamped = prologue.activation == Activation::clamped_swiglu;
    switch (prologue.kind) {
      case PrologueKind::none: return quantize(plain<T>());
      case PrologueKind::activation:
        if constexpr (std::is_same_v<T, BF16>) {
          const Swiglu<T> source{plain<T>(), prologue.probs, cols_, clamped};
          if (dispatch_.values_alone) return values_alone(source);
          if (dispatch_.fused && is_swiglu(prologue.activation)) return quantize(source);
          if (dispatch_.measured) return measure(source);
        }
        return prepare(Activated<T>{plain<T>(), prologue.probs, cols_, prologue.activation});
      case PrologueKind::activation_grad:
        if constexpr (std::is_same_v<T, BF16>) {
          const Plain<T> dy{static_cast<const char*>(prologue.dy), prologue.dy_stride};
          SwigluGrad<T> source{plain<T>(), dy, prologue.probs, cols_ / 2, clamped, nullptr, args_.input.rows};
          if (dispatch_.values_alone) {
            if (dispatch_.sums_products()) source.products = products();
            return values_alone(source);
          }
          if (dispatch_.sums_products()) {
            if (dispatch_.measured) return measure(source);
            if (dispatch_.joined_swiglu_grad) return encode(JoinedSwigluGrad<T>{source});
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

  // The source's values without codes.
  template <class S>
  void values_alone(const S& source) const {
    const Input& input = args_.input;
    // the first word of a plan is the number of rows in use
    swiglu_values(source,
                  {args_.activated, args_.prologue.forward, input.rows, input.matrix_rows ? nullptr : input.plan,
                   args_.unchanged},
                  stream_);
  }

  // The activation's own values, beside its gradient.
  template <class T>
  void forward_values() const {
    if (!panels_) return;
    const Prologue& prologue = args_.prologue;
    const int64_t features = is_gated(prologue.activation) ? cols_ / 2 : cols_;
    TileArgs<Activated<T>> tile = common(Activated<T>{plain<T>(), prologue.probs, features, prologue.activation});
    without_groups(tile);
    tile.cols = features;
    tile.activated = prologue.forward;
    launch_materialize(tile, dispatch_.wide && features % 8 == 0, stream_);
  }

  // A source with a prologue: fused into the tiles, or materialized first.
  template <class S>
  void prepare(const S& source) {
    using T = typename S::Type;
    if constexpr (std::is_same_v<T, BF16>) {
      if (dispatch_.fused) return quantize(source);
    }
    if (!panels_) return quantize(plain<T>());
    TileArgs<S> tile = common(source);
    without_groups(tile);
    void* to = materialized();
    tile.activated = to;
    launch_materialize(tile, dispatch_.wide, stream_);
    const bool more = args_.rowwise.codes || args_.columnwise.codes || args_.amax || args_.dbias;
    if (more) quantize(Plain<T>{static_cast<const char*>(to), cols_});
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

  template <class S>
  void quantize(const S& source) {
    if constexpr (std::is_same_v<S, Plain<BF16>>) {
      if (dispatch_.turns && panels_) return quantize_in_turns(source);
    }
    if (dispatch_.row_alone) {
      if constexpr (std::is_same_v<S, Plain<typename S::Type>>) return quantize_rows_alone(source);
    }
    amaxes(source, nullptr);
    encode(source);
  }

  // The amax of a group does not depend on where its values stand.
  void quantize_interleaved(const Interleaved<BF16>& source) const {
    amaxes(source.array, nullptr);
    encode(source);
  }

  void quantize_in_turns(const Plain<BF16>& source) const {
    const bool by_rows = dispatch_.kind == Kind::rows;
    const auto out = [&](const Plane& plane) {
      return !plane.codes ? nullptr : dispatch_.kind == Kind::nvfp4 ? plane.global : static_cast<float*>(plane.scales);
    };
    TurnArgs<Plain<BF16>> turn{};
    turn.tile = planes_of(source);
    turn.turns.order = at<uint32_t>(space_.order);
    turn.turns.of_groups = by_rows ? nullptr : at<uint32_t>(space_.of_groups);
    turn.turns.of_panels = by_rows ? at<uint32_t>(space_.of_panels) : nullptr;
    turn.turns.of_columns = by_rows ? at<uint32_t>(space_.of_columns) : nullptr;
    turn.group = dispatch_.group_amax ? at<uint32_t>(space_.group) : nullptr;
    turn.rows = dispatch_.rows_amax ? at<uint32_t>(space_.rows) : nullptr;
    turn.columns = dispatch_.columns_amax ? at<uint32_t>(space_.columns) : nullptr;
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
    const SecondLevel* const rows = at<SecondLevel>(space_.row_levels);
    tile.col_levels = dispatch_.hadamard_amax ? at<SecondLevel>(space_.col_levels) : rows;
    // Kernels read the levels of rows whether rows are wanted or not, and then nobody has made them.
    tile.row_levels = dispatch_.group_amax ? rows : tile.col_levels;
    tile.options = options_of(args_.spec);
    return tile;
  }

  // Everything after the amax pass.
  template <class S>
  void encode(const S& source) const {
    scales_of_amaxes(args_, dispatch_, space_, stream_);
    if (!panels_) return;
    TileArgs<S> tile = planes_of(source);
    tile.poison_infinities = args_.spec.scaling == Scaling::delayed;
    tile.amax = dispatch_.group_amax ? nullptr : reinterpret_cast<uint32_t*>(args_.amax);
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
    const Choice choice{dispatch_.kind,    args_.spec.format,     args_.spec.square,
                        by_columns(args_), args_.spec.stochastic, args_.spec.hadamard && columns,
                        dispatch_.wide};
    const bool own_rows =
        dispatch_.kind == Kind::block || dispatch_.kind == Kind::mxfp8 || dispatch_.kind == Kind::rows;
    if (own_rows && !choice.columns && !choice.square && !args_.amax && dispatch_.wide) without_groups(tile);
    launch_tiles(tile, choice, stream_);
  }

  template <class T>
  void quantize_rows_alone(const Plain<T>& source) const {
    if (!args_.input.rows) return;
    RowArgs<Plain<T>> row{
        source,        args_.input.rows,       cols_,          args_.input.matrix_rows ? nullptr : args_.input.plan,
        args_.rowwise, options_of(args_.spec), args_.unchanged};
    launch_rows(row, args_.spec.format, dispatch_.wide, stream_);
  }

  // `to`: where the source is materialized, or null.
  template <class S>
  void amaxes(const S& source, void* to) const {
    if (!space_.cleared || !panels_) return;
    if constexpr (is_plain<S>) {
      if (dispatch_.array_amax) return array_amaxes(source);
    }
    const Amax what = dispatch_.kind == Kind::rows ? Amax::rows_and_columns
                      : dispatch_.hadamard_amax    ? Amax::hadamard
                                                   : Amax::group;
    AmaxArgs<S> amax{};
    amax.source = source;
    amax.tiles.groups = groups_;
    amax.tiles.most_ctas = most_ctas();
    amax.panels = panels_;
    amax.cols = cols_;
    amax.group = dispatch_.group_amax ? at<uint32_t>(space_.group) : nullptr;
    amax.hadamard = at<uint32_t>(space_.hadamard);
    amax.rows = dispatch_.rows_amax ? at<uint32_t>(space_.rows) : nullptr;
    amax.columns = dispatch_.columns_amax ? at<uint32_t>(space_.columns) : nullptr;
    amax.activated = to;
    amax.unchanged = args_.unchanged;
    launch_amax(amax, what, dispatch_.wide, stream_);
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
    launch_amax(amax, Amax::rows_and_columns, dispatch_.wide, stream_);
    gather_amaxes<<<static_cast<uint32_t>(panels_), PANEL_ROWS, 0, stream_>>>(
        rows, source.rows_at, groups_, at<uint32_t>(space_.group), args_.unchanged);
  }

  const QuantizeArgs& args_;
  const Dispatch& dispatch_;
  const Workspace& space_;
  cudaStream_t stream_;
  int64_t cols_;
  int64_t panels_;
  Groups groups_;
  bool materialized_ = false;
};

}  // namespace

Error launch_call(const QuantizeArgs& args, const Dispatch& dispatch, const Workspace& space, cudaStream_t stream) {
  return Call(args, dispatch, space, stream).run();
}

}  // namespace octavo::cuda
