// Divisions whose divisor the host knows.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace octavo::cuda {

// Division by a divisor known on the host, for dividends below 2^31: multiplication by the reciprocal, rounded up.
//
// `shift` is the least with 2^shift >= 2^31 divisor, so the multiplier, ceil(2^shift / divisor), is below 2^32. What
// rounding adds to it, less than 1, adds less than dividend / 2^shift < 1 / divisor to the quotient, and never carries
// it to the next integer.
struct Divisor {
  uint32_t multiplier, shift;

  static Divisor of(uint32_t divisor) {
    uint32_t shift = 31;
    while (uint64_t{divisor} << 31 > uint64_t{1} << shift) ++shift;
    return {static_cast<uint32_t>(((uint64_t{1} << shift) + divisor - 1) / divisor), shift};
  }
  __device__ uint32_t quotient(uint32_t dividend) const {
    return static_cast<uint32_t>(uint64_t{dividend} * multiplier >> shift);
  }
};

}  // namespace octavo::cuda
