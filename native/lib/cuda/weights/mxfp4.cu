// MXFP4 to E4M3 codes in square blocks of 128, with the scales that its values have: from a file's bytes, and from
// weights that are rounded to its values in registers.
//
//   reads   0.5 B/element and a byte per 32 elements; weights 2 B/element of bf16, 4 of fp32
//   writes  1 B/element of each plane, and 4 B per 16384 elements
//   bound   device memory
#include "cuda/quantize/launches.cuh"

namespace octavo::cuda {

void launch_tiles(const TileArgs<Packed>& args, const Choice& choice, cudaStream_t stream) {
  with_bool(choice.columns,
            [&](auto columns) { launch_one_square<Kind::block, Format::e4m3, columns(), false, true>(args, stream); });
}

template <class T>
void launch_tiles(const TileArgs<Rounded<T>>& args, const Choice& choice, cudaStream_t stream) {
  with_bool(choice.wide, [&](auto wide) { launch_square<Kind::block, Format::e4m3, wide()>(args, choice, stream); });
}

template <class T>
void launch_tiles(const TileArgs<RoundedColumns<T>>& args, const Choice& choice, cudaStream_t stream) {
  with_bool(choice.wide, [&](auto wide) { launch_square<Kind::block, Format::e4m3, wide()>(args, choice, stream); });
}

template void launch_tiles(const TileArgs<Rounded<BF16>>&, const Choice&, cudaStream_t);
template void launch_tiles(const TileArgs<Rounded<F32>>&, const Choice&, cudaStream_t);
template void launch_tiles(const TileArgs<RoundedColumns<BF16>>&, const Choice&, cudaStream_t);
template void launch_tiles(const TileArgs<RoundedColumns<F32>>&, const Choice&, cudaStream_t);

}  // namespace octavo::cuda
