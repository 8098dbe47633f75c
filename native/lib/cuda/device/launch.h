// Launch helpers: errors, streams, grid sizes.
#pragma once

#include <cuda_runtime.h>

#include "octavo/types.h"

namespace octavo::cuda {

// What a call of the runtime returned.
inline Error failed(cudaError_t error) {
  return error == cudaSuccess ? Error{} : Error{ErrorCode::cuda, cudaGetErrorString(error)};
}

// Returns and clears the error of the last launch, if any, without waiting for the kernel.
inline Error launched() { return failed(cudaGetLastError()); }

inline cudaStream_t stream_of(void* stream) { return static_cast<cudaStream_t>(stream); }

constexpr int64_t MAX_GRID_Y = 65535;

// Blocks for a grid-stride loop, where one block per unit could exceed the largest grid.
inline unsigned grid_for(int64_t units, int64_t most = 1 << 20) {
  return static_cast<unsigned>(units < 1 ? 1 : units < most ? units : most);
}

}  // namespace octavo::cuda
