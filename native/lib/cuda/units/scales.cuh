// NVFP4's scales without a division per block: those of every decode code of a group are made once per tile.
#pragma once

#include "unit.cuh"

namespace octavo::cuda {

// The encode scale of a block with this decode code, in a group with this factor.
__device__ __forceinline__ float encode_scale_of(uint32_t code, float factor) {
  const float scale = __frcp_rn(e4m3_value(static_cast<uint8_t>(code)) * factor);
  return scale > FLOAT_MAX ? FLOAT_MAX : scale;
}

// Decode codes, each of which has its encode scale in a table: blocks look theirs up.
constexpr int SCALE_CODES = 128;
static_assert(UNIT_THREADS == SCALE_CODES, "each thread makes one scale of a table");

// Decode codes of the blocks that have these amaxes, the first in the low byte. A product past fp32's largest number
// saturates as that would.
__device__ __forceinline__ uint32_t scale_codes(uint32_t first, uint32_t second, float sixth) {
  return fp8_pair<Format::e4m3>(float_of(first) * sixth, float_of(second) * sixth);
}

// Where E2M1 codes of a group have their signs, see row_codes.
__device__ __forceinline__ uint32_t sign_places(const SecondLevel& level) { return sign_places(level.factor); }

}  // namespace octavo::cuda
