// Loads and stores of global and of shared memory as volatile PTX, because nvcc may reorder those of plain C++; and
// cp.async, which copies from global to shared memory while the thread computes. PTX ISA 8.0.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace octavo::cuda {

template <class T>
__device__ __forceinline__ T load_global(const void* at);

template <>
__device__ __forceinline__ uint2 load_global(const void* at) {
  uint2 two;
  asm volatile("ld.global.v2.u32 {%0, %1}, [%2];" : "=r"(two.x), "=r"(two.y) : "l"(at) : "memory");
  return two;
}

template <>
__device__ __forceinline__ uint4 load_global(const void* at) {
  uint4 four;
  asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(four.x), "=r"(four.y), "=r"(four.z), "=r"(four.w)
               : "l"(at)
               : "memory");
  return four;
}

__device__ __forceinline__ void store_global(void* at, uint32_t word) {
  asm volatile("st.global.u32 [%0], %1;" ::"l"(at), "r"(word) : "memory");
}

__device__ __forceinline__ void store_global(void* at, uint2 two) {
  asm volatile("st.global.v2.u32 [%0], {%1, %2};" ::"l"(at), "r"(two.x), "r"(two.y) : "memory");
}

__device__ __forceinline__ void store_global(void* at, uint4 four) {
  asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(at), "r"(four.x), "r"(four.y), "r"(four.z), "r"(four.w)
               : "memory");
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
__device__ __forceinline__ void cp_async(uint32_t to, const void* from) {
  if constexpr (BYTES == 16) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
  } else {
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(to), "l"(from), "n"(BYTES) : "memory");
  }
}

// Copies 16 bytes where they are `present`; otherwise writes 16 zeros and reads nothing, so that `from` may be any
// address. FETCH_256: L2 fetches the 256 bytes around them from device memory.
template <bool FETCH_256 = false>
__device__ __forceinline__ void cp_async_or_zeros(uint32_t to, const void* from, bool present) {
  const int bytes = present ? 16 : 0;
  if constexpr (FETCH_256) {
    asm volatile("cp.async.cg.shared.global.L2::256B [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes) : "memory");
  } else {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes) : "memory");
  }
}

// Makes a group of the thread's copies since the last such call, which may be none.
__device__ __forceinline__ void cp_async_commit_group() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits until at most the `pending` latest groups of the thread's copies are incomplete.
template <int pending>
__device__ __forceinline__ void cp_async_wait_group() {
  asm volatile("cp.async.wait_group %0;" ::"n"(pending) : "memory");
}

// Waits for all of the thread's copies, in a group or not.
__device__ __forceinline__ void cp_async_wait_all() { asm volatile("cp.async.wait_all;" ::: "memory"); }

}  // namespace octavo::cuda
