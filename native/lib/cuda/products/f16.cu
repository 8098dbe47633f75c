#include "kernels.h"

namespace octavo::cuda {

GemmKernel f16_kernel(bool left_transposed, bool right_transposed) {
  constexpr Element E = Element::f16;
  if (left_transposed) return gemm_kernel_as<E, E, true, true, Promotion::none, 0>();
  if (right_transposed) return gemm_kernel_as<E, E, false, true, Promotion::none, 0>();
  return gemm_kernel_as<E, E, false, false, Promotion::none, 0>();
}

}  // namespace octavo::cuda
