// E2M1 codes of scaled values by additions and a minimum: what the CUDA quantizers do in place of numerics.h's steps.
// native/tests/quantize/e2m1.cpp compares all magnitudes.
#pragma once

#include "octavo/exact.h"

namespace octavo {

// Clamped to [0, 1]; NaN becomes 0. The device does it in the operation that makes `value`.
OCTAVO_HD float saturated(float value) {
#if defined(__CUDA_ARCH__)
  return __saturatef(value);
#else
  return value >= 1.0f ? 1.0f : value > 0.0f ? value : 0.0f;
#endif
}

OCTAVO_HD int32_t least(int32_t a, int32_t b, int32_t c) {
#if defined(__CUDA_ARCH__)
  return __vimin3_s32(a, b, c);
#else
  const int32_t two = a < b ? a : b;
  return two < c ? two : c;
#endif
}

// The bits of 2^23, whose ulp is 1, plus OFFSET, an even number, plus the code of a magnitude v, which is not negative
// or NaN. A code is where v stands on a scale that is linear in pieces: 2 v up to 2, v + 2 up to 4, v / 2 + 4 up to 6,
// and 7 from there on. The scale is concave, so the place is the least of the pieces'; each is rounded to nearest even
// once, which keeps that order, and ties between values are ties between places. NaN has the largest code, 7.
template <int OFFSET>
OCTAVO_HD uint32_t e2m1_place(float magnitude) {
  static_assert(OFFSET % 2 == 0, "the code's parity would not be the sum's");
  constexpr float zero = 8388608.0f + OFFSET;
  const float below_two = fused(magnitude, 2.0f, zero), below_four = magnitude + (zero + 2.0f);
  // an eighth of the way from the place to 7, exact from 2 on
  const float left = saturated(fused(magnitude, -0.0625f, 0.375f));
  const float below_six = fused(left, -8.0f, zero + 7.0f);
  return static_cast<uint32_t>(least(static_cast<int32_t>(bits_of(below_two)),
                                     static_cast<int32_t>(bits_of(below_four)),
                                     static_cast<int32_t>(bits_of(below_six))));
}

// Codes of eight magnitudes, the first in the low bits. Modulo 2^32 the parts above the codes add up to 0. `sixteen` is
// 16: where the compiler does not know that, it multiplies and adds in one operation, and not where it would shift.
template <class MagnitudeOf>
OCTAVO_HD uint32_t e2m1_codes(const MagnitudeOf& magnitude_of, uint32_t sixteen = 16u) {
  uint32_t codes = e2m1_place<0>(magnitude_of(7));
  codes = codes * sixteen + e2m1_place<0>(magnitude_of(6));
  codes = codes * sixteen + e2m1_place<80>(magnitude_of(5));
  codes = codes * sixteen + e2m1_place<0>(magnitude_of(4));
  codes = codes * sixteen + e2m1_place<0>(magnitude_of(3));
  codes = codes * sixteen + e2m1_place<0>(magnitude_of(2));
  codes = codes * sixteen + e2m1_place<0>(magnitude_of(1));
  return codes * sixteen + e2m1_place<0>(magnitude_of(0));
}

}  // namespace octavo
