// Between the amax pass and the tiles: turns small arrays of amaxes into scales.
#pragma once

#include "scales.cuh"

namespace octavo::cuda {

__global__ void clear(uint32_t* words, int64_t count, const int32_t* unchanged) {
  if (unchanged && *unchanged) return;
  const int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i < count) words[i] = 0;
}

// Amax bits to encode scales, in place, and to stored decode scales; `amax` is a copy for the caller. Null outputs are
// skipped.
__global__ void finish_scales(uint32_t* bits_to_encode, int64_t count, Format format, ScaleOptions options,
                              float* first, float* second, float* amax, const int32_t* unchanged) {
  if (unchanged && *unchanged) return;
  const int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i >= count) return;
  const uint32_t bits = bits_to_encode[i];
  const float encode = fp32_scale(bits, format_max(format), options.epsilon, options.power_of_two);
  bits_to_encode[i] = bits_of(encode);
  const float stored = decode_scale(encode);
  if (first) first[i] = stored;
  if (second) second[i] = stored;
  if (amax) amax[i] = canonical(float_of(bits));
}

// The caller's encode scales to stored decode scales. Also clears `amax`, which the tiles raise.
__global__ void store_decode_scales(const float* encode, int64_t count, float* first, float* second, float* amax,
                                    const int32_t* unchanged) {
  if (unchanged && *unchanged) return;
  const int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i >= count) return;
  const float stored = decode_scale(encode[i]);
  if (first) first[i] = stored;
  if (second) second[i] = stored;
  if (amax) amax[i] = 0.0f;
}

__global__ void finish_levels(const uint32_t* bits, int64_t count, SecondLevel* levels, float* first, float* second,
                              float* amax, const int32_t* unchanged) {
  if (unchanged && *unchanged) return;
  const int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i >= count) return;
  const float global = nvfp4_global(bits[i]), factor = decode_scale(global);
  levels[i] = {nvfp4_sixth(global), factor};
  if (first) first[i] = factor;
  if (second) second[i] = factor;
  if (amax) amax[i] = canonical(float_of(bits[i]));
}

}  // namespace octavo::cuda
