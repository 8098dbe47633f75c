// Products of codes of tokens' rows, which fprop and dgrad have on the left.
#include "kernels.h"

namespace octavo::cuda {

GemmKernel gathered_codes_kernel(int tile) {
  return gemm_kernel_of<Element::e4m3, Element::e4m3, false, false, Promotion::square, Gathered::left>(tile);
}

}  // namespace octavo::cuda
