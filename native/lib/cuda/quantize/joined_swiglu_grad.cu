// Gradients of SwiGLU, plain or clamped, in block scaling where F is no multiple of a block.
//
//   reads   gate, up and dy twice, 12 B/feature (10 where up is not clamped), of which 6 are from device memory
//   writes  2 B/feature of each plane, and 4 B per 128 elements of it
//   bound   device memory, and the L2 cache
#include "launches.cuh"

namespace octavo::cuda {

void launch_tiles(const TileArgs<JoinedSwigluGrad<BF16>>& args, const Choice& choice, cudaStream_t stream) {
  choice.format == Format::e4m3 ? launch_kind<Kind::block, Format::e4m3, true>(args, choice, stream)
                                : launch_kind<Kind::block, Format::e5m2, true>(args, choice, stream);
}

}  // namespace octavo::cuda
