// The factors of a step, and the elements of a lane: moments, and masters with roots and quotients without checks.
#pragma once

#include "octavo/exact.h"
#include "rounding.cuh"
#include "steps.cuh"

namespace octavo::cuda {

// What a step reads on the device, worked out once per CTA.
struct StepFactors {
  AdamWScalars scalars;
  float step_sizes[2];  // the step size less and plus 2^-20 of itself
  float inverse_scale;  // of the gradient, or 1
  uint32_t number;
  uint32_t rare;  // 0: plain moments are stepped as below
};

__device__ __forceinline__ StepFactors factors_of(const AdamWArgs& args) {
  int64_t number = args.draws.step;
  if (args.draws.step_device) {
    const float count = __ldg(args.draws.step_device);
    number = count >= 1.0f ? static_cast<int64_t>(count) : 1;
  }
  StepFactors factors;
  factors.number = static_cast<uint32_t>(number);
  factors.inverse_scale = args.inverse_scale ? __ldg(args.inverse_scale) : 1.0f;
  factors.scalars = adamw_scalars(args.rule, args.rule.lr_device ? __ldg(args.rule.lr_device) : args.rule.lr, number);
  const AdamWScalars& made = factors.scalars;
  factors.step_sizes[0] = made.step_size * (1.0f - UPDATE_ERROR);
  factors.step_sizes[1] = made.step_size * (1.0f + UPDATE_ERROR);
  const bool plain = made.root_scale >= 1.0f && made.root_scale <= 8192.0f && args.rule.eps <= 1024.0f;
  const bool rounded = args.arrays.master_dtype == DType::bf16;
  const bool exact = made.step_size == 0.0f || (made.step_size >= 0x1p-22f && made.step_size <= 0x1p60f);
  factors.rare = plain && (exact || !rounded) ? 0u : 1u;
  return factors;
}

// One warp's work, and all threads'. Factors of the arguments stay operands in constant memory.
__device__ __forceinline__ StepFactors shared_factors(StepFactors& shared, const AdamWArgs& args) {
  if (threadIdx.x < 32) {
    const StepFactors own = factors_of(args);
    if (threadIdx.x == 0) shared = own;
  }
  __syncthreads();
  StepFactors factors = shared;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    factors.scalars.kept[i] = args.rule.kept[i];
    factors.scalars.added[i] = args.rule.added[i];
  }
  factors.scalars.eps = args.rule.eps;
  return factors;
}

// Plain moments, with such factors: magnitudes of the first from 2^-80 to 2^60, of the second from 2^-101 to 2^20. A
// root, with its factor and epsilon, is then from 2^-51 to 2^24, and what is divided by it from 2^-104 to 2^111.
constexpr uint32_t LEAST_FIRST = 47u << 23, MOST_FIRST = 187u << 23, MOST_SECOND = 147u << 23;

// A loop, since few have gradients that are scaled, and the others shall not pass eight products.
template <int N>
__device__ __forceinline__ void unscale(float (&grad)[N], float inverse_scale) {
  if (inverse_scale == 1.0f) return;
#pragma unroll 1
  for (int i = 0; i < N; ++i) append(grad, grad[0] * inverse_scale);
}

template <int N>
__device__ __forceinline__ bool are_plain(const float (&first)[N], const float (&second)[N]) {
  uint32_t least[2] = {abs_bits(first[0]), bits_of(second[0])}, most[2] = {least[0], least[1]};
#pragma unroll
  for (int i = 1; i < N; ++i) {
    const uint32_t bits[2] = {abs_bits(first[i]), bits_of(second[i])};
#pragma unroll
    for (int k = 0; k < 2; ++k) least[k] = min(least[k], bits[k]), most[k] = max(most[k], bits[k]);
  }
  return least[0] >= LEAST_FIRST && most[0] <= MOST_FIRST && least[1] >= LEAST_ROOTED && most[1] <= MOST_SECOND;
}

__device__ __forceinline__ float inverse_root_near(float value) {
  float inverse;  // within 2^-22.9 of itself
  asm("rsqrt.approx.ftz.f32 %0, %1;" : "=f"(inverse) : "f"(value));
  return inverse;
}

__device__ __forceinline__ float inverse_near(float value) {
  float inverse;  // within an ulp
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(inverse) : "f"(value));
  return inverse;
}

__device__ __forceinline__ float stepped(float master, float first, float second, const AdamWScalars& scalars) {
  const float update = quotient_of(first, root_of(second) * scalars.root_scale + scalars.eps);
  return master * scalars.decay - update * scalars.step_size;
}

// Masters after the step, exactly. `plain`: all moments are, and factors.rare is 0.
template <int N>
__device__ __forceinline__ void step_masters(float (&master)[N], const float (&first)[N], const float (&second)[N],
                                             const AdamWScalars& scalars, bool plain) {
  if (plain) {
#pragma unroll
    for (int i = 0; i < N; ++i) {
      const float update =
          exact_update(first[i], second[i], scalars.root_scale, scalars.eps, inverse_root_near, inverse_near);
      master[i] = master[i] * scalars.decay - update * scalars.step_size;
    }
    return;
  }
#pragma unroll 1
  for (int i = 0; i < N; ++i) append(master, stepped(master[0], picked(first, i), picked(second, i), scalars));
}

// The same, rounded stochastically to bf16, element i by half i % 2 of word i / 2.
//
// 16 bits of a master are cut off, so an approximation nearly always has the bits of the exact step. An update that is
// near is 12 * 2^-24 of itself from the exact one, and its product with the step size 13: the exact master is between
// those of a step size that is 2^-20 less and more. Rounding keeps the order, and so do the draws: if both give the
// same bf16, it is the exact one. Otherwise the lane takes the exact step.
template <int N>
__device__ __forceinline__ void step_rounded(uint32_t (&halves)[N / 2], float (&master)[N], const float (&first)[N],
                                             const float (&second)[N], const uint32_t (&words)[N / 2],
                                             const StepFactors& factors, bool plain) {
  if (plain) {
    uint32_t differing = 0;
    float nearer[N];
#pragma unroll
    for (int pair = 0; pair < N / 2; ++pair) {
      uint32_t sums[2][2];
#pragma unroll
      for (int k = 0; k < 2; ++k) {
        const int i = 2 * pair + k;
        const float update = update_near(first[i], second[i], factors.scalars.root_scale, factors.scalars.eps,
                                         inverse_root_near, inverse_near);
        const float kept = master[i] * factors.scalars.decay;
        nearer[i] = fused(-update, factors.step_sizes[0], kept);
        sums[0][k] = plus_draw<0>(bits_of(nearer[i]), words[pair], k);
        sums[1][k] = plus_draw<0>(bits_of(fused(-update, factors.step_sizes[1], kept)), words[pair], k);
      }
      halves[pair] = upper_halves(sums[0][0], sums[0][1]);
      differing |= halves[pair] ^ upper_halves(sums[1][0], sums[1][1]);
    }
    if (differing == 0 && !maybe_nan(nearer)) return;
  }
#pragma unroll 1
  for (int i = 0; i < N; ++i) append(master, stepped(master[0], picked(first, i), picked(second, i), factors.scalars));
  stochastic_halves(halves, master, words);
}

}  // namespace octavo::cuda
