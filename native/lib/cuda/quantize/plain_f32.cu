#include "launches.cuh"

namespace octavo::cuda {
template void launch_tiles(const TileArgs<Plain<F32>>&, const Choice&, cudaStream_t);
template void launch_amax(const AmaxArgs<Plain<F32>>&, Amax, bool, cudaStream_t);
template void launch_rows(const RowArgs<Plain<F32>>&, Format, bool, cudaStream_t);
}  // namespace octavo::cuda
