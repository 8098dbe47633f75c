// Wrappers of PTX instructions that have no intrinsic: mbarrier, TMA, setmaxnreg. PTX ISA 8.0, sm_90.
#pragma once

#include <cuda.h>
#include <cuda_runtime.h>

#include <cstdint>

namespace octavo::cuda {

__device__ __forceinline__ uint32_t smem_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// An mbarrier in smem: a phase completes after `count` arrivals and once all expected bytes have arrived.
__device__ __forceinline__ void mbarrier_init(uint64_t* barrier, uint32_t count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(smem_address(barrier)), "r"(count) : "memory");
}

// Makes initialized mbarriers visible to the async proxy (TMA).
__device__ __forceinline__ void fence_mbarrier_init() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ __forceinline__ void mbarrier_arrive(uint64_t* barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(smem_address(barrier)) : "memory");
}

// As many arrivals as `count`.
__device__ __forceinline__ void mbarrier_arrive_for(uint64_t* barrier, uint32_t count) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0], %1;" ::"r"(smem_address(barrier)), "r"(count) : "memory");
}

__device__ __forceinline__ void mbarrier_arrive_expect_tx(uint64_t* barrier, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(smem_address(barrier)), "r"(bytes)
               : "memory");
}

// Arrives for this thread once all of its earlier cp.async copies have completed. Without .noinc the phase would
// first wait for one arrival more, which this one then is.
__device__ __forceinline__ void cp_async_mbarrier_arrive(uint64_t* barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(smem_address(barrier)) : "memory");
}

// Waits until the phase of this parity has completed.
__device__ __forceinline__ void mbarrier_wait(uint64_t* barrier, uint32_t parity) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "again:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra again;\n"
      "}\n" ::"r"(smem_address(barrier)),
      "r"(parity)
      : "memory");
}

// True if the phase of this parity has completed.
__device__ __forceinline__ bool mbarrier_test_wait(uint64_t* barrier, uint32_t parity) {
  uint32_t passed;
  asm volatile(
      "{\n"
      ".reg .pred passed;\n"
      "mbarrier.test_wait.parity.shared::cta.b64 passed, [%1], %2;\n"
      "selp.u32 %0, 1, 0, passed;\n"
      "}\n"
      : "=r"(passed)
      : "r"(smem_address(barrier)), "r"(parity)
      : "memory");
  return passed != 0;
}

// TMA load of a tile at coordinates c, innermost first, into smem; completes its bytes at `barrier`.
__device__ __forceinline__ void tma_load(const CUtensorMap& map, void* into, uint64_t* barrier, int32_t c0,
                                         int32_t c1) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4}], [%2];" ::
          "r"(smem_address(into)),
      "l"(&map), "r"(smem_address(barrier)), "r"(c0), "r"(c1)
      : "memory");
}

__device__ __forceinline__ void tma_load(const CUtensorMap& map, void* into, uint64_t* barrier, int32_t c0, int32_t c1,
                                         int32_t c2) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%3, %4, %5}], [%2];" ::"r"(smem_address(into)),
      "l"(&map), "r"(smem_address(barrier)), "r"(c0), "r"(c1), "r"(c2)
      : "memory");
}

__device__ __forceinline__ void tma_load(const CUtensorMap& map, void* into, uint64_t* barrier, int32_t c0, int32_t c1,
                                         int32_t c2, int32_t c3) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%3, %4, %5, %6}], [%2];" ::"r"(smem_address(into)),
      "l"(&map), "r"(smem_address(barrier)), "r"(c0), "r"(c1), "r"(c2), "r"(c3)
      : "memory");
}

__device__ __forceinline__ void tma_load(const CUtensorMap& map, void* into, uint64_t* barrier, int32_t c0, int32_t c1,
                                         int32_t c2, int32_t c3, int32_t c4) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%3, %4, %5, %6, %7}], [%2];" ::"r"(smem_address(into)),
      "l"(&map), "r"(smem_address(barrier)), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(c4)
      : "memory");
}

// TMA store of a tile from smem, clipped at the tensor's bounds. Belongs to the thread's current bulk group.
__device__ __forceinline__ void tma_store(const CUtensorMap& map, const void* from, int32_t c0, int32_t c1,
                                          int32_t c2) {
  asm volatile("cp.async.bulk.tensor.3d.global.shared::cta.tile.bulk_group [%0, {%2, %3, %4}], [%1];" ::"l"(&map),
               "r"(smem_address(from)), "r"(c0), "r"(c1), "r"(c2)
               : "memory");
}

__device__ __forceinline__ void tma_store(const CUtensorMap& map, const void* from, int32_t c0, int32_t c1, int32_t c2,
                                          int32_t c3) {
  asm volatile("cp.async.bulk.tensor.4d.global.shared::cta.tile.bulk_group [%0, {%2, %3, %4, %5}], [%1];" ::"l"(&map),
               "r"(smem_address(from)), "r"(c0), "r"(c1), "r"(c2), "r"(c3)
               : "memory");
}

// The L2 cache policy of data that is used once: evicted before other lines.
__device__ __forceinline__ uint64_t evict_first_policy() {
  uint64_t policy;
  asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}

// The same load and store of data that is used once.
__device__ __forceinline__ void tma_load_once(const CUtensorMap& map, void* into, uint64_t* barrier, int32_t c0,
                                              int32_t c1, int32_t c2) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint "
      "[%0], [%1, {%3, %4, %5}], [%2], %6;" ::"r"(smem_address(into)),
      "l"(&map), "r"(smem_address(barrier)), "r"(c0), "r"(c1), "r"(c2), "l"(evict_first_policy())
      : "memory");
}

__device__ __forceinline__ void tma_store_once(const CUtensorMap& map, const void* from, int32_t c0, int32_t c1,
                                               int32_t c2) {
  asm volatile(
      "cp.async.bulk.tensor.3d.global.shared::cta.tile.bulk_group.L2::cache_hint [%0, {%2, %3, %4}], [%1], %5;" ::"l"(
          &map),
      "r"(smem_address(from)), "r"(c0), "r"(c1), "r"(c2), "l"(evict_first_policy())
      : "memory");
}

// Closes the thread's current bulk group.
__device__ __forceinline__ void bulk_commit_group() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }

// Waits until at most `pending` bulk groups have yet to read their smem.
template <int pending>
__device__ __forceinline__ void bulk_wait_group_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(pending) : "memory");
}

// Waits until all bulk groups have completed.
__device__ __forceinline__ void bulk_wait_group() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }

// Orders accesses to smem in the generic proxy (loads, stores, cp.async) before later ones in the async proxy (TMA,
// wgmma): the thread's own, and those that happened before the fence by a barrier. The accesses that it is to precede
// are this thread's, or follow another barrier.
__device__ __forceinline__ void fence_proxy_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// Decreases or increases a warpgroup's registers per thread.
template <int registers>
__device__ __forceinline__ void setmaxnreg_dec() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(registers));
}

template <int registers>
__device__ __forceinline__ void setmaxnreg_inc() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(registers));
}

}  // namespace octavo::cuda
