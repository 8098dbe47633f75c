#include "kernels.h"

namespace octavo::cuda {

GemmKernel bf16_kernel(bool left_transposed, bool right_transposed, int tile) {
  constexpr Element E = Element::bf16;
  if (left_transposed) return gemm_kernel_of<E, E, true, true, Promotion::none>(tile);
  if (right_transposed) return gemm_kernel_of<E, E, false, true, Promotion::none>(tile);
  return gemm_kernel_of<E, E, false, false, Promotion::none>(tile);
}

}  // namespace octavo::cuda
