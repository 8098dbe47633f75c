#include "launches.cuh"

namespace octavo::cuda {

// fp16's codes of all rows at once do not fit what three CTAs leave.
template <>
constexpr int heavy<Plain<F16>, Kind::known, true, false, false>() {
  return 1;
}

template void launch_tiles(const TileArgs<Plain<F16>>&, const Choice&, cudaStream_t);
template void launch_amax(const AmaxArgs<Plain<F16>>&, Amax, bool, cudaStream_t);
template void launch_rows(const RowArgs<Plain<F16>>&, Format, bool, cudaStream_t);
}  // namespace octavo::cuda
