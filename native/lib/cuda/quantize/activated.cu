#include "launches.cuh"

namespace octavo::cuda {
template void launch_tiles(const TileArgs<Activated<BF16>>&, const Choice&, cudaStream_t);
template void launch_amax(const AmaxArgs<Activated<BF16>>&, Amax, bool, cudaStream_t);
template void launch_materialize(const TileArgs<Activated<BF16>>&, bool, cudaStream_t);
template void launch_materialize(const TileArgs<Activated<F16>>&, bool, cudaStream_t);
template void launch_materialize(const TileArgs<Activated<F32>>&, bool, cudaStream_t);
}  // namespace octavo::cuda
