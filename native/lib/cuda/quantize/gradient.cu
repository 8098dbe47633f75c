#include "launches.cuh"

namespace octavo::cuda {
template void launch_tiles(const TileArgs<ActivationGrad<BF16>>&, const Choice&, cudaStream_t);
template void launch_amax(const AmaxArgs<ActivationGrad<BF16>>&, Amax, bool, cudaStream_t);
template void launch_materialize(const TileArgs<ActivationGrad<BF16>>&, bool, cudaStream_t);
template void launch_materialize(const TileArgs<ActivationGrad<F16>>&, bool, cudaStream_t);
template void launch_materialize(const TileArgs<ActivationGrad<F32>>&, bool, cudaStream_t);
}  // namespace octavo::cuda
