// What activations are made of, in fp32: 2^x and quotients, x sigmoid(v), and the normal distribution. One source for
// the host and for the device; activations.h says how far results are from float64's.
#pragma once

#include <cmath>

#include "octavo/numerics.h"

namespace octavo {
namespace activation {

// ---- 2^x and quotients: the two operations that the device does better by approximation and repair

// 2^x for |x| <= 126, on the device by its approximation.
OCTAVO_HD float exp2_approximate(float x) {
#if defined(__CUDA_ARCH__)
  float result;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
#else
  return std::exp2(x);
#endif
}

// 1 / d for 1 <= d <= 2^126: the approximation flushes reciprocals below 2^-126 to zero.
OCTAVO_HD float reciprocal(float d) {
#if defined(__CUDA_ARCH__)
  float r;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(d));
  return r;
#else
  return 1.0f / d;
#endif
}

// a / d from r ~ 1 / d, rounded almost always correctly. a is finite.
OCTAVO_HD float quotient(float a, float d, float r) {
  const float q = a * r;
  return fmaf(fmaf(-d, q, a), r, q);
}

constexpr float LOG2E = 1.44269502f, LOG2E_REST = 1.92596303e-8f;

// 2^(n + rest): `power` holds n in its low bits, rest is in [-0.5, 0.5] or a little past it.
struct Power {
  float rounder;  // ROUNDER + n
  float rest;
};
constexpr float ROUNDER = 12582912.0f;  // 1.5 * 2^23, whose ulp is 1
constexpr uint32_t ROUNDER_BITS = 0x4B400000u;

OCTAVO_HD int32_t whole(const Power& power) { return static_cast<int32_t>(bits_of(power.rounder) - ROUNDER_BITS); }
OCTAVO_HD float two_to(int32_t n) { return float_of(static_cast<uint32_t>(n + 127) << 23); }

// p * 2^n for p in [0.7, 1.5] and |n| <= 125.
OCTAVO_HD float times_two_to(float p, int32_t n) { return float_of(bits_of(p) + (static_cast<uint32_t>(n) << 23)); }

// 2^(x (rate + rate_rest)) for |x rate| <= 2^20
OCTAVO_HD Power scaled_power(float x, float rate, float rate_rest) {
  Power power;
  power.rounder = fmaf(x, rate, ROUNDER);
  const float n = power.rounder - ROUNDER;
  power.rest = fmaf(x, rate_rest, fmaf(x, rate, -n));
  return power;
}

// e^x for |x| <= 2^20
OCTAVO_HD Power exp_power(float x) { return scaled_power(x, LOG2E, LOG2E_REST); }

// 2^(high + low)
OCTAVO_HD Power exp2_power(float high, float low) {
  Power power;
  power.rounder = high + ROUNDER;
  power.rest = (high - (power.rounder - ROUNDER)) + low;
  return power;
}

// ---- x * sigmoid(v) = x / (1 + e) with e = 2^power = exp(-v): silu has v = x, gelu_tanh an odd cubic of x, and
// clamped_swiglu v = 1.702 x.
//
// e stops at 2^125, so that the denominator's reciprocal is normal; what it lacks is a power of two, and the numerator
// is divided by it first, which is exact. x is at least -128, where all these functions are already 0.
struct Logistic {
  float e;
  float denominator;  // fl(1 + e)
  float inverse;
  float shift;
};

OCTAVO_HD Logistic logistic(const Power& power) {
  const int32_t n = whole(power), bounded = n < 125 ? n : 125;
  Logistic result;
  result.e = times_two_to(exp2_approximate(power.rest), bounded);
  result.denominator = 1.0f + result.e;
  result.inverse = reciprocal(result.denominator);
  result.shift = two_to(bounded - n);
  return result;
}

// Where x > end, e is too small to be seen: the value is x and the slope 1. NaN goes the same way.
OCTAVO_HD float logistic_value(float x, float bounded, float end, const Logistic& l) {
  const float value = quotient(bounded * l.shift, l.denominator, l.inverse);
  // the repair of a quotient of -0 gives +0
  const float sign_kept = float_of(abs_bits(value) | (bits_of(x) & ~ABS_BITS));
  return x <= end ? sign_kept : x;
}

// d/dx of x * sigmoid(v(x)) = s + x s (1 - s) v' = s (1 + (1 - s) x v'); inner + inner_rest is x v'.
OCTAVO_HD float logistic_slope(float x, float inner, float inner_rest, float end, const Logistic& l) {
  // the sigmoid enters twice: what fl(1 + e) lost is put back
  const float lost = l.denominator > 2.0f ? 1.0f - (l.denominator - l.e) : l.e - (l.denominator - 1.0f);
  const float residue = fmaf(-lost, l.inverse, fmaf(-l.denominator, l.inverse, 1.0f));
  const float s = fmaf(residue, l.inverse, l.inverse);
  const float rest = l.e > 1.0f ? 1.0f - s : l.e * s;  // 1 - s, by the way that cancels nothing
  const float slope = (fmaf(rest, inner, fmaf(rest, inner_rest, 1.0f)) * l.shift) * s;
  return x <= end ? slope : x > end ? 1.0f : x;
}

// Keeps the exponents within their integers; NaN becomes `low`.
OCTAVO_HD float bounded(float x, float low, float high) { return smaller(x > low ? x : low, high); }

struct Pair {
  float high;
  float low;
};

constexpr float SILU_LOW = -128.0f, SILU_END = 20.0f, GELU_TANH_LOW = -12.0f, GELU_TANH_END = 6.0f;

// gpt-oss's: the gate's largest value and the sigmoid's factor, the latter also times log2(e).
constexpr float CLAMP_LIMIT = 7.0f, CLAMP_LOW = -76.0f, ALPHA = 1.702f, ALPHA_REST = -2.193451e-08f;
constexpr float ALPHA_LOG2E = 2.455467f, ALPHA_LOG2E_REST = -2.6109499e-08f;

// x, or the limit past it; NaN stays.
OCTAVO_HD float at_most_limit(float x) { return x > CLAMP_LIMIT ? CLAMP_LIMIT : x; }

// 1.702 x in two floats
OCTAVO_HD Pair clamped_inner(float x) {
  const float high = ALPHA * x;
  return {high, fmaf(ALPHA_REST, x, fmaf(ALPHA, x, -high))};
}

// 2 sqrt(2 / pi) (x + 0.044715 x^3) log2(e) = x (A + B x^2), in two floats: the argument reaches 150, where the
// rounding of one float alone would cost 100 ulp.
OCTAVO_HD Power gelu_tanh_power(float x) {
  constexpr float A = 2.30220819f, A_REST = 1.29484024e-8f, B = 0.102943242f, B_REST = -2.01619832e-9f;
  const float square = x * x, square_rest = fmaf(x, x, -square);
  const float product = B * square;
  const float product_rest = fmaf(B, square, -product) + fmaf(B, square_rest, B_REST * square);
  const float sum = A + product, back = sum - A;
  const float sum_rest = ((A - (sum - back)) + (product - back)) + (product_rest + A_REST);
  const float high = -x * sum;
  const float low = -fmaf(x, sum_rest, fmaf(x, sum, high));
  return exp2_power(high, low);
}

// 2 sqrt(2 / pi) (x + 3 * 0.044715 x^3), which is x v', in two floats.
OCTAVO_HD Pair gelu_tanh_inner(float x) {
  constexpr float LINEAR = 1.59576917f, CUBIC = 0.214064449f, CUBIC_REST = -2.54083421e-10f;
  const float square = x * x, square_rest = fmaf(x, x, -square);
  const float product = CUBIC * square;
  const float product_rest = fmaf(CUBIC, square, -product) + fmaf(CUBIC, square_rest, CUBIC_REST * square);
  const float sum = LINEAR + product, back = sum - LINEAR;
  const float sum_rest = ((LINEAR - (sum - back)) + (product - back)) + product_rest;
  const float high = x * sum;
  return {high, fmaf(x, sum_rest, fmaf(x, sum, -high))};
}

// ---- gelu with erf: x Phi(x), through Phi(-z) = 2^power * ratio with z = |x|
//
// ratio = Phi(-z) exp(z^2 / 2), a smooth function, as a polynomial of (z - 3) / (z + 3) over z + 3; fitted by
// least squares of the relative error on [0, 15], each coefficient rounded before the lower ones: below 2^-26.
struct Normal {
  float z;
  float ratio;
  float p;    // 2^rest
  int32_t n;  // 0 to -163: exp(-z^2 / 2) = p * 2^n
};

OCTAVO_HD Normal normal_tail(float x) {
  Normal result;
  const float z = smaller(float_of(abs_bits(x)), 15.0f);
  // Values that end in _rest are what the rounding of their namesakes lost.
  const float denominator = z + 3.0f, inverse = reciprocal(denominator);
  const float denominator_rest = z > 3.0f ? 3.0f - (denominator - z) : z - (denominator - 3.0f);
  const float numerator = z - 3.0f;  // exact from 1.5 to 6; below, numerator_rest is what 3 - z lost
  const float numerator_rest = z > 3.0f ? (z - numerator) - 3.0f : z - (numerator + 3.0f);
  const float t = quotient(numerator, denominator, inverse);
  const float t_rest = (fmaf(-denominator, t, numerator) + fmaf(-denominator_rest, t, numerator_rest)) * inverse;
  float h = 5.52035999e-05f;
  h = fmaf(h, t, 0.000132595334f);
  h = fmaf(h, t, -0.000244929106f);
  h = fmaf(h, t, -0.00103381288f);
  h = fmaf(h, t, 0.0010245447f);
  h = fmaf(h, t, 0.00696972245f);
  h = fmaf(h, t, -0.0104624238f);
  h = fmaf(h, t, -0.0472627394f);
  h = fmaf(h, t, 0.230017692f);
  h = fmaf(h, t, -0.509332001f);
  constexpr float C0 = 0.729083717f, C0_REST = -2.38423361e-08f;
  const float product = h * t, product_rest = fmaf(h, t_rest, fmaf(h, t, -product));
  const float sum = C0 + product, sum_rest = ((C0 - sum) + product) + (product_rest + C0_REST);
  // -z^2 / 2 * log2(e) in two floats
  constexpr float H = -0.5f * LOG2E, H_REST = -0.5f * LOG2E_REST;
  const float square = z * z, square_rest = fmaf(z, z, -square);
  const float high = H * square;
  const float low = fmaf(H, square, -high) + fmaf(H, square_rest, H_REST * square);
  const Power power = exp2_power(high, low);
  result.z = z;
  const float ratio = sum * inverse;
  const float residue = fmaf(-denominator, ratio, sum) + fmaf(-denominator_rest, ratio, sum_rest);
  result.ratio = fmaf(residue, inverse, ratio);
  result.p = exp2_approximate(power.rest);
  result.n = whole(power);
  return result;
}

// v * 2^n for n from -163 to 0, rounded once where the result is subnormal.
OCTAVO_HD float scaled_down(float v, int32_t n) {
  const int32_t first = n > -100 ? n : -100;
  return (v * two_to(first)) * two_to(n - first);
}

OCTAVO_HD float gelu_value(float x, const Normal& normal) {
  const float product = normal.z * normal.ratio, product_rest = fmaf(normal.z, normal.ratio, -product);
  const float tail = scaled_down(fmaf(product, normal.p, product_rest * normal.p), normal.n);  // z Phi(-z)
  const float value = x >= 0.0f ? x - tail : -tail;
  return x == x ? value : x;
}

// Phi(x) + x phi(x); with G = ratio - z / sqrt(2 pi): exp(-z^2 / 2) G below 0, 1 minus it above.
OCTAVO_HD float gelu_slope(float x, const Normal& normal) {
  const float tail = scaled_down(fmaf(-0.398942292f, normal.z, normal.ratio) * normal.p, normal.n);
  const float slope = x > 0.0f ? 1.0f - tail : tail;
  return x == x ? slope : x;
}

}  // namespace activation

}  // namespace octavo
