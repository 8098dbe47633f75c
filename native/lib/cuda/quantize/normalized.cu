#include "launches.cuh"

namespace octavo::cuda {

// A normalization's codes of all rows at once, where rows alone are wanted, do not fit what three CTAs leave.
template <>
constexpr int heavy<Normalized<BF16>, Kind::known, false, false, false>() {
  return 1;
}

template void launch_tiles(const TileArgs<Normalized<BF16>>&, const Choice&, cudaStream_t);
template void launch_amax(const AmaxArgs<Normalized<BF16>>&, Amax, bool, cudaStream_t);
template void launch_materialize(const TileArgs<Normalized<BF16>>&, bool, cudaStream_t);
template void launch_materialize(const TileArgs<Normalized<F16>>&, bool, cudaStream_t);
template void launch_materialize(const TileArgs<Normalized<F32>>&, bool, cudaStream_t);
}  // namespace octavo::cuda
