#include "launches.cuh"

namespace octavo::cuda {

// The codes of all rows of a norm prologue, rowwise only, do not fit the registers that three CTAs leave.
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
