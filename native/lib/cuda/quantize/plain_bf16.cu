#include "launches.cuh"

namespace octavo::cuda {
template void launch_tiles(const TileArgs<Plain<BF16>>&, const Choice&, cudaStream_t);
template void launch_amax(const AmaxArgs<Plain<BF16>>&, Amax, bool, cudaStream_t);
template void launch_rows(const RowArgs<Plain<BF16>>&, Format, bool, cudaStream_t);
}  // namespace octavo::cuda
