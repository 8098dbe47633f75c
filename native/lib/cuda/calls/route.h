// Which kernels serve a call of a quantizer.
#pragma once

#include "cuda/scaling/scales.cuh"
#include "octavo/quantize.h"

namespace octavo::cuda {

// How a call is served. `fused` sources are quantized tile by tile; others are materialized first, `measured` ones in
// the amax pass over rows and columns.
struct Route {
  Kind kind;
  bool wide, fused, materialize, measured;
  bool values;     // SwiGLU or its gradient, of which nobody reads codes
  bool halves;     // SwigluGrad serves it
  bool joined;     // JoinedSwigluGrad
  bool row_alone;  // row scaling of rowwise data only, without a column pass
  bool group_amax, hadamard_amax, rows_amax, columns_amax;
  bool array_amax;       // groups' amaxes from those of the array's rows, which an index repeats
  bool may_turn, turns;  // both passes in one launch: possible with some arrays, and with these

  // Whether tiles sum products with dy on their way.
  bool sums_products() const { return halves || joined; }
};

Route route_of(const QuantizeArgs& args);

// What Swiglu, SwigluGrad and JoinedSwigluGrad serve.
bool is_swiglu(Activation activation);

// Whether kernels stay on their multiprocessors for the whole call: those of sources that compute (`is_persistent`).
bool stays(const QuantizeArgs& args, const Route& route);

// Whether halves that take turns are quantized where they stand (sources.cuh has the axes).
bool serves_interleaved(const QuantizeArgs& args, const Route& route);

// Whether the kernels of cuda/units serve a call of NVFP4 that asks for column panels.
bool in_units(const QuantizeArgs& args, const Route& route);

}  // namespace octavo::cuda
