// A thread's own slots in smem, one for each of its eight rows and each of a few arrays: the destination of its
// cp.async, so that prefetched data occupy no registers and need no barrier.
#pragma once

#include "cuda/device/memory.cuh"
#include "cuda/device/packs.cuh"
#include "cuda/device/ptx.cuh"
#include "tile.cuh"

namespace octavo::cuda {

template <class T>
struct Slots {
  static constexpr int parts = Pack<T>::words / 4;
  static constexpr int bytes = 8 * parts * THREADS * 16;  // of one array

  // [array][row][part], threads side by side.
  static __device__ uint4* at(void* slots, int array, int row, int part) {
    return static_cast<uint4*>(slots) + ((array * 8 + row) * parts + part) * THREADS + threadIdx.x;
  }

  static __device__ Pack<T> load(void* slots, int array, int row) {
    Pack<T> pack;
#pragma unroll
    for (int part = 0; part < parts; ++part) {
      const uint4 four = *at(slots, array, row, part);
      pack.word[4 * part] = four.x, pack.word[4 * part + 1] = four.y;
      pack.word[4 * part + 2] = four.z, pack.word[4 * part + 3] = four.w;
    }
    return pack;
  }

  static __device__ void store(void* slots, int array, int row, const Pack<T>& pack) {
#pragma unroll
    for (int part = 0; part < parts; ++part)
      *at(slots, array, row, part) = {pack.word[4 * part], pack.word[4 * part + 1], pack.word[4 * part + 2],
                                      pack.word[4 * part + 3]};
  }

  // Issues cp.async for eight rows from `from` on, of which the first `live` exist; the others become zeros.
  static __device__ void fetch(void* slots, int array, const char* from, int64_t row_bytes, int live) {
#pragma unroll
    for (int i = 0; i < 8; ++i, from += row_bytes) {
#pragma unroll
      for (int part = 0; part < parts; ++part)
        cp_async_or_zeros(smem_address(at(slots, array, i, part)), from + part * 16, i < live);
    }
  }
};

// Waits for all of this thread's copies.
__device__ __forceinline__ void wait_for_slots() {
  cp_async_commit_group();
  cp_async_wait_group<0>();
}

}  // namespace octavo::cuda
