// Accesses to memory that keep their place among other instructions, which nvcc may give those of plain C++ another:
// global memory, shared memory by its own addresses, and copies into it that go on while a thread computes. PTX
// ISA 8.0.
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
__device__ __forceinline__ void copy_async(uint32_t to, const void* from) {
  if constexpr (BYTES == 16) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
  } else {
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(to), "l"(from), "n"(BYTES) : "memory");
  }
}

// 16 bytes, of which L2 fetches the neighbours, too; zeros where nothing is `present`: then nothing is read.
__device__ __forceinline__ void copy_async_or_zeros(uint32_t to, const void* from, bool present) {
  asm volatile("cp.async.cg.shared.global.L2::256B [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(present ? 16 : 0)
               : "memory");
}

// Copies asked for since the last such call are a group; waits until at most so many of the latest groups are not
// there.
__device__ __forceinline__ void end_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }

template <int GROUPS>
__device__ __forceinline__ void wait_for_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(GROUPS) : "memory");
}

}  // namespace octavo::cuda
