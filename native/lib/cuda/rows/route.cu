// Sorts choices by group, in one launch without scratch memory.
//
//   reads   index, twice per group, mostly from the L2 cache
//   writes  group_sizes, order, position, routed
//   bound   latency: 32 warps per group walk over all choices
//
// One CTA per group, and one for the choices without a group. It counts the choices of lower groups, which is where its
// own rows begin, and its own ones per warp, each of which has one run of choices. No result depends on the order of
// threads.
#include "cuda/device/launch.h"
#include "octavo/permute.h"

namespace octavo {

namespace cuda {
namespace {

constexpr int THREADS = 1024, WARP = 32, WARPS = THREADS / WARP;

struct Counts {
  int lower[WARPS], own[WARPS];
};

// The group of a choice; `groups` if it has none.
__device__ __forceinline__ int group_of(const RouteArgs& args, int choice) {
  const int64_t index = __ldg(args.index + choice);
  return static_cast<int>(index >= 0 && index < args.groups ? index : args.groups);
}

__device__ __forceinline__ int sum_of(const int (&counts)[WARPS], int lane, int warps) {
  return __reduce_add_sync(~0u, lane < warps ? counts[lane] : 0);
}

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
      if (mine) {
        const int at = row + __popc(all & ((1u << lane) - 1u));
        args.order[at] = choice;
        args.position[choice] = at;
        args.routed[choice] = group < groups ? 1 : 0;
      }
      row += __popc(all);
    }
    __syncthreads();  // the next group overwrites the counts
  }
}

}  // namespace
}  // namespace cuda

Error route_cuda(const RouteArgs& args, void* stream) {
  if (const Error error = check_route(args)) return error;
  cuda::route_kernel<<<cuda::grid_for(args.groups + 1), cuda::THREADS, 0, cuda::stream_of(stream)>>>(args);
  return cuda::launched();
}

}  // namespace octavo
