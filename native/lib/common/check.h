// Limits and helpers that all argument checks share.
#pragma once

#include "octavo/types.h"

namespace octavo {

constexpr int64_t MAX_ROWS = int64_t{1} << 30, MAX_COLS = int64_t{1} << 30, MAX_STRIDE = int64_t{1} << 32;
constexpr int64_t MAX_GROUPS = 65536, PLAN_ALIGNMENT = 32;
constexpr int64_t MAX_CTAS = 65536;  // a limit past what any device has is none

inline bool aligned(const void* pointer, int64_t bytes) { return reinterpret_cast<uintptr_t>(pointer) % bytes == 0; }

// True if the scales are fp32; otherwise they are bytes.
inline bool wide_scales(Scaling scaling) { return scaling != Scaling::mxfp8 && scaling != Scaling::nvfp4; }

// True of the formats that Hopper's tensor cores do not multiply: codes are decoded to bf16 in front of a product.
inline bool is_emulated(Scaling scaling) { return scaling == Scaling::mxfp8 || scaling == Scaling::nvfp4; }

template <typename Enum>
bool named(Enum value, Enum last) {
  return static_cast<int32_t>(value) >= 0 && value <= last;
}

inline Error check_ctas(int ctas) {
  if (ctas < 0) return invalid("ctas is negative; give the most CTAs that the kernels may have, or 0 for no limit");
  return {};
}

inline Error check_counts(int64_t rows, int64_t groups) {
  if (rows < 0) return invalid("rows is negative; give the rows of the operand, 0 or more");
  if (rows > MAX_ROWS) return invalid("rows is past 2^30, the most that row numbers hold; split the operand");
  if (groups < 1) return invalid("groups is less than 1; give the number of groups, 1 where there is one operand");
  if (groups > MAX_GROUPS) return invalid("groups is past 65536; split the call");
  return {};
}

}  // namespace octavo
