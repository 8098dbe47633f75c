// Sources of a tile that are the result of a prologue, computed in fp32 and rounded once to the input's dtype.
#pragma once

#include "arrays.cuh"
#include "octavo/activations.h"
#include "slots.cuh"

namespace octavo::cuda {

// Calls `body` with the activation as a compile-time constant, so that eight values share one branch.
template <class Body>
__device__ __forceinline__ auto with_activation(Activation activation, const Body& body) {
  using A = Activation;
  switch (activation) {
    case A::silu: return body(std::integral_constant<A, A::silu>{});
    case A::gelu: return body(std::integral_constant<A, A::gelu>{});
    case A::gelu_tanh: return body(std::integral_constant<A, A::gelu_tanh>{});
    case A::relu2: return body(std::integral_constant<A, A::relu2>{});
    case A::geglu: return body(std::integral_constant<A, A::geglu>{});
    case A::geglu_tanh: return body(std::integral_constant<A, A::geglu_tanh>{});
    case A::clamped_swiglu: return body(std::integral_constant<A, A::clamped_swiglu>{});
    default: return body(std::integral_constant<A, A::swiglu>{});
  }
}

// activation_parts, by the shorter path if values are rounded to 16 bits. Every way in which a value can get into a
// tile uses it, so the bits are the same.
template <class T, bool want_value, bool want_slope>
__device__ __forceinline__ ValueAndSlope parts_of(Activation name, float x) {
  if constexpr (Pack<T>::bytes == 2) {
    const bool is_silu = name == Activation::silu || name == Activation::swiglu;
    if (is_silu && abs_bits(x) <= bits_of(SILU_MODERATE)) return silu_moderate<want_value, want_slope>(x);
    if (name == Activation::clamped_swiglu && abs_bits(x) <= bits_of(CLAMPED_MODERATE))
      return clamped_moderate<want_value, want_slope>(x);
  }
  return activation_parts<want_value, want_slope>(name, x);
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
    const float prob = probs ? __ldg(probs + row) : 1.0f;  // multiplying by 1 is exact
    return with_activation(activation, [&](auto name) {
      return pack_of<T>([&](int i) { return forward(name(), in[0].value(i), in[1].value(i), prob); });
    });
  }
  __device__ float value(int64_t row, int64_t col) const {
    const float gate = x.value(row, col), up = is_gated(activation) ? x.value(row, features + col) : gate;
    return forward(activation, gate, up, probs ? __ldg(probs + row) : 1.0f);
  }
  static __device__ float forward(Activation name, float gate, float up, float prob) {
    const float value = parts_of<T, true, false>(name, gate).value;
    return (is_gated(name) ? value * gated_factor(name, up) : value) * prob;
  }
};

// Columns below F are the gate's gradient (or the only one), those from F on the up projection's.
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
      return pack_of<T>(
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
    if (is_gated(name) && is_up) return up_passes(name, up) ? grad * parts_of<T, true, false>(name, gate).value : 0.0f;
    const float dgate = grad * parts_of<T, false, true>(name, gate).slope;
    return is_gated(name) ? dgate * gated_factor(name, up) : dgate;
  }
};

// Each operation rounds. `rest` is what the rounding of the mean lost (reductions/norm.h).
OCTAVO_HD float layer_norm(float x, float mean, float rest, float rstd, float gamma, float beta) {
  return (((x - mean) - rest) * rstd) * gamma + beta;
}

OCTAVO_HD float rms_norm(float x, float rstd, float gamma) { return (x * rstd) * gamma; }

template <class T>
struct Normalized {
  using Type = T;
  static constexpr int inputs = 1;
  static constexpr bool computes = true;
  Plain<T> x;
  const void* gamma;
  const void* beta;
  const float* mean;  // null: RMSNorm
  const float* rest;
  const float* rstd;

  __device__ int64_t row_bytes(int) const { return x.row_bytes(0); }
  __device__ const char* address(int, int64_t row, int64_t col) const { return x.address(0, row, col); }
  __device__ Pack<T> make(const Pack<T> (&in)[1], int64_t row, int64_t col) const {
    const Pack<T> scale = load_pack<T>(static_cast<const char*>(gamma) + col * Pack<T>::bytes);
    const Pack<T> shift = beta ? load_pack<T>(static_cast<const char*>(beta) + col * Pack<T>::bytes) : zeros<T>();
    const float center = mean ? __ldg(mean + row) : 0.0f, left = mean ? __ldg(rest + row) : 0.0f;
    const float spread = __ldg(rstd + row);
    return pack_of<T>(
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

// Activated with SwiGLU, plain or clamped, the case that the kernels are tuned for (swiglu.cuh): gates are loaded into
// registers, up into slots.
template <class T>
struct Swiglu {
  using Type = T;
  static constexpr int inputs = 1;
  static constexpr bool computes = false;
  static constexpr int kept = 1;
  Plain<T> x;
  const float* probs;
  int64_t features;
  bool clamped;

  __device__ int64_t row_bytes(int) const { return x.row_bytes(0); }
  __device__ const char* address(int, int64_t row, int64_t col) const { return x.address(0, row, col); }
  __device__ void fetch_kept(const Tile& tile, void* slots) const {
    const int live = tile.col() < tile.end ? tile.live_rows() : 0;
    Slots<T>::fetch(slots, 0, x.address(0, tile.first_row(), features + tile.col()), x.row_bytes(0), live);
  }
};

// Columns whose products with dy are summed in one chunk: eight at a time, then pairs of neighbouring eights, and so
// on. The chunks of a row are then added from the first one on (dprobs.cu).
constexpr int PRODUCT_CHUNK = 128;

// ActivationGrad with SwiGLU, likewise. A tile is read once and yields two: the gate's gradient and, F columns further,
// the up projection's. F is a multiple of every block size. Slots: dy, replaced by the gate's gradients, and up,
// replaced by its own.
template <class T>
struct SwigluGrad {
  using Type = T;
  static constexpr int inputs = 1;
  static constexpr bool computes = false;
  static constexpr int kept = 2;
  Plain<T> x;
  Plain<T> dy;
  const float* probs;
  int64_t features;
  bool clamped;
  float* products;  // [chunks of columns][M] or null: sums of dy act(gate) up over a chunk's columns
  int64_t rows;     // M

  __device__ int64_t row_bytes(int) const { return x.row_bytes(0); }
  __device__ const char* address(int, int64_t row, int64_t col) const { return x.address(0, row, col); }
  __device__ void fetch_kept(const Tile& tile, void* slots) const {
    const int live = tile.col() < tile.end ? tile.live_rows() : 0;
    Slots<T>::fetch(slots, 0, dy.address(0, tile.first_row(), tile.col()), dy.row_bytes(0), live);
    Slots<T>::fetch(slots, 1, x.address(0, tile.first_row(), features + tile.col()), x.row_bytes(0), live);
  }
};

// SwigluGrad where F is no multiple of the block size, and a block of the joined row [2 F] may hold both gradients. A
// tile yields itself alone, and tiles F columns apart read the same inputs, the second one from the L2 cache. F is a
// multiple of eight. Slots: dy, replaced by the gate's gradients, and up.
template <class T>
struct JoinedSwigluGrad : SwigluGrad<T> {
  __device__ int64_t feature(int64_t col) const { return col >= this->features ? col - this->features : col; }
  __device__ const char* address(int, int64_t row, int64_t col) const { return this->x.address(0, row, feature(col)); }
  __device__ void fetch_kept(const Tile& tile, void* slots) const {
    const int live = tile.col() < tile.end ? tile.live_rows() : 0;
    const int64_t row = tile.first_row(), at = feature(tile.col());
    Slots<T>::fetch(slots, 0, this->dy.address(0, row, at), this->dy.row_bytes(0), live);
    // Its own gradient depends on up where up is clamped.
    const bool wanted = this->clamped || tile.col() < this->features;
    Slots<T>::fetch(slots, 1, this->x.address(0, row, this->features + at), this->row_bytes(0), wanted ? live : 0);
  }
};

// Swiglu, SwigluGrad and JoinedSwigluGrad.
template <class S>
constexpr bool keeps_slots = !S::computes && !is_plain<S> && !is_packed<S> && !is_rounded<S> && !is_interleaved<S>;

template <class S>
constexpr bool makes_halves = std::is_same_v<S, SwigluGrad<typename S::Type>>;

template <class S>
constexpr bool joins_halves = std::is_same_v<S, JoinedSwigluGrad<typename S::Type>>;

}  // namespace octavo::cuda
