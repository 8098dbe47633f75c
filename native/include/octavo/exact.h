// Correctly rounded roots and quotients out of a processor's approximations, in ordinary ranges.
//
// These are the five operations after the approximation that nvcc itself makes of __fsqrt_rn and __fdiv_rn, without
// their check of the range and the subroutine behind it: the caller has checked many elements at once.
// native/tests/optimizers/test_exact.py goes through every root and every quotient that is near to the middle between
// two numbers, with each approximation that PTX allows.
#pragma once

#include <cmath>

#include "octavo/numerics.h"

namespace octavo {

OCTAVO_HD float fused(float a, float b, float c) {
#if defined(__CUDA_ARCH__)
  return __fmaf_rn(a, b, c);
#else
  return std::fma(a, b, c);
#endif
}

// Square roots of these bits and above are exact as below: 2^-101, so that the residual is no subnormal that is cut.
constexpr uint32_t LEAST_ROOTED = 0x0D000000u;

// fl(sqrt(x)); `inverse`: 1 / sqrt(x) with a relative error of at most 2^-22.9. x: from LEAST_ROOTED's on, finite.
OCTAVO_HD float root_from(float x, float inverse) {
  const float near = x * inverse, half = inverse * 0.5f;
  return fused(fused(-near, near, x), half, near);
}

// fl(a / b); `inverse`: 1 / b with an error of at most one ulp. |a| is from 2^-80 to 2^60, b from 2^-51 to 2^34.
OCTAVO_HD float quotient_from(float a, float b, float inverse) {
  const float exact = fused(inverse, fused(-b, inverse, 1.0f), inverse);
  const float near = a * exact;
  return fused(exact, fused(-b, near, a), near);
}

// AdamW's update, fl(first / fl(fl(fl(sqrt(second)) * root_scale) + eps)), of ordinary numbers. The functions
// approximate as above.
template <class InverseRoot, class Inverse>
OCTAVO_HD float exact_update(float first, float second, float root_scale, float eps, const InverseRoot& inverse_root,
                             const Inverse& inverse) {
  const float below = root_from(second, inverse_root(second)) * root_scale + eps;
  return quotient_from(first, below, inverse(below));
}

// The same without repairs: less than 12 * 2^-24 of itself away from the exact one.
template <class InverseRoot, class Inverse>
OCTAVO_HD float update_near(float first, float second, float root_scale, float eps, const InverseRoot& inverse_root,
                            const Inverse& inverse) {
  return first * inverse(fused(second * inverse_root(second), root_scale, eps));
}

// What a step size is changed by, so that the products with an update that is near are on both sides of the exact one.
constexpr float UPDATE_ERROR = 0x1p-20f;

}  // namespace octavo
