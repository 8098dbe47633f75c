// One step of AdamW: moments, master weight, and what is written from the master.
//
// octavo_numerics.adamw_step is the definition, with its random bits (octavo_numerics.rounding_bits) and its moments in
// 8 bits (encode_blocks). Operations are those of numerics.h: one rounding each, none contracted.
#pragma once

#include <cmath>

#include "octavo/numerics.h"
#include "octavo/quantize.h"

namespace octavo {

constexpr int STEP_BITS = 24;  // steps from 2^24 - 1 on count as that in the bias corrections
constexpr int MOMENT_BLOCK = 128;

// Hyperparameters. Index 0 is of the first moment, 1 of the second.
struct AdamWRule {
  float lr = 0.0f;
  const float* lr_device = nullptr;  // where given, read instead of `lr`
  float weight_decay = 0.0f, eps = 0.0f;
  float kept[2] = {}, added[2] = {};     // fp32(beta) and fp32(1 - beta)
  float corrections[2][STEP_BITS] = {};  // fp32(1 - beta^(2^i)), the power by squaring in binary64
};

// What the random bits depend on, apart from the position: octavo_numerics.rounding_bits.
struct AdamWDraws {
  uint64_t seed = 0;
  uint32_t tensor = 0;
  int64_t step = 1;                    // number of the step, the first being 1
  const float* step_device = nullptr;  // where given, read instead of `step`; less than 1 counts as 1
  int64_t first_row = 0;               // the number in the whole tensor of the array's first row
};

// `rows` rows of the array's last axis, `cols` elements each, one after another.
struct AdamWArrays {
  int64_t rows = 0, cols = 0;
  void* master = nullptr;
  DType master_dtype = DType::f32;  // f32, or bf16, which is rounded stochastically
  const void* grad = nullptr;
  DType grad_dtype = DType::f32;
  void* moment[2] = {};              // fp32, or codes of 8 bits where there are tops
  int32_t* tops[2] = {};             // [rows, ceil(cols / 128)] or null
  void* values = nullptr;            // null, or the new master rounded to nearest
  DType values_dtype = DType::bf16;  // bf16 or f16
};

// Codes of the new master, cast to bf16: E4M3 in square blocks of 128, of stacked matrices of `matrix_rows` rows each.
struct AdamWCodes {
  int64_t matrix_rows = 0;
  Plane rowwise, columnwise;
  float amax_epsilon = 0.0f;
  bool power_of_two = false;
};

struct AdamWArgs {
  AdamWArrays arrays;
  AdamWRule rule;
  AdamWDraws draws;
  AdamWCodes codes;                      // both planes null: none
  const float* inverse_scale = nullptr;  // multiplies the gradient where given
  const uint8_t* skip = nullptr;         // where given and not 0, nothing is changed

  bool writes_codes() const { return codes.rowwise.codes != nullptr || codes.columnwise.codes != nullptr; }
  bool in_blocks() const { return arrays.tops[0] != nullptr; }
  bool draws_bits() const { return in_blocks() || arrays.master_dtype == DType::bf16; }
};

// fp32 factors of a step: octavo_numerics.adamw_scalars.
struct AdamWScalars {
  float decay, kept[2], added[2], step_size, root_scale, eps;
};

OCTAVO_HD float root_of(float value) {
#if defined(__CUDA_ARCH__)
  return __fsqrt_rn(value);
#else
  return std::sqrt(value);
#endif
}

OCTAVO_HD float quotient_of(float a, float b) {
#if defined(__CUDA_ARCH__)
  return __fdiv_rn(a, b);
#else
  return a / b;
#endif
}

OCTAVO_HD AdamWScalars adamw_scalars(const AdamWRule& rule, float lr, int64_t step) {
  constexpr int64_t most = (int64_t{1} << STEP_BITS) - 1;
  const int64_t count = step < most ? step : most;
  float corrected[2] = {0.0f, 0.0f};
  for (int bit = 0; bit < STEP_BITS && count >> bit; ++bit) {
    if (!(count >> bit & 1)) continue;
    for (int i = 0; i < 2; ++i) corrected[i] = corrected[i] + (1.0f - corrected[i]) * rule.corrections[i][bit];
  }
  AdamWScalars scalars;
  scalars.decay = 1.0f - lr * rule.weight_decay;
  for (int i = 0; i < 2; ++i) scalars.kept[i] = rule.kept[i], scalars.added[i] = rule.added[i];
  scalars.step_size = quotient_of(lr, corrected[0]);
  scalars.root_scale = quotient_of(1.0f, root_of(corrected[1]));
  scalars.eps = rule.eps;
  return scalars;
}

// Both moments after the step, in place.
OCTAVO_HD void adamw_moments(float& first, float& second, float grad, const AdamWScalars& scalars) {
  first = first * scalars.kept[0] + grad * scalars.added[0];
  second = second * scalars.kept[1] + (grad * grad) * scalars.added[1];
}

// ---- stochastic rounding; `draw` has 16 bits

OCTAVO_HD uint16_t bf16_stochastic(float value, uint32_t draw) {
  const uint32_t bits = bits_of(value), rest = bits & ABS_BITS;
  if (rest >= INF_BITS) return rest > INF_BITS ? 0x7FC0 : static_cast<uint16_t>(bits >> 16);
  return static_cast<uint16_t>((bits + draw) >> 16);
}

// ---- moments in 8 bits. Moment 0 is signed, 1 is not

constexpr int MOMENT_SHIFT = 20;
constexpr int32_t NOT_FINITE_TOP = -1, LARGEST_TOP = 0x7F7;

OCTAVO_HD constexpr int32_t moment_levels(int moment) { return moment == 0 ? 127 : 255; }

// The top of a block whose largest magnitude has these bits.
OCTAVO_HD int32_t moment_top(uint32_t largest) {
  if (largest >= INF_BITS) return NOT_FINITE_TOP;
  const int32_t top = static_cast<int32_t>((largest + ((1u << MOMENT_SHIFT) - 1)) >> MOMENT_SHIFT);
  return top < LARGEST_TOP ? top : LARGEST_TOP;
}

OCTAVO_HD uint32_t moment_code(int moment, float value, int32_t top, uint32_t draw) {
  const uint32_t bits = bits_of(value), rest = bits & ABS_BITS;
  const int32_t carried = static_cast<int32_t>((rest + (draw << (MOMENT_SHIFT - 16))) >> MOMENT_SHIFT);
  int32_t code = (carried < top ? carried : top) - top + moment_levels(moment);
  const int32_t least = moment == 0 ? 0 : 1;
  code = code < least ? least : code;
  if (rest == 0 || top == NOT_FINITE_TOP) return 0;
  return static_cast<uint32_t>(code) | (moment == 0 && code > 0 ? bits >> 24 & 0x80u : 0u);
}

OCTAVO_HD float moment_value(int moment, uint32_t code, int32_t top) {
  const uint32_t magnitude = moment == 0 ? code & 0x7Fu : code;
  const uint32_t count = magnitude + static_cast<uint32_t>(top - moment_levels(moment));
  const uint32_t bits = (magnitude ? count << MOMENT_SHIFT : 0u) | (moment == 0 ? (code & 0x80u) << 24 : 0u);
  return float_of(top == NOT_FINITE_TOP ? NAN_BITS : bits);
}

// Counter word 3 of a draw: octavo_numerics.rounding_bits. Streams: 0 the master, 1 and 2 the moments.
OCTAVO_HD uint32_t adamw_stream(uint32_t tensor, int stream) {
  return 0x80000000u + 4u * tensor + static_cast<uint32_t>(stream);
}

Error check_adamw(const AdamWArgs& args);
Error adamw_cuda(const AdamWArgs& args, void* stream);

}  // namespace octavo
