// What the entry point asks of the kernels; each source's launches are compiled in a file of their own.
#pragma once

#include <cuda_runtime.h>

#include "amax_kernel.cuh"
#include "cuda/tile/sources.cuh"
#include "row_kernel.cuh"
#include "tile_kernel.cuh"

namespace octavo::cuda {

// A kernel by its template arguments.
struct Choice {
  Kind kind;
  Format format;
  bool square;
  bool columns;
  bool stochastic;
  bool hadamard;
  bool wide;
};

// Plain sources have every kernel. The others have those of 16-byte loads, and no square or per-row tiles: what they
// lack is served by materializing the source first, with the same bits. SwiGLU and its gradient have the pass for the
// amaxes of rows and columns, which can do that.
template <class S>
void launch_tiles(const TileArgs<S>& args, const Choice& choice, cudaStream_t stream);

template <class S>
void launch_amax(const AmaxArgs<S>& args, Amax what, bool wide, cudaStream_t stream);

// The source's values, rounded, to args.activated.
template <class S>
void launch_materialize(const TileArgs<S>& args, bool wide, cudaStream_t stream);

template <class S>
void launch_rows(const RowArgs<S>& args, Format format, bool wide, cudaStream_t stream);

}  // namespace octavo::cuda
