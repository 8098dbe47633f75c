// The passes over one source of a quantizer: an amax pass, if there are scales that cover more than a tile, then the
// codes; or both in turns, or rows alone, in one launch.
#pragma once

#include "amax_scales.h"
#include "cuda/quantize/launches.h"
#include "cuda/reductions/array_amax.cuh"
#include "cuda/turns/launches.h"

namespace octavo::cuda {

class Passes {
 public:
  Passes(const QuantizeArgs& args, const Dispatch& dispatch, const Workspace& space, cudaStream_t stream)
      : args_(args), dispatch_(dispatch), space_(space), stream_(stream), cols_(output_cols(args)) {
    const Input& input = args.input;
    panels_ = cols_ ? panel_bound(input.rows, input.groups, input.matrix_rows) : 0;
    const PlanView plan{input.plan, input.rows, input.groups};
    groups_ = {input.matrix_rows ? nullptr : plan.panels(), input.matrix_rows, nullptr};
  }

  // No panels: x has no elements, and no kernel reads it.
  bool empty() const { return panels_ == 0; }

  // Amaxes, if there are scales that need them, then codes.
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
    const Choice choice{.kind = dispatch_.kind,
                        .format = args_.spec.format,
                        .square = args_.spec.square,
                        .columns = columns || args_.dbias,  // both need tiles that span whole panels
                        .stochastic = args_.spec.stochastic,
                        .hadamard = args_.spec.hadamard && columns,
                        .wide = dispatch_.wide};
    const bool own_rows =
        dispatch_.kind == Kind::block || dispatch_.kind == Kind::mxfp8 || dispatch_.kind == Kind::rows;
    if (own_rows && !choice.columns && !choice.square && !args_.amax && dispatch_.wide) without_groups(tile);
    launch_tiles(tile, choice, stream_);
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
    amax.tiles.most_ctas = static_cast<uint32_t>(args_.ctas);
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

  // Where the prologue's values go; `encode` then has nothing to store there.
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
    tile.tiles.most_ctas = static_cast<uint32_t>(args_.ctas);
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

 private:
  template <class T>
  T* at(size_t offset) const {
    return workspace_at<T>(args_, offset);
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

  template <class T>
  void quantize_rows_alone(const Plain<T>& source) const {
    if (!args_.input.rows) return;
    const Input& input = args_.input;
    const RowArgs<Plain<T>> row{.source = source,
                                .rows = input.rows,
                                .cols = cols_,
                                .rows_in_use = input.matrix_rows ? nullptr : input.plan,
                                .rowwise = args_.rowwise,
                                .options = options_of(args_.spec),
                                .unchanged = args_.unchanged};
    launch_rows(row, args_.spec.format, dispatch_.wide, stream_);
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

}  // namespace octavo::cuda
