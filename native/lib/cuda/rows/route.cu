// Sorts choices by group, in one launch without scratch memory.
//
//   reads   index, twice, mostly from the L2 cache
//   writes  group_sizes, order, position, routed
//   bound   latency: 256 warps walk over all choices once to count them, and once to place them
//
// A cluster of 8 CTAs shares the choices in order, and so do a CTA's warps. Each warp counts its own by group in smem,
// and running sums over warps, CTAs and groups are where its first one of each group goes. Choices without a group
// count as one group more, the last. No result depends on the order of threads. Where the counts of so many groups do
// not fit, a CTA per group walks over all choices.
#include <cooperative_groups.h>

#include "cuda/device/launch.h"
#include "octavo/permute.h"

namespace octavo {

namespace cuda {
namespace {

constexpr int THREADS = 1024, WARP = 32, WARPS = THREADS / WARP, CTAS = 8;
constexpr int MOST_SMEM = 48 << 10;  // that a kernel has without being asked for more

struct Counts {
  int lower[WARPS], own[WARPS];
};

// The group of a choice; `groups` if it has none.
__device__ __forceinline__ int group_of(const RouteArgs& args, int choice) {
  const int64_t index = __ldg(args.index + choice);
  return static_cast<int>(index >= 0 && index < args.groups ? index : args.groups);
}

__device__ __forceinline__ void place(const RouteArgs& args, int choice, int group, int row) {
  args.order[row] = choice;
  args.position[choice] = row;
  args.routed[choice] = group < args.groups ? 1 : 0;
}

// Calls body(choice, group, peers) for a warp's choices from `first` on, 32 at a time: `peers` are the lanes whose
// choices have the same group. Lanes past `last` take no part.
template <class Body>
__device__ __forceinline__ void for_choices(const RouteArgs& args, int first, int last, int lane, Body body) {
#pragma unroll 4
  for (int start = first; start < last; start += WARP) {
    const int choice = start + lane;
    const bool real = choice < last;
    const unsigned lanes = __ballot_sync(~0u, real);
    if (real) {
      const int group = group_of(args, choice);
      body(choice, group, __match_any_sync(lanes, group));
    }
    __syncwarp();
  }
}

// Inclusive sums over the block's threads.
__device__ __forceinline__ int running_sum(int value, int lane, int warp, int (&sums)[WARPS]) {
#pragma unroll
  for (int step = 1; step < WARP; step *= 2) {
    const int below = __shfl_up_sync(~0u, value, step);
    if (lane >= step) value += below;
  }
  if (lane == WARP - 1) sums[warp] = value;
  __syncthreads();
  const int before = __reduce_add_sync(~0u, lane < warp ? sums[lane] : 0);
  __syncthreads();
  return value + before;
}

size_t smem_of(int64_t groups) { return (WARPS + 2) * sizeof(int) * static_cast<size_t>(groups + 1); }

__global__ void __cluster_dims__(CTAS, 1, 1) __launch_bounds__(THREADS)
    route_kernel(const __grid_constant__ RouteArgs args) {
  extern __shared__ int smem[];  // counts [WARPS][slots], totals [slots], bases [slots]
  __shared__ int sums[WARPS];
  const auto cluster = cooperative_groups::this_cluster();
  const int cta = static_cast<int>(blockIdx.x), thread = static_cast<int>(threadIdx.x);
  const int lane = thread % WARP, warp = thread / WARP;
  const int choices = static_cast<int>(args.choices), slots = static_cast<int>(args.groups) + 1;
  int* const counts = smem + warp * slots;
  int* const totals = smem + WARPS * slots;
  int* const bases = totals + slots;
  const int run = (choices + CTAS * THREADS - 1) / (CTAS * THREADS) * WARP;
  const int first = static_cast<int>(min(int64_t{cta * WARPS + warp} * run, int64_t{choices}));
  const int last = static_cast<int>(min(int64_t{first} + run, int64_t{choices}));

  for (int slot = lane; slot < slots; slot += WARP) counts[slot] = 0;
  __syncwarp();
  for_choices(args, first, last, lane, [&](int, int group, unsigned peers) {
    if (lane == __ffs(peers) - 1) counts[group] += __popc(peers);
  });
  __syncthreads();
  for (int slot = thread; slot < slots; slot += THREADS) {
    int total = 0;
    for (int other = 0; other < WARPS; ++other) {
      const int its = smem[other * slots + slot];
      smem[other * slots + slot] = total;
      total += its;
    }
    totals[slot] = total;
  }
  cluster.sync();
  int carried = 0;  // choices of the groups before this run of THREADS groups
  for (int start = 0; start < slots; start += THREADS) {
    const int slot = start + thread;
    int all = 0, before = 0;
    for (int other = 0; slot < slots && other < CTAS; ++other) {
      const int its = cluster.map_shared_rank(totals, other)[slot];
      all += its;
      before += other < cta ? its : 0;
    }
    const int end = carried + running_sum(all, lane, warp, sums);
    if (slot < slots) bases[slot] = end - all + before;
    if (cta == 0 && slot < slots - 1) args.group_sizes[slot] = all;
    if (thread == THREADS - 1) sums[0] = end;
    __syncthreads();
    carried = sums[0];
    __syncthreads();
  }
  for_choices(args, first, last, lane, [&](int choice, int group, unsigned peers) {
    const int leader = __ffs(peers) - 1;
    const int at = bases[group] + counts[group];
    __syncwarp(peers);
    if (lane == leader) counts[group] += __popc(peers);
    place(args, choice, group, at + __popc(peers & ((1u << lane) - 1u)));
  });
  cluster.sync();  // others may still read this CTA's totals
}

__device__ __forceinline__ int sum_of(const int (&counts)[WARPS], int lane, int warps) {
  return __reduce_add_sync(~0u, lane < warps ? counts[lane] : 0);
}

// A CTA per group, and one for the choices without a group: it counts the choices of lower groups, which is where its
// own rows begin, and its own ones per warp, each of which has one run of choices.
__global__ void __launch_bounds__(THREADS) route_many_kernel(const __grid_constant__ RouteArgs args) {
  __shared__ Counts counts;
  const int lane = static_cast<int>(threadIdx.x % WARP), warp = static_cast<int>(threadIdx.x / WARP);
  const int choices = static_cast<int>(args.choices), groups = static_cast<int>(args.groups);
  const int run = (choices + THREADS - 1) / THREADS * WARP;
  const int first = min(warp * run, choices), last = min(first + run, choices);
  for (int group = static_cast<int>(blockIdx.x); group <= groups; group += static_cast<int>(gridDim.x)) {
    int lower = 0, own = 0;
#pragma unroll 8
    for (int choice = first + lane; choice < last; choice += WARP) {
      const int its = group_of(args, choice);
      lower += its < group ? 1 : 0;
      own += its == group ? 1 : 0;
    }
    lower = __reduce_add_sync(~0u, lower);
    own = __reduce_add_sync(~0u, own);
    if (lane == 0) counts.lower[warp] = lower, counts.own[warp] = own;
    __syncthreads();

    int row = sum_of(counts.lower, lane, WARPS) + sum_of(counts.own, lane, warp);
    const int size = sum_of(counts.own, lane, WARPS);
    if (threadIdx.x == 0 && group < groups) args.group_sizes[group] = size;
#pragma unroll 4
    for (int start = first; start < last; start += WARP) {
      const int choice = start + lane;
      const bool mine = choice < last && group_of(args, choice) == group;
      const unsigned all = __ballot_sync(~0u, mine);
      if (mine) place(args, choice, group, row + __popc(all & ((1u << lane) - 1u)));
      row += __popc(all);
    }
    __syncthreads();  // the next group overwrites the counts
  }
}

}  // namespace
}  // namespace cuda

Error route_cuda(const RouteArgs& args, void* stream) {
  if (const Error error = check_route(args)) return error;
  const size_t smem = cuda::smem_of(args.groups);
  if (smem + sizeof(int) * cuda::WARPS <= cuda::MOST_SMEM) {
    cuda::route_kernel<<<cuda::CTAS, cuda::THREADS, smem, cuda::stream_of(stream)>>>(args);
  } else {
    cuda::route_many_kernel<<<cuda::grid_for(args.groups + 1), cuda::THREADS, 0, cuda::stream_of(stream)>>>(args);
  }
  return cuda::launched();
}

}  // namespace octavo
