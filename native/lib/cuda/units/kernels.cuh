// NVFP4 quantizers of 16-bit values without a prologue: a tile of 128 x 128 to both planes, in the layouts that GEMMs
// read. Calls with other inputs or outputs are left to the kernels of cuda/quantize, with the same bits.
//
//   reads   2 B/element
//   writes  0.5 B/element of each plane, and 1 B per 16 elements; square blocks 1 B per 256; values 2 B/element
//   bound   device memory (weights), arithmetic (activations and gradients): docs/decisions/0059
#pragma once

#include "amax.cuh"
#include "both_planes.cuh"
#include "square.cuh"

namespace octavo::cuda {

template <class S>
constexpr bool has_units = is_plain<S> && Pack<typename S::Type>::bytes == 2;

// True if the kernels of units serve a call whose loads are wide.
template <class S>
bool served_in_units(const TileArgs<S>& args) {
  const Plane &rows = args.rowwise, &columns = args.columnwise;
  return columns.codes && columns.layout != Layout::plain && (!rows.codes || rows.layout != Layout::plain) &&
         !args.dequantized && !args.activated && !args.partial_sums && !args.amax;
}

}  // namespace octavo::cuda
