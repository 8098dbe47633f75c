// Launches of the quantize kernels. Those of each source are compiled in a file of their own.
#pragma once

#include <cuda_runtime.h>

#include "amax_kernel.cuh"
#include "cuda/tile/sources.cuh"
#include "row_kernel.cuh"
#include "tile_kernel.cuh"

namespace octavo::cuda {

// The template arguments of a kernel, at run time.
struct Choice {
  Kind kind;
  Format format;
  bool square;
  bool columns;
  bool stochastic;
  bool hadamard;
  bool wide;
};

// Plain sources have every kernel. The other sources have only those with 16-byte loads, and none for square blocks or
// row scaling: for these the source is materialized first, with the same bits. SwiGLU and its gradient have the amax
// pass over rows and columns, which can materialize on the way.
template <class S>
void launch_tiles(const TileArgs<S>& args, const Choice& choice, cudaStream_t stream);

// Square blocks of E4M3 alone.
void launch_tiles(const TileArgs<Packed>& args, const Choice& choice, cudaStream_t stream);

// Likewise, of bf16 and fp32.
template <class T>
void launch_tiles(const TileArgs<Rounded<T>>& args, const Choice& choice, cudaStream_t stream);
template <class T>
void launch_tiles(const TileArgs<RoundedColumns<T>>& args, const Choice& choice, cudaStream_t stream);

// In block scaling alone.
void launch_tiles(const TileArgs<JoinedSwigluGrad<BF16>>& args, const Choice& choice, cudaStream_t stream);

// Scales of groups, and square blocks of 128, with wide loads.
void launch_tiles(const TileArgs<Interleaved<BF16>>& args, const Choice& choice, cudaStream_t stream);

template <class S>
void launch_amax(const AmaxArgs<S>& args, Amax what, bool wide, cudaStream_t stream);

// The source's values, rounded, to args.activated.
template <class S>
void launch_materialize(const TileArgs<S>& args, bool wide, cudaStream_t stream);

template <class S>
void launch_rows(const RowArgs<S>& args, Format format, bool wide, cudaStream_t stream);

}  // namespace octavo::cuda
