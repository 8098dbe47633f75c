// What a tile quantizes: the input itself, or what a prologue makes of it, in fp32 and rounded once to the input's
// dtype.
#pragma once

#include "octavo/activations.h"
#include "octavo/quantize.h"
#include "packs.cuh"

namespace octavo::cuda {

// A source has `Type`; `inputs`, the arrays it reads; `address(input, row, col)` in them of eight values from a column
// that is a multiple of eight, and `row_bytes(input)` from one row to the next; where it `computes`,
// `make(inputs, row, col)` of what was read; and `value(row, col)`, one value. Swiglu has a load of its own.
template <class T>
struct Plain {
  using Type = T;
  static constexpr int inputs = 1;
  static constexpr bool computes = false;
  const char* data;
  int64_t stride;

  __device__ int64_t row_bytes(int) const { return stride * Pack<T>::bytes; }
  __device__ const char* address(int, int64_t row, int64_t col) const {
    return data + (row * stride + col) * Pack<T>::bytes;
  }
  __device__ Pack<T> load(int64_t row, int64_t col) const { return load_pack<T>(address(0, row, col)); }
  __device__ float value(int64_t row, int64_t col) const { return load_value<T>(data, row * stride + col); }
};

// Results of a pair of values, each rounded once.
template <class T, class Function>
__device__ __forceinline__ Pack<T> made_by(const Function& function) {
  Pack<T> out;
#pragma unroll
  for (int pair = 0; pair < 4; ++pair) out.set(pair, function(2 * pair), function(2 * pair + 1));
  return out;
}

// Calls `body` with the activation as a constant, so that eight values share one branch.
template <class Body>
__device__ __forceinline__ auto with_activation(Activation activation, const Body& body) {
  using A = Activation;
  switch (activation) {
    case A::silu:
      return body(std::integral_constant<A, A::silu>{});
    case A::gelu:
      return body(std::integral_constant<A, A::gelu>{});
    case A::gelu_tanh:
      return body(std::integral_constant<A, A::gelu_tanh>{});
    case A::relu2:
      return body(std::integral_constant<A, A::relu2>{});
    case A::geglu:
      return body(std::integral_constant<A, A::geglu>{});
    case A::geglu_tanh:
      return body(std::integral_constant<A, A::geglu_tanh>{});
    default:
      return body(std::integral_constant<A, A::swiglu>{});
  }
}

// True where silu_moderate serves all eight values.
template <class T>
__device__ __forceinline__ bool moderate(const Pack<T>& values) {
  using P = Pack<T>;
  uint32_t most = P::magnitudes(values.word[0]);
#pragma unroll
  for (int k = 1; k < P::words; ++k) most = P::maximum(most, P::magnitudes(values.word[k]));
  return P::fp32_bits(P::across(most), 0) <= bits_of(SILU_MODERATE);
}

template <class T>
struct Activated {
  using Type = T;
  static constexpr int inputs = 2;
  static constexpr bool computes = true;
  Plain<T> x;
  const float* probs;
  int64_t features;  // F: columns of the result
  Activation activation;

  __device__ int64_t row_bytes(int) const { return x.row_bytes(0); }
  __device__ const char* address(int input, int64_t row, int64_t col) const {
    return x.address(0, row, input && is_gated(activation) ? features + col : col);
  }
  __device__ Pack<T> make(const Pack<T> (&in)[2], int64_t row, int64_t) const {
    const float prob = probs ? __ldg(probs + row) : 1.0f;  // a product with 1 is exact
    return with_activation(activation, [&](auto name) {
      return made_by<T>([&](int i) { return forward(name(), in[0].value(i), in[1].value(i), prob); });
    });
  }
  __device__ float value(int64_t row, int64_t col) const {
    const float gate = x.value(row, col), up = is_gated(activation) ? x.value(row, features + col) : gate;
    return forward(activation, gate, up, probs ? __ldg(probs + row) : 1.0f);
  }
  static __device__ float forward(Activation name, float gate, float up, float prob) {
    return (is_gated(name) ? gated_forward(name, gate, up) : act_forward(name, gate)) * prob;
  }
};

// Activated with SwiGLU, straight from registers (tile.cuh): the one that the kernels are tuned for.
template <class T>
struct Swiglu {
  using Type = T;
  static constexpr int inputs = 2;
  static constexpr bool computes = false;
  Plain<T> x;
  const float* probs;
  int64_t features;

  __device__ float probability(int64_t row, bool live) const { return probs && live ? __ldg(probs + row) : 1.0f; }
};

// Columns below F are the gate's gradient (or all there is), those from F on the up projection's.
template <class T>
struct ActivationGrad {
  using Type = T;
  static constexpr int inputs = 3;  // gate, up, dy
  static constexpr bool computes = true;
  Plain<T> x;
  Plain<T> dy;
  const float* probs;
  int64_t features;
  Activation activation;

  __device__ int64_t row_bytes(int input) const { return input == 2 ? dy.row_bytes(0) : x.row_bytes(0); }
  __device__ const char* address(int input, int64_t row, int64_t col) const {
    const int64_t at = col >= features ? col - features : col;
    if (input == 2) return dy.address(0, row, at);
    return x.address(0, row, input && is_gated(activation) ? features + at : at);
  }
  __device__ Pack<T> make(const Pack<T> (&in)[3], int64_t row, int64_t col) const {
    const bool is_up = col >= features;
    const float prob = probs ? __ldg(probs + row) : 1.0f;
    return with_activation(activation, [&](auto name) {
      return made_by<T>(
          [&](int i) { return backward(name(), in[0].value(i), in[1].value(i), in[2].value(i) * prob, is_up); });
    });
  }
  __device__ float value(int64_t row, int64_t col) const {
    const bool is_up = col >= features;
    const int64_t at = is_up ? col - features : col;
    const float gate = x.value(row, at), up = is_gated(activation) ? x.value(row, features + at) : gate;
    return backward(activation, gate, up, dy.value(row, at) * (probs ? __ldg(probs + row) : 1.0f), is_up);
  }
  static __device__ float backward(Activation name, float gate, float up, float grad, bool is_up) {
    if (!is_gated(name)) return act_backward(name, gate, grad);
    const GatedGradient both = gated_backward(name, gate, up, grad);
    return is_up ? both.dup : both.dgate;
  }
};

template <class T>
struct Normalized {
  using Type = T;
  static constexpr int inputs = 1;
  static constexpr bool computes = true;
  Plain<T> x;
  const void* gamma;
  const void* beta;
  const float* mean;  // null: RMSNorm
  const float* rest;  // what the mean's rounding left over: x - mean may cancel
  const float* rstd;

  __device__ int64_t row_bytes(int) const { return x.row_bytes(0); }
  __device__ const char* address(int, int64_t row, int64_t col) const { return x.address(0, row, col); }
  __device__ Pack<T> make(const Pack<T> (&in)[1], int64_t row, int64_t col) const {
    const Pack<T> scale = load_pack<T>(static_cast<const char*>(gamma) + col * Pack<T>::bytes);
    const Pack<T> shift = beta ? load_pack<T>(static_cast<const char*>(beta) + col * Pack<T>::bytes) : zeros<T>();
    const float center = mean ? __ldg(mean + row) : 0.0f, left = mean ? __ldg(rest + row) : 0.0f;
    const float spread = __ldg(rstd + row);
    return made_by<T>(
        [&](int i) { return forward(in[0].value(i), center, left, spread, scale.value(i), shift.value(i)); });
  }
  __device__ float value(int64_t row, int64_t col) const {
    return forward(x.value(row, col), mean ? __ldg(mean + row) : 0.0f, mean ? __ldg(rest + row) : 0.0f,
                   __ldg(rstd + row), load_value<T>(gamma, col), beta ? load_value<T>(beta, col) : 0.0f);
  }
  __device__ float forward(float in, float center, float left, float spread, float scale, float shift) const {
    if (!mean) return rms_norm(in, spread, scale);
    return layer_norm(in, center, left, spread, scale, shift);
  }
};

}  // namespace octavo::cuda
