// Eight neighbouring elements of every second row, a whole Philox counter each and one lane's: where they are, and how
// the lane gets what it reads.
#pragma once

#include "cuda/device/memory.cuh"
#include "cuda/device/packs.cuh"
#include "steps.cuh"

namespace octavo::cuda {

constexpr int ROWS_AT_ONCE = 2, LANES_OF_ROW = 32 / ROWS_AT_ONCE;

// Kept in a register, and not worked out again where it is used.
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

// How a lane gets what it reads of its rows. An iteration of the kernel calls, in this order, `load_moments` at its
// head, `moments`, `ask_for_moments`, `load_masters`, `masters` and `ask_for_masters`; `start` comes before all
// iterations. `left`: how many rows there are from the lane's on.
//
// Where gradients or masters are fp32: loads into registers.
template <class M, class G>
class Rows : public LaneArrays<M, G> {
 public:
  struct Slots {};

  __device__ Rows(const AdamWArrays& arrays, int64_t at, const Slots&, uint32_t) : LaneArrays<M, G>(arrays, at) {}
  __device__ void start(const StepArgs&, int) {}
  __device__ void drain() const {}

  __device__ void load_moments() {
    read_ = {load_eight<G>(this->grad), {load_global<uint2>(this->codes[0]), load_global<uint2>(this->codes[1])}};
  }
  __device__ MomentsRead<G> moments() const { return read_; }
  __device__ void ask_for_moments(const StepArgs&, int) {}

  __device__ void load_masters() { masters_ = load_eight<M>(this->master); }
  __device__ Pack<M> masters() const { return masters_; }
  __device__ void ask_for_masters(const StepArgs&, int) {}

 private:
  MomentsRead<G> read_;
  Pack<M> masters_;
};

// Where both are bf16: copies into slots in shared memory that are this lane's alone, asked for two iterations before
// they are used. They need no register on their way and no barrier.
template <>
class Rows<BF16, BF16> : public LaneArrays<BF16, BF16> {
 public:
  // Of a warp, by iteration, array (codes of both moments, gradients, masters) and lane.
  struct Slots {
    uint4 slot[2][3][32];
  };

  __device__ Rows(const AdamWArrays& arrays, int64_t at, const Slots& slots, uint32_t lane)
      : LaneArrays(arrays, at), slots_(shared_address(&slots.slot[0][0][lane])), both_(2 * slots_ + ITERATION) {
    keep(slots_), keep(both_);
  }
  __device__ void start(const StepArgs& args, int left) {
#pragma unroll
    for (int further = 0; further < 2; ++further) {
      copy_moments(args, left, further);
      copy_masters(args, left, further);
    }
  }
  __device__ void drain() const { wait_for_copies<0>(); }

  __device__ void load_moments() {}
  __device__ MomentsRead<BF16> moments() const {
    wait_for_copies<3>();
    const uint4 codes = load_shared(slots_), grad = load_shared(slots_ + ARRAY);
    return {{{grad.x, grad.y, grad.z, grad.w}}, {{codes.x, codes.y}, {codes.z, codes.w}}};
  }
  __device__ void ask_for_moments(const StepArgs& args, int left) { copy_moments(args, left, 2); }

  __device__ void load_masters() {}
  __device__ Pack<BF16> masters() const {
    wait_for_copies<3>();
    const uint4 four = load_shared(slots_ + 2 * ARRAY);
    return {{four.x, four.y, four.z, four.w}};
  }
  __device__ void ask_for_masters(const StepArgs& args, int left) {
    copy_masters(args, left, 2);
    slots_ = both_ - slots_;
  }

 private:
  // The lane's slots of the iteration so many further.
  __device__ uint32_t slots(int further) const { return further % 2 ? both_ - slots_ : slots_; }
  // A group of copies each, even if there is no such row.
  __device__ void copy_moments(const StepArgs& args, int left, int further) {
    if (left > further * ROWS_AT_ONCE) {
      copy_async<16>(slots(further) + ARRAY, element_at(grad, args.strides[0], further));
#pragma unroll
      for (int i = 0; i < 2; ++i) copy_async<8>(slots(further) + 8 * i, element_at(codes[i], args.strides[2], further));
    }
    end_copies();
  }
  __device__ void copy_masters(const StepArgs& args, int left, int further) {
    if (left > further * ROWS_AT_ONCE)
      copy_async<16>(slots(further) + 2 * ARRAY, element_at(master, args.strides[1], further));
    end_copies();
  }

  static constexpr uint32_t ARRAY = 32 * 16, ITERATION = 3 * ARRAY;
  uint32_t slots_, both_;  // the lane's of this iteration, and the sum of both iterations'
};

}  // namespace octavo::cuda
