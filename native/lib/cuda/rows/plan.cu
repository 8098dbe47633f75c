// The plan kernel: from group sizes on the device to everything that other kernels need to know about them.
//
//   reads   sizes  [G] int32 or int64, once
//   writes  the whole plan (plan.h), the bounded sizes if they are asked for, and the status word if a size was cut
//   bound   latency: one CTA, because each start depends on all sizes before it
//
// Up to 1 024 groups, each thread owns one and later steps read smem. More groups are processed in chunks of 1 024 that
// carry their sums along, and later steps read back what the CTA itself has written.
#include "cuda/device/launch.h"
#include "plan_steps.h"

namespace octavo {

namespace cuda {
namespace {

constexpr int THREADS = 1024;
constexpr int WARPS = THREADS / 32;
constexpr unsigned ALL = 0xFFFFFFFFu;
constexpr int64_t RANKED_GROUPS = 512;  // up to here counting ranks is cheaper than the sorting network's barriers

// TILE_HEIGHTS as a function: device code cannot index a host constexpr array.
__host__ __device__ constexpr uint32_t height_of(int h) { return 16u << h; }
static_assert(TILE_HEIGHT_COUNT == 5 && TILE_HEIGHTS[0] == height_of(0) && TILE_HEIGHTS[1] == height_of(1) &&
              TILE_HEIGHTS[2] == height_of(2) && TILE_HEIGHTS[3] == height_of(3) && TILE_HEIGHTS[4] == height_of(4));

struct Shared {
  uint32_t rows[THREADS + 1];
  uint32_t blocks[TILE_HEIGHT_COUNT][THREADS + 1];
  uint32_t row_totals[2][WARPS];
  uint32_t block_totals[2][TILE_HEIGHT_COUNT][WARPS];
  int64_t keys[THREADS];
};

struct Outputs {
  int64_t* words;
  int64_t* rows;                       // row_start
  int64_t* blocks[TILE_HEIGHT_COUNT];  // block_start
  int64_t* order;
  Panel* panels;
};

__device__ Outputs outputs_of(int64_t* words, int64_t rows, int64_t groups) {
  const PlanView view = {words, rows, groups};
  Outputs outputs;
  outputs.words = words;
  outputs.rows = const_cast<int64_t*>(view.row_start());
#pragma unroll
  for (int h = 0; h < TILE_HEIGHT_COUNT; ++h) outputs.blocks[h] = const_cast<int64_t*>(view.block_start(h));
  outputs.order = const_cast<int64_t*>(view.order());
  outputs.panels = const_cast<Panel*>(view.panels());
  return outputs;
}

__device__ uint32_t saturating_scan(uint32_t value, uint32_t most) {
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const uint32_t before = __shfl_up_sync(ALL, value, step);
    if (static_cast<int>(threadIdx.x % 32) >= step) value = saturating_sum(value, before, most);
  }
  return value;
}

__device__ uint32_t scan(uint32_t value) {
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const uint32_t before = __shfl_up_sync(ALL, value, step);
    if (static_cast<int>(threadIdx.x % 32) >= step) value += before;
  }
  return value;
}

// Sums over the chunks so far.
struct Carry {
  uint32_t rows = 0;
  uint32_t blocks[TILE_HEIGHT_COUNT] = {};
};

// Starts of the groups from `first` on, one per thread. True if this thread's size was cut.
//
// The totals are double-buffered, so that a chunk's first barrier also separates the readers of the last chunk from the
// writers of the next one.
__device__ bool place_chunk(const PlanArgs& args, int64_t first, int turn, Carry& carry, const Outputs& outputs,
                            Shared& shared) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int64_t group = first + threadIdx.x;
  const bool present = group < args.groups;
  const uint32_t most = static_cast<uint32_t>(args.rows);
  int64_t size = 0;
  if (present) {
    size = args.sizes_are_64 ? static_cast<const int64_t*>(args.sizes)[group]
                             : static_cast<int64_t>(static_cast<const int32_t*>(args.sizes)[group]);
  }

  const uint32_t within = saturating_scan(bounded_size(size, most), most);
  if (lane == 31) shared.row_totals[turn][warp] = within;
  __syncthreads();
  const uint32_t totals = saturating_scan(shared.row_totals[turn][lane], most);
  const uint32_t from_warps = __shfl_sync(ALL, totals, warp == 0 ? 0 : warp - 1);
  const uint32_t before = saturating_sum(carry.rows, warp == 0 ? 0 : from_warps, most);
  const uint32_t end = saturating_sum(before, within, most);
  const uint32_t neighbour = __shfl_up_sync(ALL, end, 1);
  const uint32_t size_within = end - (lane == 0 ? before : neighbour);
  carry.rows = saturating_sum(carry.rows, __shfl_sync(ALL, totals, 31), most);

  uint32_t counts[TILE_HEIGHT_COUNT];
#pragma unroll
  for (int h = 0; h < TILE_HEIGHT_COUNT; ++h) {
    counts[h] = scan((size_within + height_of(h) - 1) / height_of(h));
    if (lane == 31) shared.block_totals[turn][h][warp] = counts[h];
  }
  __syncthreads();
#pragma unroll
  for (int h = 0; h < TILE_HEIGHT_COUNT; ++h) {
    const uint32_t total = shared.block_totals[turn][h][lane];
    counts[h] += carry.blocks[h] + __reduce_add_sync(ALL, lane < warp ? total : 0u);
    carry.blocks[h] += __reduce_add_sync(ALL, total);
  }

  if (present) {
    outputs.rows[group + 1] = end;
    if (args.bounded != nullptr) args.bounded[group] = size_within;
#pragma unroll
    for (int h = 0; h < TILE_HEIGHT_COUNT; ++h) outputs.blocks[h][group + 1] = counts[h];
    if (args.groups <= THREADS) {
      shared.rows[group + 1] = end;
#pragma unroll
      for (int h = 0; h < TILE_HEIGHT_COUNT; ++h) shared.blocks[h][group + 1] = counts[h];
      shared.keys[group] = order_key(size_within, group);
    } else {
      outputs.order[group] = order_key(size_within, group);
    }
  }
  return static_cast<int64_t>(size_within) != size;
}

// All keys differ, so a key's rank is the number of smaller keys.
__device__ void order_by_rank(const int64_t* keys, int64_t groups, int64_t* order) {
  const int64_t group = threadIdx.x;
  if (group >= groups) return;
  const int64_t key = keys[group];
  int rank = 0;
#pragma unroll 8
  for (int other = 0; other < static_cast<int>(groups); ++other) rank += keys[other] < key ? 1 : 0;
  order[rank] = group;
}

// Up to distance 32 a warp's 32 comparators stay within 64 neighbouring keys, so a warp barrier suffices.
__device__ void wait_for_keys(int64_t distance, int64_t next_distance) {
  if (distance > 32 || next_distance > 32) {
    __syncthreads();
  } else {
    __syncwarp();
  }
}

__device__ void sort_step(int64_t* keys, int64_t count, int64_t comparators, int64_t distance, bool mirrored) {
  for (int64_t i = threadIdx.x; i < comparators; i += THREADS) {
    const Comparator pair = comparator(i, distance, mirrored);
    if (pair.high >= count) continue;
    const int64_t low = keys[pair.low], high = keys[pair.high];
    if (low > high) {
      keys[pair.low] = high;
      keys[pair.high] = low;
    }
  }
}

__device__ void sort_keys(int64_t* keys, int64_t count) {
  int64_t size = 1;
  while (size < count) size *= 2;
  for (int64_t run = 1; run < size; run *= 2) {
    sort_step(keys, count, size / 2, run, true);
    for (int64_t distance = run / 2, last = run; distance > 0; last = distance, distance /= 2) {
      wait_for_keys(last, distance);
      sort_step(keys, count, size / 2, distance, false);
    }
    wait_for_keys(1, 2 * run);
  }
  __syncthreads();
}

template <class Index>
__device__ void list_panels(const Starts<Index>& starts, int64_t groups, int64_t bound, Panel* panels) {
  // Starting from the last thread: with few groups, the first warps are busy with the order.
  for (int64_t panel = THREADS - 1 - static_cast<int>(threadIdx.x); panel < bound; panel += THREADS) {
    union {
      Panel panel;
      uint4 halves[2];
    } entry = {panel_at(starts, groups, panel)};
    uint4* to = reinterpret_cast<uint4*>(panels + panel);
    to[0] = entry.halves[0];
    to[1] = entry.halves[1];
  }
}

__global__ void __launch_bounds__(THREADS, 1) plan_kernel(const PlanArgs args) {
  __shared__ Shared shared;
  const Outputs outputs = outputs_of(args.plan, args.rows, args.groups);
  const bool small = args.groups <= THREADS;

  if (threadIdx.x <= TILE_HEIGHT_COUNT) {
    const int h = static_cast<int>(threadIdx.x) - 1;
    (h < 0 ? outputs.rows : args.plan + (outputs.blocks[0] - args.plan) + h * (args.groups + 1))[0] = 0;
    (h < 0 ? shared.rows : shared.blocks[h])[0] = 0;
  }

  Carry carry;
  bool cut = false;
  int turn = 0;
  for (int64_t first = 0; first < args.groups; first += THREADS, turn ^= 1) {
    cut |= place_chunk(args, first, turn, carry, outputs, shared);
  }
  // This barrier also makes the starts and keys visible to all threads.
  const bool any_cut = __syncthreads_or(cut);

  if (threadIdx.x < PLAN_HEADER_WORDS) {
    int64_t word = 0;
    if (threadIdx.x == 0) word = carry.rows;
    if (threadIdx.x == 1) word = any_cut ? BAD_SIZES : 0;
    if (threadIdx.x == 2) word = args.groups;
    if (threadIdx.x == 3) word = args.rows;
#pragma unroll
    for (int h = 0; h < TILE_HEIGHT_COUNT; ++h) {
      if (threadIdx.x == 4 + h) word = carry.blocks[h];
    }
    outputs.words[threadIdx.x] = word;
    int64_t* padding = outputs.order + args.groups + threadIdx.x;
    if (padding < reinterpret_cast<int64_t*>(outputs.panels)) *padding = 0;
  }
  if (threadIdx.x == 0 && any_cut && args.status != nullptr) atomicOr(args.status, BAD_SIZES);

  const int64_t bound = block_bound(args.rows, args.groups, PANEL_ROWS);
  if (small) {
    const Starts<uint32_t> starts = {shared.rows, shared.blocks[HEIGHT_16], shared.blocks[HEIGHT_32],
                                     shared.blocks[HEIGHT_128]};
    list_panels(starts, args.groups, bound, outputs.panels);
  } else {
    const Starts<int64_t> starts = {outputs.rows, outputs.blocks[HEIGHT_16], outputs.blocks[HEIGHT_32],
                                    outputs.blocks[HEIGHT_128]};
    list_panels(starts, args.groups, bound, outputs.panels);
  }

  if (args.groups <= RANKED_GROUPS) {
    order_by_rank(shared.keys, args.groups, outputs.order);
  } else {
    int64_t* keys = small ? shared.keys : outputs.order;
    sort_keys(keys, args.groups);
    for (int64_t i = threadIdx.x; i < args.groups; i += THREADS) outputs.order[i] = order_group(keys[i]);
  }
}

}  // namespace
}  // namespace cuda

Error plan_cuda(const PlanArgs& args, void* stream) {
  if (const Error error = check_plan(args)) return error;
  cuda::plan_kernel<<<1, cuda::THREADS, 0, cuda::stream_of(stream)>>>(args);
  return cuda::launched();
}

}  // namespace octavo
