// Eight neighbouring elements of a row, a whole Philox counter: addresses and stores.
#pragma once

#include "cuda/device/packs.cuh"
#include "rounding.cuh"

namespace octavo::cuda {

// A pointer into each array that is read or written eight elements at a time.
template <class T>
__device__ __forceinline__ T* element_at(T* base, int64_t at, int bytes) {
  using Byte = std::conditional_t<std::is_const_v<T>, const uint8_t, uint8_t>;
  return static_cast<Byte*>(base) + at * bytes;
}

// So many bytes further.
template <class T>
__device__ __forceinline__ void advance(T*& pointer, uint32_t bytes) {
  pointer = element_at(pointer, bytes, 1);
}

template <class T>
__device__ __forceinline__ void store_eight(void* at, const Pack<T>& pack) {
  auto* to = static_cast<uint4*>(at);
#pragma unroll
  for (int i = 0; i < Pack<T>::words / 4; ++i)
    __stwb(to + i, uint4{pack.word[4 * i], pack.word[4 * i + 1], pack.word[4 * i + 2], pack.word[4 * i + 3]});
}

template <class T>
__device__ __forceinline__ void values_of(float (&values)[8], const Pack<T>& pack) {
#pragma unroll
  for (int i = 0; i < 8; ++i) values[i] = pack.value(i);
}

}  // namespace octavo::cuda
