// A call of a quantizer, launch by launch: amaxes are cleared, the values of the prologue, or of the input where there
// is none, go through their passes, and what is asked for besides follows: sums of columns, an activation's values, the
// gradients of probabilities.
#include "call.h"

#include "cuda/activations/swiglu_values.h"
#include "cuda/device/launch.h"
#include "cuda/reductions/dbias.h"
#include "cuda/reductions/dprobs.h"
#include "cuda/reductions/norm.h"
#include "passes.cuh"

namespace octavo::cuda {
namespace {

class Call {
 public:
  Call(const QuantizeArgs& args, const Dispatch& dispatch, const Workspace& space, cudaStream_t stream)
      : args_(args),
        dispatch_(dispatch),
        space_(space),
        stream_(stream),
        cols_(output_cols(args)),
        features_(is_gated(args.prologue.activation) ? cols_ / 2 : cols_),
        passes_(args, dispatch, space, stream) {}

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
              sum_panels(at<float>(space_.partial_sums), args_.dbias, args_.input, cols_, args_.unchanged, stream_))
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
    return workspace_at<T>(args_, offset);
  }

  float* mean() const {
    if (args_.prologue.norm != Norm::layer) return nullptr;
    return args_.prologue.mean ? args_.prologue.mean : at<float>(space_.mean);
  }
  float* rstd() const { return args_.prologue.rstd ? args_.prologue.rstd : at<float>(space_.rstd); }

  Error statistics() const {
    if (args_.prologue.kind != PrologueKind::norm) return {};
    const NormStatistics to = {mean(), mean() ? at<float>(space_.rest) : nullptr, rstd()};
    return norm_statistics(args_.input, args_.prologue, to, args_.unchanged, stream_);
  }

  template <class T>
  Plain<T> plain() const {
    return {static_cast<const char*>(args_.input.data), args_.input.row_stride, RowsAt::of(args_.input.index)};
  }

  Error probabilities() const {
    if (dispatch_.sums_products())
      return sum_chunks(at<float>(space_.products), product_chunks(args_), args_.input, args_.prologue.dprobs,
                        args_.unchanged, stream_);
    return sum_products(args_.input, args_.prologue, features_, dispatch_.wide, args_.prologue.dprobs, args_.unchanged,
                        stream_);
  }

  template <class T>
  void by_source() {
    if (args_.input.mxfp4_scales)
      return passes_.encode(
          Packed{static_cast<const uint8_t*>(args_.input.data), args_.input.mxfp4_scales, args_.input.cols});
    if constexpr (std::is_same_v<T, BF16>) {
      if (args_.input.is_interleaved())
        return passes_.quantize_interleaved(Interleaved<T>::of(plain<T>(), args_.input));
    }
    if constexpr (!std::is_same_v<T, F16>) {
      if (args_.spec.mxfp4 == Direction::columnwise) return passes_.encode(RoundedColumns<T>{plain<T>()});
      if (args_.spec.mxfp4) return passes_.encode(Rounded<T>{plain<T>()});
    }
    switch (args_.prologue.kind) {
      case PrologueKind::none: return passes_.quantize(plain<T>());
      case PrologueKind::activation: return activation<T>();
      case PrologueKind::activation_grad: return activation_grad<T>();
      case PrologueKind::norm: return norm<T>();
    }
  }

  template <class T>
  void activation() {
    const Prologue& prologue = args_.prologue;
    if constexpr (std::is_same_v<T, BF16>) {
      const Swiglu<T> source{plain<T>(), prologue.probs, cols_, is_clamped()};
      if (dispatch_.values_alone) return values_alone(source);
      if (dispatch_.fused && is_swiglu(prologue.activation)) return passes_.quantize(source);
      if (dispatch_.measured) return measure(source);
    }
    prepare(Activated<T>{plain<T>(), prologue.probs, cols_, prologue.activation});
  }

  template <class T>
  void activation_grad() {
    const Prologue& prologue = args_.prologue;
    const Plain<T> dy{static_cast<const char*>(prologue.dy), prologue.dy_stride};
    if constexpr (std::is_same_v<T, BF16>) {
      SwigluGrad<T> source{plain<T>(), dy, prologue.probs, cols_ / 2, is_clamped(), nullptr, args_.input.rows};
      if (dispatch_.values_alone) {
        if (dispatch_.sums_products()) source.products = passes_.products();
        return values_alone(source);
      }
      if (dispatch_.sums_products()) {
        if (dispatch_.measured) return measure(source);
        if (dispatch_.joined_swiglu_grad) return passes_.encode(JoinedSwigluGrad<T>{source});
        return passes_.quantize(source);
      }
    }
    prepare(ActivationGrad<T>{plain<T>(), dy, prologue.probs, features_, prologue.activation});
  }

  template <class T>
  void norm() {
    const Prologue& prologue = args_.prologue;
    prepare(Normalized<T>{plain<T>(), prologue.gamma, prologue.beta, mean(), at<float>(space_.rest), rstd()});
  }

  bool is_clamped() const { return args_.prologue.activation == Activation::clamped_swiglu; }

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
    if (passes_.empty()) return;
    const Prologue& prologue = args_.prologue;
    TileArgs<Activated<T>> tile =
        passes_.common(Activated<T>{plain<T>(), prologue.probs, features_, prologue.activation});
    passes_.without_groups(tile);
    tile.cols = features_;
    tile.activated = prologue.forward;
    launch_materialize(tile, dispatch_.wide && features_ % 8 == 0, stream_);
  }

  // A source with a prologue: fused into the tiles, or materialized first.
  template <class S>
  void prepare(const S& source) {
    using T = typename S::Type;
    if constexpr (std::is_same_v<T, BF16>) {
      if (dispatch_.fused) return passes_.quantize(source);
    }
    if (passes_.empty()) return passes_.quantize(plain<T>());
    TileArgs<S> tile = passes_.common(source);
    passes_.without_groups(tile);
    void* to = passes_.materialized();
    tile.activated = to;
    launch_materialize(tile, dispatch_.wide, stream_);
    const bool more = args_.rowwise.codes || args_.columnwise.codes || args_.amax || args_.dbias;
    if (more) passes_.quantize(Plain<T>{static_cast<const char*>(to), cols_});
  }

  // Materializes the source in the amax pass.
  template <class S>
  void measure(S source) {
    using T = typename S::Type;
    if (passes_.empty()) return passes_.quantize(plain<T>());
    if constexpr (makes_halves<S>) source.products = passes_.products();
    void* to = passes_.materialized();
    passes_.amaxes(source, to);
    passes_.encode(Plain<T>{static_cast<const char*>(to), cols_});
  }

  const QuantizeArgs& args_;
  const Dispatch& dispatch_;
  const Workspace& space_;
  cudaStream_t stream_;
  int64_t cols_;
  int64_t features_;  // of an activation: columns of its result
  Passes passes_;
};

}  // namespace

Error launch_call(const QuantizeArgs& args, const Dispatch& dispatch, const Workspace& space, cudaStream_t stream) {
  return Call(args, dispatch, space, stream).run();
}

}  // namespace octavo::cuda
