// Bytes across four words.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace octavo::cuda {

// A 4 x 4 transposition: a then holds byte 0 of each of the four words, b byte 1, and so on.
__device__ __forceinline__ void transpose_bytes(uint32_t& a, uint32_t& b, uint32_t& c, uint32_t& d) {
  const uint32_t low_ab = __byte_perm(a, b, 0x5140), low_cd = __byte_perm(c, d, 0x5140);
  const uint32_t high_ab = __byte_perm(a, b, 0x7362), high_cd = __byte_perm(c, d, 0x7362);
  a = __byte_perm(low_ab, low_cd, 0x5410), b = __byte_perm(low_ab, low_cd, 0x7632);
  c = __byte_perm(high_ab, high_cd, 0x5410), d = __byte_perm(high_ab, high_cd, 0x7632);
}

}  // namespace octavo::cuda
