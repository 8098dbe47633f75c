// A router: which experts each token goes to, what each choice counts, and the gradient of its logits.
//
// octavo_numerics.choose_experts is the definition. Where neither a bias nor groups decide, experts are ordered by
// their logits, so the choices are the same everywhere; otherwise by fp32 scores plus bias, which host and device
// compute to the last bits alike but not always to the last. Ties go to the lower index, NaN comes first, zeros are
// equal.
#pragma once

#include <cmath>

#include "octavo/elementary.h"

namespace octavo {

enum class Score : int32_t { softmax = 0, sigmoid = 1, sqrtsoftplus = 2 };

// What a warp holds: experts in registers, a choice and a group of experts per lane.
constexpr int64_t MAX_EXPERTS = 1024, MAX_CHOICES = 32;

struct RouterRule {
  int32_t k = 1;  // choices of a token
  Score score = Score::softmax;
  int32_t groups = 1, kept_groups = 1;  // runs of experts of equal length, and how many of them a token may use
  bool renormalize = true;
  float scale = 1.0f;
};

// Logits [tokens, experts] whose rows stand `stride` elements apart.
struct Logits {
  const void* data = nullptr;
  DType dtype = DType::f32;
  int64_t tokens = 0, experts = 0, stride = 0;
};

struct ChooseArgs {
  Logits logits;
  RouterRule rule;
  const float* bias = nullptr;      // [experts] or null: added to the scores for choosing alone
  const int64_t* replay = nullptr;  // [tokens, k] or null: choices to take; outside 0 to experts - 1 is nobody's
  int64_t* choices = nullptr;       // [tokens, k]
  float* weights = nullptr;         // [tokens, k]
  int64_t* counts = nullptr;        // [experts]
};

// dlogits [tokens, experts] in the logits' dtype, rounded once, rows one after another.
struct ChooseGradientArgs {
  Logits logits;
  RouterRule rule;
  const int64_t* choices = nullptr;  // [tokens, k]
  const float* dweights = nullptr;   // [tokens, k]
  void* dlogits = nullptr;
};

Error check_choose(const ChooseArgs& args);
Error choose_cpu(const ChooseArgs& args, int threads);
Error choose_cuda(const ChooseArgs& args, void* stream);
Error check_choose_gradient(const ChooseGradientArgs& args);
Error choose_gradient_cpu(const ChooseGradientArgs& args, int threads);
Error choose_gradient_cuda(const ChooseGradientArgs& args, void* stream);

namespace router {

constexpr float SMALL = 1e-20f;  // added to the sum that weights are divided by

// An unsigned number in the order of `value`.
OCTAVO_HD uint32_t order_of(float value) {
  if (value != value) return 0xFFFFFFFFu;
  const uint32_t bits = value == 0.0f ? 0u : bits_of(value);
  return bits >> 31 ? ~bits : bits | 0x80000000u;
}

constexpr uint32_t ABSENT = 0u;            // below every number
constexpr uint32_t LOWEST = ~0xFF800000u;  // that of -inf

// The number that has this order; NaN for that of NaN.
OCTAVO_HD float number_of(uint32_t order) { return float_of(order >> 31 ? order & 0x7FFFFFFFu : ~order); }

OCTAVO_HD bool by_groups(const RouterRule& rule) { return rule.kept_groups < rule.groups; }

// A logit's score on its own; `largest` and `total` are the row's maximum and sum of powers where the score is softmax.
struct Row {
  float largest = 0.0f, total = 1.0f;
};

OCTAVO_HD float power_of(float logit, float largest) { return expf(logit - largest); }

// a / d for d from 1 to 2^126. On the device no quotient or root here is an IEEE one, which is a call.
OCTAVO_HD float over(float a, float d) { return activation::quotient(a, d, activation::reciprocal(d)); }

OCTAVO_HD float sigmoid_of(float logit) {
  const float e = expf(-fabsf(logit));
  return over(logit >= 0.0f ? 1.0f : e, 1.0f + e);
}

constexpr float SOFTPLUS_IS_EXP = -15.0f;  // below, to fp32's rounding

// There softplus underflows at half of the depth at which its root does.
OCTAVO_HD float root_of_softplus(float logit) {
  const bool small = logit < SOFTPLUS_IS_EXP;
  const float e = expf(small ? 0.5f * logit : -fabsf(logit));
  const float softplus = small ? 1.0f : (logit > 0.0f ? logit : 0.0f) + log1pf(e);
#if defined(__CUDA_ARCH__)
  float root;
  asm("sqrt.approx.f32 %0, %1;" : "=f"(root) : "f"(softplus));
#else
  const float root = std::sqrt(softplus);
#endif
  return small ? e : root;
}

OCTAVO_HD float score_of(Score score, float logit, const Row& row) {
  if (score == Score::softmax) return over(power_of(logit, row.largest), row.total);
  if (logit != logit) return logit;
  return score == Score::sigmoid ? sigmoid_of(logit) : root_of_softplus(logit);
}

// Its derivative in the logit, of softmax without the part that the other logits have.
OCTAVO_HD float slope_of(Score score, float logit, const Row& row) {
  if (score == Score::softmax) return score_of(score, logit, row);
  if (logit != logit) return logit;
  const float e = expf(-fabsf(logit)), s = sigmoid_of(logit);
  if (score == Score::sigmoid) return s * over(logit >= 0.0f ? e : 1.0f, 1.0f + e);
  const float root = root_of_softplus(logit);
  if (logit < SOFTPLUS_IS_EXP) return 0.5f * root;
#if defined(__CUDA_ARCH__)
  return __fdividef(s, 2.0f * root);
#else
  return s / (2.0f * root);
#endif
}

}  // namespace router
}  // namespace octavo
