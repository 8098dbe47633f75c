// Activations and their derivatives, in fp32. One source for the host and for the device.
//
// A caller converts its input to fp32 (exact), calls these, and rounds once to the activation dtype. Every function is
// total: NaN gives NaN, and an infinity gives the limit. Results may differ in the last bits between host and device,
// whose reciprocals and 2^x differ; on one device they depend on the arguments alone.
//
// Error in ulp of float64's result, subnormal results included: the largest of 2^24 arguments on the host, where the
// reciprocal is exact. Anything above 4 is a fault, on the device too. The derivatives have roots in [-4, -1/4]; there
// it is the absolute error that is given, in units of 2^-24, and anything above 2 is a fault.
//
//                 value    derivative    in [-4, -1/4]
//   silu          2.3      3.2           0.9
//   clamped       2.3      3.2           0.9
//   gelu          2.6      2.5           1.0
//   gelu_tanh     2.1      3.0           0.9
//   relu2         0.5      0             0
//
// A product after it (gate times up, times the row's probability) adds half an ulp each.
#pragma once

#include "octavo/elementary.h"
#include "octavo/numerics.h"

namespace octavo {
// ---- of one argument, by name. Of a gated activation these are the function of its gate.

struct ValueAndSlope {
  float value;
  float slope;
};

template <bool want_value, bool want_slope>
OCTAVO_HD ValueAndSlope activation_parts(Activation name, float x) {
  using namespace activation;
  ValueAndSlope result = {0.0f, 0.0f};
  if (name == Activation::silu || name == Activation::swiglu) {
    const float near = bounded(x, SILU_LOW, SILU_END);
    const Logistic parts = logistic(exp_power(-near));
    if (want_value) result.value = logistic_value(x, near, SILU_END, parts);
    if (want_slope) result.slope = logistic_slope(x, near, 0.0f, SILU_END, parts);
  } else if (name == Activation::gelu_tanh || name == Activation::geglu_tanh) {
    const float near = bounded(x, GELU_TANH_LOW, GELU_TANH_END);
    const Logistic parts = logistic(gelu_tanh_power(near));
    if (want_value) result.value = logistic_value(x, near, GELU_TANH_END, parts);
    if (want_slope) {
      const Pair inner = gelu_tanh_inner(near);
      result.slope = logistic_slope(x, inner.high, inner.low, GELU_TANH_END, parts);
    }
  } else if (name == Activation::gelu || name == Activation::geglu) {
    const Normal parts = normal_tail(x);
    if (want_value) result.value = gelu_value(x, parts);
    if (want_slope) result.slope = gelu_slope(x, parts);
  } else if (name == Activation::clamped_swiglu) {
    const float near = bounded(x, CLAMP_LOW, CLAMP_LIMIT);
    const Logistic parts = logistic(scaled_power(-near, ALPHA_LOG2E, ALPHA_LOG2E_REST));
    if (want_value) result.value = logistic_value(at_most_limit(x), near, CLAMP_LIMIT, parts);
    if (want_slope) {
      const Pair inner = clamped_inner(near);
      result.slope = x > CLAMP_LIMIT ? 0.0f : logistic_slope(x, inner.high, inner.low, CLAMP_LIMIT, parts);
    }
  } else {
    const float kept = x <= 0.0f ? 0.0f : x;  // NaN too
    if (want_value) result.value = kept * kept;
    if (want_slope) result.slope = kept + kept;
  }
  return result;
}

// ---- the same by a shorter path, for arguments that are not extreme

// silu for |x| <= SILU_MODERATE and clamped_swiglu's function for |x| <= CLAMPED_MODERATE, where nothing over- or
// underflows, within 6 ulp in half the steps: for results that are rounded to 16 bits, in the kernels that run at the
// speed of memory.
constexpr float SILU_MODERATE = 80.0f, CLAMPED_MODERATE = 47.0f;

// x * sigmoid(inner) and its derivative in x, where `inner` is x times a factor; rate + rate_rest is the factor times
// log2(e).
template <bool want_value, bool want_slope>
OCTAVO_HD ValueAndSlope logistic_moderate(float x, float inner, float rate, float rate_rest) {
  using namespace activation;
  constexpr float LN2 = 0.693147182f;
  const float high = x * -rate;
  const float lost_high = fmaf(x, rate, high), low = fmaf(x, -rate_rest, -lost_high);
  const float rough = exp2_approximate(high), e = fmaf(rough * LN2, low, rough);
  const float denominator = 1.0f + e, inverse = reciprocal(denominator);
  ValueAndSlope result = {0.0f, 0.0f};
  if (want_value) result.value = quotient(x, denominator, inverse);
  if (want_slope) {
    // as in logistic_slope
    const float lost = denominator > 2.0f ? 1.0f - (denominator - e) : e - (denominator - 1.0f);
    const float residue = fmaf(-lost, inverse, fmaf(-denominator, inverse, 1.0f));
    const float s = fmaf(residue, inverse, inverse);
    const float rest = e > 1.0f ? 1.0f - s : e * s;
    result.slope = fmaf(rest, inner, 1.0f) * s;
  }
  return result;
}

template <bool want_value, bool want_slope>
OCTAVO_HD ValueAndSlope silu_moderate(float x) {
  return logistic_moderate<want_value, want_slope>(x, x, activation::LOG2E, activation::LOG2E_REST);
}

template <bool want_value, bool want_slope>
OCTAVO_HD ValueAndSlope clamped_moderate(float x) {
  using namespace activation;
  const float near = at_most_limit(x);
  ValueAndSlope result = logistic_moderate<want_value, want_slope>(near, ALPHA * near, ALPHA_LOG2E, ALPHA_LOG2E_REST);
  if (want_slope && x > CLAMP_LIMIT) result.slope = 0.0f;
  return result;
}

// ---- with gates, probabilities and gradients

OCTAVO_HD float act_forward(Activation name, float x) { return activation_parts<true, false>(name, x).value; }

OCTAVO_HD float act_derivative(Activation name, float x) { return activation_parts<false, true>(name, x).slope; }

// What a gate multiplies: the up projection, in clamped_swiglu fl(u + 1) of what its clamp leaves. NaN stays.
OCTAVO_HD float gated_factor(Activation name, float up) {
  if (name != Activation::clamped_swiglu) return up;
  const float limit = activation::CLAMP_LIMIT, below = activation::at_most_limit(up);
  return (below < -limit ? -limit : below) + 1.0f;
}

// Whether the up projection has a gradient; past the clamp's limits it has none.
OCTAVO_HD bool up_passes(Activation name, float up) {
  return name != Activation::clamped_swiglu || !(fabsf(up) > activation::CLAMP_LIMIT);
}

// fl(fl(act(gate) * factor) * prob); without a gate fl(act(x) * prob); without probabilities the last product is left
// out.
OCTAVO_HD float gated_forward(Activation name, float gate, float up) {
  return act_forward(name, gate) * gated_factor(name, up);
}

OCTAVO_HD float gated_forward(Activation name, float gate, float up, float prob) {
  return gated_forward(name, gate, up) * prob;
}

// Without a gate: fl(dy * act'(x)). With probabilities the caller passes fl(dy * prob) as dy.
OCTAVO_HD float act_backward(Activation name, float x, float dy) { return dy * act_derivative(name, x); }

struct GatedGradient {
  float dgate;
  float dup;
};

// dgate = fl(fl(dy * act'(gate)) * factor), dup = fl(dy * act(gate)), or 0 past a clamp. The slope comes first: it is
// at most 1.13 (relu2 aside), so that the first product overflows only where dy nearly does.
OCTAVO_HD GatedGradient gated_backward(Activation name, float gate, float up, float dy) {
  const ValueAndSlope parts = activation_parts<true, true>(name, gate);
  return {(dy * parts.slope) * gated_factor(name, up), up_passes(name, up) ? dy * parts.value : 0.0f};
}

}  // namespace octavo
