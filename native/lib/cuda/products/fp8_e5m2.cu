#include "kernels.h"

namespace octavo::cuda {

GemmKernel fp8_e5m2_kernel(Promotion promotion, int tile) {
  return fp8_kernel_of<Element::e5m2, Element::e4m3>(promotion, tile);
}

}  // namespace octavo::cuda
