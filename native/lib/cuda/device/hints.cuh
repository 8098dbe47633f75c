// Hints to the L2 cache for 16-byte loads and for stores: what is used for the last time is evicted before other lines.
// PTX ISA 7.4.
#pragma once

#include "packs.cuh"
#include "ptx.cuh"

namespace octavo::cuda {

// The L2 policy of data that is used `once`, or of data that is used again soon.
__device__ __forceinline__ uint64_t l2_policy(bool once) {
  if (once) return evict_first_policy();
  uint64_t policy;
  asm volatile("createpolicy.fractional.L2::evict_normal.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}

// Eight 16-bit values from memory that nothing writes during the launch.
template <class T>
__device__ __forceinline__ Pack<T> load_pack_by(const void* from, uint64_t policy) {
  static_assert(Pack<T>::bytes == 2);
  Pack<T> pack;
  asm("ld.global.nc.L2::cache_hint.v4.u32 {%0, %1, %2, %3}, [%4], %5;"
      : "=r"(pack.word[0]), "=r"(pack.word[1]), "=r"(pack.word[2]), "=r"(pack.word[3])
      : "l"(from), "l"(policy));
  return pack;
}

// An ordinary store.
struct Put {
  template <class Word>
  __device__ void operator()(void* at, const Word& word) const {
    *static_cast<Word*>(at) = word;
  }
};

// A store of what this launch does not read: its lines are evicted from L2 first.
class PutOnce {
 public:
  __device__ PutOnce() : policy_(evict_first_policy()) {}

  __device__ void operator()(void* at, uint32_t word) const {
    asm volatile("st.global.L2::cache_hint.u32 [%0], %1, %2;" ::"l"(at), "r"(word), "l"(policy_) : "memory");
  }
  __device__ void operator()(void* at, uint2 two) const {
    asm volatile("st.global.L2::cache_hint.v2.u32 [%0], {%1, %2}, %3;" ::"l"(at), "r"(two.x), "r"(two.y), "l"(policy_)
                 : "memory");
  }
  __device__ void operator()(void* at, uint4 four) const {
    asm volatile("st.global.L2::cache_hint.v4.u32 [%0], {%1, %2, %3, %4}, %5;" ::"l"(at), "r"(four.x), "r"(four.y),
                 "r"(four.z), "r"(four.w), "l"(policy_)
                 : "memory");
  }

 private:
  uint64_t policy_;
};

}  // namespace octavo::cuda
