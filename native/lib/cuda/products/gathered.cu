// bf16 products of tokens' rows: fprop and dgrad have them on the left, wgrad on either side.
#include "kernels.h"

namespace octavo::cuda {

GemmKernel gathered_kernel(bool left_transposed, bool right_transposed, Gathered gathered, int tile) {
  constexpr Element E = Element::bf16;
  constexpr Promotion P = Promotion::none;
  if (gathered == Gathered::right) return gemm_kernel_of<E, E, true, true, P, Gathered::right>(tile);
  if (left_transposed) return gemm_kernel_of<E, E, true, true, P, Gathered::left>(tile);
  if (right_transposed) return gemm_kernel_of<E, E, false, true, P, Gathered::left>(tile);
  return gemm_kernel_of<E, E, false, false, P, Gathered::left>(tile);
}

}  // namespace octavo::cuda
