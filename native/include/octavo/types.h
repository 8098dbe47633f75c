// Names that every part of the native library shares. No torch, no jaxlib, no CUDA header.
#pragma once

#include <cstddef>
#include <cstdint>

#if defined(__CUDACC__)
#define OCTAVO_HD __host__ __device__ __forceinline__
#else
#define OCTAVO_HD inline
#endif

namespace octavo {

// The numbers are part of the ABI (ABI_LEVEL): Python and the FFI attributes pass them.
enum class DType : int32_t { f32 = 0, f16 = 1, bf16 = 2 };
enum class Format : int32_t { e4m3 = 0, e5m2 = 1, e2m1 = 2 };
enum class Scaling : int32_t { delayed = 0, current = 1, row = 2, block = 3, mxfp8 = 4, nvfp4 = 5 };
enum class Direction : int32_t { rowwise = 0, columnwise = 1 };
enum class Operand : int32_t { x = 0, w = 1, dy = 2 };

// plain: as octavo.GroupedTensorSpec lays it out. native: as the Hopper kernels read it. values: no codes, but the bf16
// values that stand for them in the native order (layouts.h).
enum class Layout : int32_t { plain = 0, native = 1, values = 2 };

enum class Activation : int32_t {
  silu = 0,
  gelu = 1,
  gelu_tanh = 2,
  relu2 = 3,
  swiglu = 4,
  geglu = 5,
  geglu_tanh = 6,
  clamped_swiglu = 7
};
enum class Norm : int32_t { rms = 0, layer = 1 };

constexpr int32_t ABI_LEVEL = 2;

enum class ErrorCode : int32_t { ok = 0, invalid_argument = 1, unsupported = 2, workspace_too_small = 3, cuda = 4 };

// What a launch returns. `message` has static storage, or belongs to the CUDA runtime.
struct Error {
  ErrorCode code = ErrorCode::ok;
  const char* message = "";
  explicit operator bool() const { return code != ErrorCode::ok; }
};

inline Error invalid(const char* message) { return {ErrorCode::invalid_argument, message}; }
inline Error unsupported(const char* message) { return {ErrorCode::unsupported, message}; }

// Gated activations read a gate and an up projection side by side, [M, 2 F], and give [M, F].
OCTAVO_HD bool is_gated(Activation activation) { return activation >= Activation::swiglu; }

// Elements along the blocked axis that share a scale; 0 where a scale covers a row or a group.
OCTAVO_HD int block_size(Scaling scaling) {
  return scaling == Scaling::block ? 128 : scaling == Scaling::mxfp8 ? 32 : scaling == Scaling::nvfp4 ? 16 : 0;
}

OCTAVO_HD int64_t ceil_div(int64_t value, int64_t size) { return (value + size - 1) / size; }

OCTAVO_HD int dtype_bytes(DType dtype) { return dtype == DType::f32 ? 4 : 2; }

}  // namespace octavo
