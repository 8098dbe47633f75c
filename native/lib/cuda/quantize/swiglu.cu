#include "launches.cuh"

namespace octavo::cuda {
template void launch_tiles(const TileArgs<Swiglu<BF16>>&, const Choice&, cudaStream_t);
template void launch_amax(const AmaxArgs<Swiglu<BF16>>&, Amax, bool, cudaStream_t);
}  // namespace octavo::cuda
