// A router's choices and weights, and the gradient of its logits: one warp per token, which holds a row in registers.
//
//   reads   logits once (the gradient: choices and dweights, too)
//   writes  choices, weights and counts; dlogits
//   bound   latency: k rounds of a maximum over a warp
//
// Lane l has experts l, l + 32, ..., so that loads and stores are whole sectors, and choice l. Counts are sums of
// integers: per CTA in shared memory, then in the memory that was cleared before. No order of threads shows.
#include "cuda/device/launch.h"
#include "cuda/device/packs.cuh"
#include "octavo/router.h"

namespace octavo {

namespace cuda {
namespace {

constexpr int WARP = 32, WARPS = 8, THREADS = WARPS * WARP;
constexpr unsigned ALL = ~0u;

__device__ __forceinline__ float value_at(const Logits& logits, int64_t token, int expert) {
  const int64_t at = token * logits.stride + expert;
  switch (logits.dtype) {
    case DType::bf16: return load_value<BF16>(logits.data, at);
    case DType::f16: return load_value<F16>(logits.data, at);
    default: return load_value<F32>(logits.data, at);
  }
}

__device__ __forceinline__ float sum_of(float value) {
#pragma unroll
  for (int bit = 16; bit; bit /= 2) value += __shfl_xor_sync(ALL, value, bit);
  return value;
}

__device__ __forceinline__ float largest_of(float value) {
#pragma unroll
  for (int bit = 16; bit; bit /= 2) value = fmaxf(value, __shfl_xor_sync(ALL, value, bit));
  return value;
}

// The logits of the lane's experts.
template <int N>
struct LaneLogits {
  float logit[N];  // -inf past the last expert
};

template <int N>
__device__ __forceinline__ LaneLogits<N> load_row(const Logits& logits, int64_t token, int lane) {
  LaneLogits<N> held;
  const int experts = static_cast<int>(logits.experts);
#pragma unroll
  for (int i = 0; i < N; ++i) {
    const int expert = i * WARP + lane;
    held.logit[i] = expert < experts ? value_at(logits, token, expert) : -INFINITY;
  }
  return held;
}

// Of softmax; what the other scores never read is left as it is.
template <int N>
__device__ __forceinline__ router::Row row_of(Score score, const LaneLogits<N>& held, int experts, int lane) {
  router::Row row;
  if (score != Score::softmax) return row;
  float largest = held.logit[0];
#pragma unroll
  for (int i = 1; i < N; ++i) largest = fmaxf(largest, held.logit[i]);
  row.largest = largest_of(largest);
  float total = 0.0f;
#pragma unroll
  for (int i = 0; i < N; ++i)
    if (i * WARP + lane < experts) total += router::power_of(held.logit[i], row.largest);
  row.total = sum_of(total);
  return row;
}

// The largest of a warp's orders and where it is first: `own` and `at` are the lane's.
struct Found {
  uint32_t order;
  uint32_t at;
};

__device__ __forceinline__ Found first_largest(uint32_t own, uint32_t at) {
  const uint32_t order = __reduce_max_sync(ALL, own);
  return {order, __reduce_min_sync(ALL, own == order ? at : ~0u)};
}

// The first of the lane's largest, among experts from `begin` up to `end`; ABSENT where it has none there.
template <int N>
__device__ __forceinline__ Found lane_largest(const uint32_t (&order)[N], int lane, int begin, int end) {
  Found best = {router::ABSENT, ~0u};
#pragma unroll
  for (int i = 0; i < N; ++i) {
    const int expert = i * WARP + lane;
    if (expert >= begin && expert < end && order[i] > best.order) best = {order[i], static_cast<uint32_t>(expert)};
  }
  return best;
}

template <int N>
__device__ __forceinline__ void take(uint32_t (&order)[N], int lane, uint32_t expert) {
#pragma unroll
  for (int i = 0; i < N; ++i)
    if (i * WARP + lane == static_cast<int>(expert)) order[i] = router::ABSENT;
}

// Chooses the token's groups, by the sum of each group's two largest, and gives all experts outside of them the order
// of -inf.
template <int N>
__device__ __forceinline__ void keep_groups(const RouterRule& rule, int experts, int lane, uint32_t (&order)[N]) {
  const int size = experts / rule.groups;
  uint32_t sum = router::ABSENT;
  for (int group = 0; group < rule.groups; ++group) {
    const Found own = lane_largest(order, lane, group * size, (group + 1) * size);
    const Found first = first_largest(own.order, own.at);
    float both = router::number_of(first.order);
    if (size > 1) {
      uint32_t left[N];
#pragma unroll
      for (int i = 0; i < N; ++i) left[i] = order[i];
      take(left, lane, first.at);
      const Found rest = lane_largest(left, lane, group * size, (group + 1) * size);
      both += router::number_of(__reduce_max_sync(ALL, rest.order));
    }
    if (group == lane) sum = router::order_of(both);
  }
  unsigned kept = 0;
  for (int round = 0; round < rule.kept_groups; ++round) {
    const Found best = first_largest(sum, static_cast<uint32_t>(lane));
    kept |= 1u << best.at;
    if (lane == static_cast<int>(best.at)) sum = router::ABSENT;
  }
#pragma unroll
  for (int i = 0; i < N; ++i) {
    const int expert = i * WARP + lane;
    if (expert < experts && !(kept >> (expert / size) & 1u)) order[i] = router::LOWEST;
  }
}

// The choice of each lane below k.
template <int N>
__device__ __forceinline__ int64_t chosen(const ChooseArgs& args, const LaneLogits<N>& held, const router::Row& row,
                                          int lane) {
  const int experts = static_cast<int>(args.logits.experts);
  const bool by_scores = args.bias || router::by_groups(args.rule);
  uint32_t order[N];
#pragma unroll
  for (int i = 0; i < N; ++i) {
    const int expert = i * WARP + lane;
    order[i] = router::ABSENT;
    if (expert >= experts) continue;
    float value = held.logit[i];
    if (by_scores) {
      value = router::score_of(args.rule.score, value, row);
      if (args.bias) value += __ldg(args.bias + expert);
    }
    order[i] = router::order_of(value);
  }
  if (router::by_groups(args.rule)) keep_groups(args.rule, experts, lane, order);
  Found own = lane_largest(order, lane, 0, experts);
  int64_t mine = -1;
  for (int choice = 0; choice < args.rule.k; ++choice) {
    const Found best = first_largest(own.order, own.at);
    if (lane == choice) mine = best.at;
    if (own.at == best.at) {
      take(order, lane, best.at);
      own = lane_largest(order, lane, 0, experts);
    }
  }
  return mine;
}

template <int N>
__device__ __forceinline__ void choose_token(const ChooseArgs& args, int64_t token, int lane, int* counted) {
  const int experts = static_cast<int>(args.logits.experts);
  const LaneLogits<N> held = load_row<N>(args.logits, token, lane);
  const router::Row row = row_of(args.rule.score, held, experts, lane);
  const int64_t at = token * args.rule.k + lane;
  const bool has_one = lane < args.rule.k;
  int64_t mine = -1;
  if (args.replay) {
    if (has_one) mine = __ldg(args.replay + at);
  } else {
    mine = chosen(args, held, row, lane);
  }
  const bool there = has_one && mine >= 0 && mine < experts;
  const int expert = there ? static_cast<int>(mine) : 0;
  float weight = there ? router::score_of(args.rule.score, value_at(args.logits, token, expert), row) : 0.0f;
  if (args.rule.renormalize) weight = weight / (sum_of(weight) + router::SMALL);
  if (has_one) {
    args.choices[at] = mine;
    args.weights[at] = weight * args.rule.scale;
  }
  if (there) atomicAdd(counted + expert, 1);
}

template <int N>
__global__ void __launch_bounds__(THREADS) choose_kernel(const __grid_constant__ ChooseArgs args) {
  __shared__ int counted[N * WARP];
  const int lane = static_cast<int>(threadIdx.x % WARP), warp = static_cast<int>(threadIdx.x / WARP);
  for (int expert = static_cast<int>(threadIdx.x); expert < N * WARP; expert += THREADS) counted[expert] = 0;
  __syncthreads();
  for (int64_t token = int64_t{blockIdx.x} * WARPS + warp; token < args.logits.tokens;
       token += int64_t{gridDim.x} * WARPS)
    choose_token<N>(args, token, lane, counted);
  __syncthreads();
  for (int expert = static_cast<int>(threadIdx.x); expert < args.logits.experts; expert += THREADS) {
    const auto count = static_cast<unsigned long long>(counted[expert]);
    if (count) atomicAdd(reinterpret_cast<unsigned long long*>(args.counts) + expert, count);
  }
}

template <int N>
__device__ __forceinline__ void gradient_of_token(const ChooseGradientArgs& args, int64_t token, int lane) {
  const int experts = static_cast<int>(args.logits.experts), k = args.rule.k;
  const LaneLogits<N> held = load_row<N>(args.logits, token, lane);
  const router::Row row = row_of(args.rule.score, held, experts, lane);
  const int64_t at = token * k + lane, mine = lane < k ? __ldg(args.choices + at) : -1;
  const bool there = mine >= 0 && mine < experts;
  const int expert = there ? static_cast<int>(mine) : -1;
  const float score = there ? router::score_of(args.rule.score, value_at(args.logits, token, expert), row) : 0.0f;
  // of the scores of this lane's choice; a weight is scale score / divisor
  float dscore = there ? __ldg(args.dweights + at) * args.rule.scale : 0.0f;
  if (args.rule.renormalize) {
    const float divisor = sum_of(score) + router::SMALL;
    const float pulled = sum_of(dscore * (score / divisor));
    dscore = there ? (dscore - pulled) / divisor : 0.0f;
  }
  const float shared = args.rule.score == Score::softmax ? sum_of(dscore * score) : 0.0f;
  float sums[N] = {};
  for (int choice = 0; choice < k; ++choice) {
    const int its = __shfl_sync(ALL, expert, choice);
    const float its_dscore = __shfl_sync(ALL, dscore, choice);
#pragma unroll
    for (int i = 0; i < N; ++i)
      if (i * WARP + lane == its) sums[i] += its_dscore;
  }
#pragma unroll
  for (int i = 0; i < N; ++i) {
    const int column = i * WARP + lane;
    if (column >= experts) continue;
    const int64_t to = token * experts + column;
    const float slope = router::slope_of(args.rule.score, held.logit[i], row);
    const float gradient = slope * (sums[i] - shared);
    switch (args.logits.dtype) {
      case DType::bf16: store_value<BF16>(args.dlogits, to, gradient); break;
      case DType::f16: store_value<F16>(args.dlogits, to, gradient); break;
      default: store_value<F32>(args.dlogits, to, gradient);
    }
  }
}

template <int N>
__global__ void __launch_bounds__(THREADS) choose_gradient_kernel(const __grid_constant__ ChooseGradientArgs args) {
  const int lane = static_cast<int>(threadIdx.x % WARP), warp = static_cast<int>(threadIdx.x / WARP);
  for (int64_t token = int64_t{blockIdx.x} * WARPS + warp; token < args.logits.tokens;
       token += int64_t{gridDim.x} * WARPS)
    gradient_of_token<N>(args, token, lane);
}

// Calls `launch` with the number of a lane's experts.
template <class Launch>
void by_experts(int64_t experts, const Launch& launch) {
  if (experts <= 32) return launch(std::integral_constant<int, 1>{});
  if (experts <= 64) return launch(std::integral_constant<int, 2>{});
  if (experts <= 128) return launch(std::integral_constant<int, 4>{});
  if (experts <= 256) return launch(std::integral_constant<int, 8>{});
  if (experts <= 512) return launch(std::integral_constant<int, 16>{});
  launch(std::integral_constant<int, 32>{});
}

constexpr int64_t MOST_CTAS = 132 * 8;  // what an H100's multiprocessors hold; each CTA then takes several rows

}  // namespace
}  // namespace cuda

Error choose_cuda(const ChooseArgs& args, void* stream) {
  if (const Error error = check_choose(args)) return error;
  const cudaStream_t on = cuda::stream_of(stream);
  const auto bytes = static_cast<size_t>(args.logits.experts) * sizeof(int64_t);
  if (const Error error = cuda::failed(cudaMemsetAsync(args.counts, 0, bytes, on))) return error;
  if (!args.logits.tokens) return {};
  const unsigned ctas = cuda::grid_for(ceil_div(args.logits.tokens, cuda::WARPS), cuda::MOST_CTAS);
  cuda::by_experts(args.logits.experts,
                   [&](auto held) { cuda::choose_kernel<held()><<<ctas, cuda::THREADS, 0, on>>>(args); });
  return cuda::launched();
}

Error choose_gradient_cuda(const ChooseGradientArgs& args, void* stream) {
  if (const Error error = check_choose_gradient(args)) return error;
  if (!args.logits.tokens) return {};
  const unsigned ctas = cuda::grid_for(ceil_div(args.logits.tokens, cuda::WARPS), cuda::MOST_CTAS);
  cuda::by_experts(args.logits.experts, [&](auto held) {
    cuda::choose_gradient_kernel<held()><<<ctas, cuda::THREADS, 0, cuda::stream_of(stream)>>>(args);
  });
  return cuda::launched();
}

}  // namespace octavo
