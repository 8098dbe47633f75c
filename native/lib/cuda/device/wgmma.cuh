// wgmma: 64 rows of A times 128, 192 or 256 columns of B, both in smem with the 128-byte swizzle, accumulated in fp32.
// PTX ISA, "Asynchronous warpgroup level matrix instructions".
#pragma once

#include <cstdint>

#include "octavo/types.h"
#include "ptx.cuh"

namespace octavo::cuda {

// What the tensor cores multiply.
enum class Element : int32_t { e4m3 = 0, e5m2 = 1, bf16 = 2, f16 = 3 };

constexpr int SWIZZLE_BYTES = 128;               // of a row of a TMA tile: along K if K-major, else along M or N
constexpr int ATOM_BYTES = 8 * SWIZZLE_BYTES;    // the swizzle repeats every 8 rows
constexpr int BLOCK_BYTES = 64 * SWIZZLE_BYTES;  // a TMA tile of 64 rows

// The smem matrix descriptor of an operand, in units of 16 bytes: from bit 0 its address, from bit 16 the stride to the
// next TMA tile of 64, which an operand has that is not K-major, from bit 32 the stride to the next 8 rows; in the two
// highest bits the swizzle.
__device__ __forceinline__ uint64_t matrix_descriptor(const void* start) {
  constexpr uint64_t swizzle_128 = uint64_t{1} << 62;
  constexpr uint64_t next_tile = uint64_t{BLOCK_BYTES >> 4} << 16, next_atom = uint64_t{ATOM_BYTES >> 4} << 32;
  return swizzle_128 | next_atom | next_tile | ((smem_address(start) & 0x3FFFF) >> 4);
}

__device__ __forceinline__ uint64_t advanced(uint64_t descriptor, int bytes) { return descriptor + (bytes >> 4); }

__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit_group() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// Waits until at most `pending` committed wgmma groups are in flight.
template <int pending>
__device__ __forceinline__ void wgmma_wait_group() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(pending) : "memory");
}

// Keeps the compiler from moving reads of accumulators above the preceding wait, or writes below the following fence.
template <int N>
__device__ __forceinline__ void wgmma_fence_operands(float (&d)[N]) {
#pragma unroll
  for (int i = 0; i < N; ++i) asm volatile("" : "+f"(d[i])::"memory");
}

#define OCTAVO_NAMES_64 \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, " \
  "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, " \
  "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, " \
  "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"

#define OCTAVO_NAMES_96 \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, " \
  "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, " \
  "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, " \
  "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, " \
  "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, " \
  "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"

#define OCTAVO_NAMES_128 \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, " \
  "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, " \
  "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, " \
  "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, " \
  "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, " \
  "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, " \
  "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, " \
  "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"

#define OCTAVO_8(d, i) \
  "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]), \
      "+f"(d[i + 7])
#define OCTAVO_32(d, i) OCTAVO_8(d, i), OCTAVO_8(d, i + 8), OCTAVO_8(d, i + 16), OCTAVO_8(d, i + 24)
#define OCTAVO_SUMS_64(d) OCTAVO_32(d, 0), OCTAVO_32(d, 32)
#define OCTAVO_SUMS_96(d) OCTAVO_SUMS_64(d), OCTAVO_32(d, 64)
#define OCTAVO_SUMS_128(d) OCTAVO_SUMS_96(d), OCTAVO_32(d, 96)

// `a`, `b`, `add`: operand numbers after the accumulators. FP8 is always K-major; 16-bit operands carry transpose bits.
#define OCTAVO_WGMMA(n, sums, a, b, add, kind, tail) \
  asm volatile("{\n.reg .pred adds;\nsetp.ne.b32 adds, %" add ", 0;\nwgmma.mma_async.sync.aligned.m64n" n kind \
               " {" OCTAVO_NAMES_##sums "}, %" a ", %" b ", adds, 1, 1" tail ";\n}\n" \
               : OCTAVO_SUMS_##sums(d) \
               : "l"(left), "l"(right), "r"(static_cast<int>(adds)))
#define OCTAVO_WGMMA_128(kind, tail) OCTAVO_WGMMA("128", 64, "64", "65", "66", kind, tail)
#define OCTAVO_WGMMA_192(kind, tail) OCTAVO_WGMMA("192", 96, "96", "97", "98", kind, tail)
#define OCTAVO_WGMMA_256(kind, tail) OCTAVO_WGMMA("256", 128, "128", "129", "130", kind, tail)

#define OCTAVO_BY_WIDTH(kind, tail) \
  if constexpr (N == 64) { \
    OCTAVO_WGMMA_128(kind, tail); \
  } else if constexpr (N == 96) { \
    OCTAVO_WGMMA_192(kind, tail); \
  } else { \
    OCTAVO_WGMMA_256(kind, tail); \
  }

#define OCTAVO_BY_MAJOR(kind) \
  if constexpr (!left_transposed && !right_transposed) { \
    OCTAVO_BY_WIDTH(kind, ", 0, 0") \
  } else if constexpr (!left_transposed) { \
    OCTAVO_BY_WIDTH(kind, ", 0, 1") \
  } else { \
    static_assert(right_transposed); \
    OCTAVO_BY_WIDTH(kind, ", 1, 1") \
  }

// d (+)= left [64, K] right [K, 2 N], K being 32 bytes. A transposed operand lies in TMA tiles of 64 K-rows.
template <Element L, Element R, bool left_transposed, bool right_transposed, int N>
__device__ __forceinline__ void wgmma(float (&d)[N], uint64_t left, uint64_t right, bool adds) {
  static_assert(N == 64 || N == 96 || N == 128);
  if constexpr (L == Element::bf16) {
    OCTAVO_BY_MAJOR("k16.f32.bf16.bf16")
  } else if constexpr (L == Element::f16) {
    OCTAVO_BY_MAJOR("k16.f32.f16.f16")
  } else if constexpr (L == Element::e4m3 && R == Element::e4m3) {
    OCTAVO_BY_WIDTH("k32.f32.e4m3.e4m3", "")
  } else if constexpr (L == Element::e4m3) {
    OCTAVO_BY_WIDTH("k32.f32.e4m3.e5m2", "")
  } else if constexpr (R == Element::e4m3) {
    OCTAVO_BY_WIDTH("k32.f32.e5m2.e4m3", "")
  } else {
    OCTAVO_BY_WIDTH("k32.f32.e5m2.e5m2", "")
  }
}

#undef OCTAVO_BY_MAJOR
#undef OCTAVO_BY_WIDTH
#undef OCTAVO_WGMMA_256
#undef OCTAVO_WGMMA_192
#undef OCTAVO_WGMMA_128
#undef OCTAVO_WGMMA
#undef OCTAVO_SUMS_128
#undef OCTAVO_SUMS_96
#undef OCTAVO_SUMS_64
#undef OCTAVO_32
#undef OCTAVO_8
#undef OCTAVO_NAMES_128
#undef OCTAVO_NAMES_96
#undef OCTAVO_NAMES_64

}  // namespace octavo::cuda
