// The launches of a call of a quantizer.
#pragma once

#include <cuda_runtime.h>

#include "workspace.h"

namespace octavo::cuda {

// The kernels that the call needs, in order.
Error launch_call(const QuantizeArgs& args, const Dispatch& dispatch, const Workspace& space, cudaStream_t stream);

}  // namespace octavo::cuda
