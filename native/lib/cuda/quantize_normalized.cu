#include "launches.cuh"

namespace octavo::cuda {
template void launch_tiles(const TileArgs<Normalized<BF16>>&, const Choice&, cudaStream_t);
template void launch_amax(const AmaxArgs<Normalized<BF16>>&, Amax, bool, cudaStream_t);
template void launch_materialize(const TileArgs<Normalized<BF16>>&, bool, cudaStream_t);
template void launch_materialize(const TileArgs<Normalized<F16>>&, bool, cudaStream_t);
template void launch_materialize(const TileArgs<Normalized<F32>>&, bool, cudaStream_t);
}  // namespace octavo::cuda
