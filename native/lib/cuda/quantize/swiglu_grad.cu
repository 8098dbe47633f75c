#include "launches.cuh"

namespace octavo::cuda {
template void launch_tiles(const TileArgs<SwigluGrad<BF16>>&, const Choice&, cudaStream_t);
template void launch_amax(const AmaxArgs<SwigluGrad<BF16>>&, Amax, bool, cudaStream_t);
}  // namespace octavo::cuda
