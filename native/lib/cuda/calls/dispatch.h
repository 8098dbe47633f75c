// Which kernels serve a call of a quantizer.
#pragma once

#include "cuda/scaling/scales.cuh"
#include "octavo/quantize.h"

namespace octavo::cuda {

// Which kernels serve a call, and what they need to know of it before there are arrays in the workspace.
struct Dispatch {
  Kind kind;
  bool wide;  // every array is aligned for 16-byte loads, and for stores of eight neighbours

  // A prologue is computed by the quantizer's tiles (fused), or its values are materialized first, to args.activated or
  // the workspace; `measured`: by the amax pass over rows and columns, else by a kernel of their own.
  bool fused, materialize, measured;
  bool values_alone;        // SwiGLU or its gradient without codes: activations/swiglu_values.cu
  bool swiglu_grad;         // the gradient's source is SwigluGrad
  bool joined_swiglu_grad;  // or JoinedSwigluGrad

  // Amaxes of a pass before the codes: of groups, of their Hadamard transforms, of rows, of columns of groups.
  bool group_amax, hadamard_amax, rows_amax, columns_amax;
  bool array_amax;  // groups' from those of the array's rows, each of which an index may name several times
  bool row_alone;   // row scaling of rowwise data alone: quantize_row, which needs no such pass
  bool may_turn;    // both passes in one launch (cuda/turns): whether the call's sizes allow it,
  bool turns;       // and whether its arrays do, too

  // Whether tiles sum products with dy on their way, for dprobs.
  bool sums_products() const { return swiglu_grad || joined_swiglu_grad; }
};

Dispatch dispatch_of(const QuantizeArgs& args);

// What Swiglu, SwigluGrad and JoinedSwigluGrad serve.
bool is_swiglu(Activation activation);

// Whether the call has kernels that stay on their multiprocessors until its end (`is_persistent`), so that
// QuantizeArgs::ctas can limit them.
bool has_persistent_kernels(const QuantizeArgs& args, const Dispatch& dispatch);

// Whether kernels read interleaved halves where they stand (Interleaved in tile/arrays.cuh).
bool serves_interleaved(const QuantizeArgs& args, const Dispatch& dispatch);

// Whether the kernels of cuda/units serve a call of NVFP4 with columnwise data in panels: what `served_in_units` sees
// of the kernels' arguments, and what launches decide before.
bool in_units(const QuantizeArgs& args, const Dispatch& dispatch);

}  // namespace octavo::cuda
