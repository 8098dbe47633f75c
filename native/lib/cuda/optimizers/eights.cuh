// Eight neighbouring elements of every second row, a whole Philox counter each and one lane's: where they are, and how
// the lane gets what it reads.
#pragma once

#include "cuda/device/memory.cuh"
#include "cuda/device/packs.cuh"
#include "cuda/device/ptx.cuh"
#include "steps.cuh"

namespace octavo::cuda {

constexpr int ROWS_AT_ONCE = 2, LANES_OF_ROW = 32 / ROWS_AT_ONCE;

// Keeps nvcc from computing the value anew where it is used, in place of keeping it in a register.
__device__ __forceinline__ void keep(uint32_t& value) { asm volatile("" : "+r"(value)); }

template <class T>
__device__ __forceinline__ T* element_at(T* base, int64_t at, int bytes) {
  using Byte = std::conditional_t<std::is_const_v<T>, const uint8_t, uint8_t>;
  return static_cast<Byte*>(base) + at * bytes;
}

template <class T>
__device__ __forceinline__ Pack<T> load_eight(const void* at) {
  Pack<T> pack;
#pragma unroll
  for (int i = 0; i < Pack<T>::words / 4; ++i) {
    const auto four = load_global<uint4>(static_cast<const uint4*>(at) + i);
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
    store_global(to + i, uint4{pack.word[4 * i], pack.word[4 * i + 1], pack.word[4 * i + 2], pack.word[4 * i + 3]});
}

template <class T>
__device__ __forceinline__ void values_of(float (&values)[8], const Pack<T>& pack) {
#pragma unroll
  for (int i = 0; i < 8; ++i) values[i] = pack.value(i);
}

// Where a lane's eight elements of a row are.
template <class M, class G>
struct LaneArrays {
  const void* grad;
  void *master, *codes[2];

  __device__ LaneArrays(const AdamWArrays& arrays, int64_t at)
      : grad(element_at(arrays.grad, at, Pack<G>::bytes)),
        master(element_at(arrays.master, at, Pack<M>::bytes)),
        codes{element_at(arrays.moment[0], at, 1), element_at(arrays.moment[1], at, 1)} {}

  // By two rows.
  __device__ void advance(const StepArgs& args) {
    grad = element_at(grad, args.strides[0], 1);
    master = element_at(master, args.strides[1], 1);
#pragma unroll
    for (void*& each : codes) each = element_at(each, args.strides[2], 1);
  }
  // Values have two bytes where codes have one: they need no pointer of their own, which would be one too many.
  __device__ void* values(const StepArgs& args) const {
    return reinterpret_cast<void*>(2 * reinterpret_cast<uint64_t>(codes[0]) + args.values_from_codes);
  }
};

// What a lane reads for the moments of its elements of a row.
template <class G>
struct MomentsRead {
  Pack<G> grad;
  uint2 codes[2];
};

// Whether arrays of T are copied into slots in shared memory (cp.async) two iterations before they are used: that needs
// no register meanwhile, and no barrier, since a slot of 16 bytes is one lane's alone. fp32 is loaded instead: a lane's
// 32 bytes would be two copies past L1, each of which uses half of every sector that it fetches. Codes are always
// copied.
template <class T>
constexpr bool copied_ahead = std::is_same_v<T, BF16>;

// How a lane gets what it reads of its rows. An iteration of the kernel calls, in this order, `load_early` at its head,
// `moments`, `load_late`, `prefetch_moments`, `masters` and `prefetch_masters`; `start` comes before all iterations.
// `left`: how many rows there are from the lane's on.
template <class M, class G>
class LaneRows : public LaneArrays<M, G> {
 public:
  // Of a warp, by iteration, array (codes of both moments, gradients, masters) and lane.
  struct Slots {
    uint4 slot[2][1 + copied_ahead<G> + copied_ahead<M>][32];
  };

  __device__ LaneRows(const AdamWArrays& arrays, int64_t at, const Slots& slots, uint32_t lane)
      : LaneArrays<M, G>(arrays, at),
        slots_(smem_address(&slots.slot[0][0][lane])),
        both_(2 * slots_ + sizeof(slots.slot[0])) {
    keep(slots_), keep(both_);
  }
  __device__ void start(const StepArgs& args, int left) {
#pragma unroll
    for (int further = 0; further < 2; ++further) {
      copy_moments(args, left, further);
      copy_masters(args, left, further);
    }
  }
  __device__ void drain() const { cp_async_wait_group<0>(); }

  // Loads of fp32 arrays. Of two, gradients come first, so that fewer registers wait at once.
  __device__ void load_early() {
    if constexpr (copied_ahead<G>) {
      load_masters();
    } else {
      grad_ = load_eight<G>(this->grad);
    }
  }
  __device__ void load_late() {
    if constexpr (!copied_ahead<G>) load_masters();
  }

  __device__ MomentsRead<G> moments() const {
    cp_async_wait_group<LATER_GROUPS>();
    const uint4 codes = load_shared(slots_);
    if constexpr (copied_ahead<G>) {
      const uint4 grad = load_shared(slots_ + GRADIENTS);
      return {{{grad.x, grad.y, grad.z, grad.w}}, {{codes.x, codes.y}, {codes.z, codes.w}}};
    } else {
      return {grad_, {{codes.x, codes.y}, {codes.z, codes.w}}};
    }
  }
  __device__ void prefetch_moments(const StepArgs& args, int left) { copy_moments(args, left, 2); }

  __device__ Pack<M> masters() const {
    if constexpr (copied_ahead<M>) {
      cp_async_wait_group<LATER_GROUPS>();
      const uint4 four = load_shared(slots_ + MASTERS);
      return {{four.x, four.y, four.z, four.w}};
    } else {
      return masters_;
    }
  }
  __device__ void prefetch_masters(const StepArgs& args, int left) {
    copy_masters(args, left, 2);
    slots_ = both_ - slots_;
  }

 private:
  // The lane's slots of the iteration so many further.
  __device__ uint32_t slots(int further) const { return further % 2 ? both_ - slots_ : slots_; }

  __device__ void load_masters() {
    if constexpr (!copied_ahead<M>) masters_ = load_eight<M>(this->master);
  }
  // Commits a group of copies even if there is no such row: waits count groups.
  __device__ void copy_moments(const StepArgs& args, int left, int further) {
    if (left > further * ROWS_AT_ONCE) {
      if constexpr (copied_ahead<G>)
        cp_async<16>(slots(further) + GRADIENTS, element_at(this->grad, args.strides[0], further));
#pragma unroll
      for (int i = 0; i < 2; ++i)
        cp_async<8>(slots(further) + 8 * i, element_at(this->codes[i], args.strides[2], further));
    }
    cp_async_commit_group();
  }
  // Another, where masters are copied.
  __device__ void copy_masters(const StepArgs& args, int left, int further) {
    if constexpr (copied_ahead<M>) {
      if (left > further * ROWS_AT_ONCE)
        cp_async<16>(slots(further) + MASTERS, element_at(this->master, args.strides[1], further));
      cp_async_commit_group();
    }
  }

  // Bytes from the slot of codes to the others, and the groups of copies that follow the one that is used next.
  static constexpr uint32_t GRADIENTS = 32 * 16, MASTERS = copied_ahead<G> ? 2 * GRADIENTS : GRADIENTS;
  static constexpr int LATER_GROUPS = copied_ahead<M> ? 3 : 1;

  uint32_t slots_, both_;  // the lane's of this iteration, and the sum of both iterations'
  Pack<G> grad_;           // where they are loaded
  Pack<M> masters_;
};

}  // namespace octavo::cuda
