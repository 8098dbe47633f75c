// Eight neighbouring elements of a row, a whole Philox counter: loads and stores at addresses of whole eights.
#pragma once

#include "cuda/device/packs.cuh"
#include "rounding.cuh"

namespace octavo::cuda {

// A pointer into each array that is read or written eight elements at a time. They grow by one instruction each.
template <class T>
__device__ __forceinline__ T* element_at(T* base, int64_t at, int bytes) {
  using Byte = std::conditional_t<std::is_const_v<T>, const uint8_t, uint8_t>;
  return static_cast<Byte*>(base) + at * bytes;
}

// `count` times so many bytes further.
template <class T>
__device__ __forceinline__ void advance(T*& pointer, uint32_t count, uint32_t bytes) {
  asm("mad.wide.u32 %0, %1, %2, %0;" : "+l"(pointer) : "r"(count), "r"(bytes));
}

// As they lie in memory.
template <class T>
__device__ __forceinline__ Pack<T> load_eight(const void* at) {
  Pack<T> pack;
  const auto* from = static_cast<const uint4*>(at);
#pragma unroll
  for (int i = 0; i < Pack<T>::words / 4; ++i) {
    const uint4 four = __ldcs(from + i);
    pack.word[4 * i] = four.x, pack.word[4 * i + 1] = four.y;
    pack.word[4 * i + 2] = four.z, pack.word[4 * i + 3] = four.w;
  }
  return pack;
}

template <class T>
__device__ __forceinline__ void store_eight(void* at, const Pack<T>& pack) {
  auto* to = static_cast<uint4*>(at);
#pragma unroll
  for (int i = 0; i < Pack<T>::words / 4; ++i)
    __stcs(to + i, uint4{pack.word[4 * i], pack.word[4 * i + 1], pack.word[4 * i + 2], pack.word[4 * i + 3]});
}

template <class T>
__device__ __forceinline__ void values_of(float (&values)[8], const Pack<T>& pack) {
#pragma unroll
  for (int i = 0; i < 8; ++i) values[i] = pack.value(i);
}

}  // namespace octavo::cuda
