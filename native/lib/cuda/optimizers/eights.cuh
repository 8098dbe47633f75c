// Eight neighbouring elements of a row, a whole Philox counter: in memory, and on their way in slots in shared memory.
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

// ---- a lane's own slots, and copies into them that go on while it computes

__device__ __forceinline__ uint32_t shared_address(const void* at) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(at));
}

__device__ __forceinline__ void store_shared(uint32_t at, uint4 four) {
  asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(at), "r"(four.x), "r"(four.y), "r"(four.z), "r"(four.w)
               : "memory");
}

__device__ __forceinline__ void store_shared(uint32_t at, int2 two) {
  asm volatile("st.shared.v2.u32 [%0], {%1, %2};" ::"r"(at), "r"(two.x), "r"(two.y) : "memory");
}

__device__ __forceinline__ uint4 load_shared(uint32_t at) {
  uint4 four;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(four.x), "=r"(four.y), "=r"(four.z), "=r"(four.w)
               : "r"(at)
               : "memory");
  return four;
}

__device__ __forceinline__ int2 load_two_shared(uint32_t at) {
  int2 two;
  asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(two.x), "=r"(two.y) : "r"(at) : "memory");
  return two;
}

template <int BYTES>
__device__ __forceinline__ void copy_async(uint32_t to, const void* from) {
  if constexpr (BYTES == 16) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
  } else {
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(to), "l"(from), "n"(BYTES) : "memory");
  }
}

// Copies asked for since the last such call are a group; waits until at most so many of the latest groups are not
// there.
__device__ __forceinline__ void end_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }

template <int GROUPS>
__device__ __forceinline__ void wait_for_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(GROUPS) : "memory");
}

// A warp's slots for two rows: 16 bytes of each lane side by side, 512 from one part to the next. A lane's offsets:
template <class M, class G>
struct StagedArrays {
  static constexpr uint32_t part = 512, codes = 0, grad = part, master = grad + part * (Pack<G>::words / 4);
  static constexpr uint32_t bytes = master + part * (Pack<M>::words / 4);

  template <class T>
  static __device__ void ask(uint32_t slot, const void* from) {
#pragma unroll
    for (int i = 0; i < Pack<T>::words / 4; ++i) copy_async<16>(slot + i * part, static_cast<const uint4*>(from) + i);
  }

  template <class T>
  static __device__ Pack<T> load(uint32_t slot) {
    Pack<T> pack;
#pragma unroll
    for (int i = 0; i < Pack<T>::words / 4; ++i) {
      const uint4 four = load_shared(slot + i * part);
      pack.word[4 * i] = four.x, pack.word[4 * i + 1] = four.y;
      pack.word[4 * i + 2] = four.z, pack.word[4 * i + 3] = four.w;
    }
    return pack;
  }
};

}  // namespace octavo::cuda
