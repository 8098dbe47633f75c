// E5M2 right operands: recipes with E5M2 weights or activations. Only the largest tile is compiled.
#include "kernels.h"

namespace octavo::cuda {

namespace {

template <Element L>
GemmKernel kernel_of(Promotion promotion) {
  constexpr Element R = Element::e5m2;
  switch (promotion) {
    case Promotion::none: return gemm_kernel_as<L, R, false, false, Promotion::none, 0>();
    case Promotion::plain: return gemm_kernel_as<L, R, false, false, Promotion::plain, 0>();
    case Promotion::square: return gemm_kernel_as<L, R, false, false, Promotion::square, 0>();
    default: return gemm_kernel_as<L, R, false, false, Promotion::vectors, 0>();
  }
}

}  // namespace

GemmKernel fp8_rare_kernel(Element left, Promotion promotion) {
  return left == Element::e4m3 ? kernel_of<Element::e4m3>(promotion) : kernel_of<Element::e5m2>(promotion);
}

}  // namespace octavo::cuda
