// Weights whose gate and up columns, or rows, take turns, to the codes of the two halves.
//
//   reads   2 B/element, of columns in turns twice, the second time from the L2 cache
//   writes  1 B/element of each plane
//   bound   device memory
#include "cuda/quantize/launches.cuh"

namespace octavo::cuda {
namespace {

template <Format F>
void launch_format(const TileArgs<Interleaved<BF16>>& args, const Choice& choice, cudaStream_t stream) {
  choice.square ? launch_square<Kind::block, F, true>(args, choice, stream)
                : launch_kind<Kind::known, F, true>(args, choice, stream);
}

}  // namespace

void launch_tiles(const TileArgs<Interleaved<BF16>>& args, const Choice& choice, cudaStream_t stream) {
  choice.format == Format::e4m3 ? launch_format<Format::e4m3>(args, choice, stream)
                                : launch_format<Format::e5m2>(args, choice, stream);
}

}  // namespace octavo::cuda
