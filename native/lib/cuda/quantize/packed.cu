// MXFP4 to E4M3 codes in square blocks of 128, with the scales that its values have.
//
//   reads   0.5 B/element and a byte per 32 elements
//   writes  1 B/element of each plane, and 4 B per 16384 elements
//   bound   device memory
#include "launches.cuh"

namespace octavo::cuda {

void launch_tiles(const TileArgs<Packed>& args, const Choice& choice, cudaStream_t stream) {
  with_bool(choice.columns,
            [&](auto columns) { launch_one_square<Kind::block, Format::e4m3, columns(), false, true>(args, stream); });
}

}  // namespace octavo::cuda
