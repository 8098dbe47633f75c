// Amaxes that cover more than a tile: cleared before the passes that raise them, and turned into scales.
#pragma once

#include <cuda_runtime.h>

#include "workspace.h"

namespace octavo::cuda {

inline ScaleOptions options_of(const QuantizerSpec& spec) { return {spec.amax_epsilon, spec.power_of_two}; }

void clear_amaxes(const QuantizeArgs& args, const Dispatch& dispatch, const Workspace& space, cudaStream_t stream);

// Scales of whole groups, rows and columns, including those of groups without rows.
void scales_of_amaxes(const QuantizeArgs& args, const Dispatch& dispatch, const Workspace& space, cudaStream_t stream);

}  // namespace octavo::cuda
