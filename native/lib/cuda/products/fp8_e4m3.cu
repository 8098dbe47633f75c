#include "kernels.h"

namespace octavo::cuda {

GemmKernel fp8_e4m3_kernel(Promotion promotion, int tile) {
  return fp8_kernel_of<Element::e4m3, Element::e4m3>(promotion, tile);
}

}  // namespace octavo::cuda
