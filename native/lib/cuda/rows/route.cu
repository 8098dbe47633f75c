// Sorts choices by group, stably. No result depends on the order of threads.
//
//   reads   index, twice, the second time mostly from the L2 cache
//   writes  group_sizes, order, position, routed
//   bound   latency
//
// Many choices: each CTA counts a run of them by group into the workspace. In a second launch it adds up what runs
// before its own have counted, and what all have of lower groups, which is where its first choice of each group goes.
// Choices without a group count as one group more, the last.
//
// Few choices, or no workspace: one launch, in which a CTA per group walks over all of them.
#include "cuda/device/launch.h"
#include "octavo/permute.h"

namespace octavo {

namespace cuda {
namespace {

constexpr int THREADS = 1024, WARP = 32, WARPS = THREADS / WARP;
constexpr int RUN_THREADS = 256, RUN_WARPS = RUN_THREADS / WARP, PER_LANE = ROUTE_RUN / RUN_THREADS;

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

__global__ void __launch_bounds__(RUN_THREADS) count_kernel(const __grid_constant__ RouteArgs args) {
  extern __shared__ int counts[];  // [slots]
  const int slots = static_cast<int>(args.groups) + 1, run = static_cast<int>(blockIdx.x);
  for (int slot = threadIdx.x; slot < slots; slot += RUN_THREADS) counts[slot] = 0;
  __syncthreads();
  const int first = run * ROUTE_RUN + static_cast<int>(threadIdx.x);
#pragma unroll
  for (int i = 0; i < PER_LANE; ++i) {
    const int choice = first + i * RUN_THREADS;
    if (choice < args.choices) atomicAdd(&counts[group_of(args, choice)], 1);
  }
  __syncthreads();
  for (int slot = threadIdx.x; slot < slots; slot += RUN_THREADS) args.counts[run * slots + slot] = counts[slot];
}

// Adds to `all` what every run has of each slot, and to `before` what earlier runs have.
__device__ __forceinline__ void add_runs(const RouteArgs& args, int slots, int* all, int* before) {
  const int lane = static_cast<int>(threadIdx.x) % WARP, warp = static_cast<int>(threadIdx.x) / WARP;
  const int runs = static_cast<int>(gridDim.x), own = static_cast<int>(blockIdx.x);
  for (int slot = lane; slot < slots; slot += WARP) {
    int total = 0, earlier = 0;
#pragma unroll 8
    for (int run = warp; run < runs; run += RUN_WARPS) {
      const int count = __ldg(args.counts + run * slots + slot);
      total += count;
      earlier += run < own ? count : 0;
    }
    atomicAdd(&all[slot], total);
    atomicAdd(&before[slot], earlier);
  }
}

// Adds to `before` what lower slots have of `all`: running sums over the CTA's threads, a chunk of slots at a time.
__device__ __forceinline__ void add_lower(int slots, const int* all, int* before) {
  __shared__ int sums[RUN_WARPS];
  const int lane = static_cast<int>(threadIdx.x) % WARP, warp = static_cast<int>(threadIdx.x) / WARP;
  int carried = 0;
  for (int start = 0; start < slots; start += RUN_THREADS) {
    const int slot = start + static_cast<int>(threadIdx.x);
    const int own = slot < slots ? all[slot] : 0;
    int end = own;
#pragma unroll
    for (int step = 1; step < WARP; step *= 2) {
      const int below = __shfl_up_sync(~0u, end, step);
      if (lane >= step) end += below;
    }
    if (lane == WARP - 1) sums[warp] = end;
    __syncthreads();
    const int of_warp = lane < RUN_WARPS ? sums[lane] : 0;
    const int lower = __reduce_add_sync(~0u, lane < warp ? of_warp : 0);
    if (slot < slots) before[slot] += carried + lower + end - own;
    carried += __reduce_add_sync(~0u, of_warp);
    __syncthreads();  // the next chunk overwrites the sums
  }
}

__global__ void __launch_bounds__(RUN_THREADS) place_kernel(const __grid_constant__ RouteArgs args) {
  extern __shared__ int smem[];  // counts [RUN_WARPS][slots], then all [slots] and before [slots]
  const int thread = static_cast<int>(threadIdx.x), lane = thread % WARP, warp = thread / WARP;
  const int slots = static_cast<int>(args.groups) + 1, choices = static_cast<int>(args.choices);
  int* const counts = smem + warp * slots;
  int* const all = smem + RUN_WARPS * slots;
  int* const before = all + slots;
  for (int at = thread; at < (RUN_WARPS + 2) * slots; at += RUN_THREADS) smem[at] = 0;
  const int first = static_cast<int>(blockIdx.x) * ROUTE_RUN + warp * WARP * PER_LANE + lane;
  int group[PER_LANE], rank[PER_LANE];
#pragma unroll
  for (int i = 0; i < PER_LANE; ++i) {
    const int choice = first + i * WARP;
    group[i] = choice < choices ? group_of(args, choice) : slots;  // no slot
  }
  __syncthreads();
  add_runs(args, slots, all, before);
#pragma unroll
  for (int i = 0; i < PER_LANE; ++i) {
    const unsigned peers = __match_any_sync(~0u, group[i]);
    const bool real = group[i] < slots;
    const int lower = __popc(peers & ((1u << lane) - 1u));
    rank[i] = real ? counts[group[i]] + lower : 0;
    __syncwarp();
    if (real && lower == 0) counts[group[i]] += __popc(peers);
    __syncwarp();
  }
  __syncthreads();
  for (int slot = thread; slot < slots; slot += RUN_THREADS) {
    if (blockIdx.x == 0 && slot < slots - 1) args.group_sizes[slot] = all[slot];
    int total = 0;
    for (int other = 0; other < RUN_WARPS; ++other) {
      const int its = smem[other * slots + slot];
      smem[other * slots + slot] = total;
      total += its;
    }
  }
  add_lower(slots, all, before);
#pragma unroll
  for (int i = 0; i < PER_LANE; ++i) {
    if (group[i] < slots) place(args, first + i * WARP, group[i], before[group[i]] + counts[group[i]] + rank[i]);
  }
}

__device__ __forceinline__ int sum_of(const int (&counts)[WARPS], int lane, int warps) {
  return __reduce_add_sync(~0u, lane < warps ? counts[lane] : 0);
}

// It counts the choices of lower groups, which is where the group's rows begin, and its own ones per warp, each of
// which has one run of choices.
__global__ void __launch_bounds__(THREADS) route_kernel(const __grid_constant__ RouteArgs args) {
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
  const cudaStream_t on = cuda::stream_of(stream);
  if (args.counts != nullptr && route_workspace(args.choices, args.groups) > 0) {
    const auto runs = static_cast<unsigned>(ceil_div(args.choices, ROUTE_RUN));
    const size_t slot_bytes = sizeof(int) * static_cast<size_t>(args.groups + 1);
    cuda::count_kernel<<<runs, cuda::RUN_THREADS, slot_bytes, on>>>(args);
    cuda::place_kernel<<<runs, cuda::RUN_THREADS, (cuda::RUN_WARPS + 2) * slot_bytes, on>>>(args);
  } else {
    cuda::route_kernel<<<cuda::grid_for(args.groups + 1), cuda::THREADS, 0, on>>>(args);
  }
  return cuda::launched();
}

}  // namespace octavo
