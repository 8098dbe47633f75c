// Rows of tokens to rows in group order, and back.
//
//   permute  reads  a token's row once       writes each of its rows
//   combine  reads  each row                 writes a token's row once
//   dot      reads  each row, and dy once per choice, mostly from the L1 cache
//   bound    device memory
//
// Threads run along a token's columns, eight each; narrow rows share a CTA.
#include "common/check.h"
#include "cuda/device/launch.h"
#include "cuda/device/packs.cuh"
#include "octavo/permute.h"

namespace octavo {

namespace cuda {
namespace {

constexpr int THREADS = 128, DOT_THREADS = 256, WARP = 32;

// The row of a choice. `inside`: the position is a row of the array. `live`: it is, and the choice is routed.
struct ChoiceRow {
  int64_t row;
  bool inside, live;
  float weight;
};

__device__ __forceinline__ ChoiceRow row_of(const Choices& choices, int64_t choice) {
  const int64_t row = __ldg(choices.position + choice);
  const bool routed = __ldg(choices.routed + choice) != 0;  // loaded at once, not after the row
  const bool inside = row >= 0 && row < choices.rows;
  const float weight = choices.weights == nullptr ? 1.0f : __ldg(choices.weights + choice);
  // a weight of nobody's choice may be anything, and adds nothing
  return {row, inside, inside && routed, routed ? weight : 0.0f};
}

// One value, with the interface of a Pack.
template <class T>
struct Single {
  static constexpr int values = 1;
  uint32_t bits;

  __device__ float value(int) const {
    if constexpr (std::is_same_v<T, F32>) return float_of(bits);
    if constexpr (std::is_same_v<T, BF16>) return float_of(bits << 16);
    return float_of_f16(static_cast<uint16_t>(bits));
  }
};

template <class T>
struct Eight : Pack<T> {
  static constexpr int values = 8;
};

template <class T, bool WIDE>
using Piece = std::conditional_t<WIDE, Eight<T>, Single<T>>;

template <class T, bool WIDE>
__device__ __forceinline__ Piece<T, WIDE> load_piece(const void* base, int64_t element) {
  const char* at = static_cast<const char*>(base) + element * Pack<T>::bytes;
  if constexpr (WIDE) return {load_pack<T>(at)};
  if constexpr (std::is_same_v<T, F32>) return {__ldg(reinterpret_cast<const uint32_t*>(at))};
  return {__ldg(reinterpret_cast<const uint16_t*>(at))};
}

template <class T, bool WIDE>
__device__ __forceinline__ void store_piece(void* base, int64_t element, const Piece<T, WIDE>& piece) {
  char* at = static_cast<char*>(base) + element * Pack<T>::bytes;
  if constexpr (WIDE) {
    store_pack<T>(at, piece);
  } else if constexpr (std::is_same_v<T, F32>) {
    *reinterpret_cast<uint32_t*>(at) = piece.bits;
  } else {
    *reinterpret_cast<uint16_t*>(at) = static_cast<uint16_t>(piece.bits);
  }
}

// Each value rounded once, NaN canonical.
template <class T, bool WIDE>
__device__ __forceinline__ Piece<T, WIDE> rounded_piece(const float (&values)[Piece<T, WIDE>::values]) {
  Piece<T, WIDE> piece;
  if constexpr (WIDE) {
#pragma unroll
    for (int pair = 0; pair < 4; ++pair) piece.set(pair, values[2 * pair], values[2 * pair + 1]);
    make_canonical<T>(piece);
  } else if constexpr (std::is_same_v<T, F32>) {
    piece.bits = bits_of(canonical(values[0]));
  } else {
    piece.bits = std::is_same_v<T, BF16> ? bf16_of(values[0]) : f16_of(values[0]);
  }
  return piece;
}

// Calls body(token, column) for every piece of every token.
template <class T, bool WIDE, class Body>
__device__ __forceinline__ void for_pieces(const MoveArgs& args, Body body) {
  constexpr int width = Piece<T, WIDE>::values;
  const int64_t token = int64_t{blockIdx.x} * blockDim.y + threadIdx.y;
  if (token >= args.choices.tokens) return;
  const int64_t step = int64_t{gridDim.y} * blockDim.x * width;
  for (int64_t col = (int64_t{blockIdx.y} * blockDim.x + threadIdx.x) * width; col < args.cols; col += step) {
    body(token, col);
  }
}

template <class T, bool WIDE, bool WEIGHTED>
__global__ void __launch_bounds__(THREADS) permute_kernel(const __grid_constant__ MoveArgs args) {
  using PieceT = Piece<T, WIDE>;
  const bool clears = args.choices.row_for_each();
  for_pieces<T, WIDE>(args, [&](int64_t token, int64_t col) {
    const PieceT piece = load_piece<T, WIDE>(args.from, token * args.stride + col);
#pragma unroll 2
    for (int64_t j = 0; j < args.choices.each; ++j) {
      const ChoiceRow target = row_of(args.choices, token * args.choices.each + j);
      PieceT result = piece;
      if constexpr (WEIGHTED) {
        float values[PieceT::values];
#pragma unroll
        for (int i = 0; i < PieceT::values; ++i) values[i] = piece.value(i) * target.weight;
        result = rounded_piece<T, WIDE>(values);
      }
      if (!target.live) result = {};
      if (target.live || (target.inside && clears))
        store_piece<T, WIDE>(args.out, target.row * args.cols + col, result);
    }
  });
}

// AHEAD rows are in flight, because the sums depend on one another. More would cost registers and thereby occupancy.
template <class T, bool WIDE, bool WEIGHTED, int AHEAD>
__global__ void __launch_bounds__(THREADS) combine_kernel(const __grid_constant__ MoveArgs args) {
  using PieceT = Piece<T, WIDE>;
  const int64_t each = args.choices.each;
  for_pieces<T, WIDE>(args, [&](int64_t token, int64_t col) {
    float sums[PieceT::values] = {};
    for (int64_t j = 0; j < each; j += AHEAD) {
      PieceT piece[AHEAD];
      float weight[AHEAD];
      bool live[AHEAD];
#pragma unroll
      for (int i = 0; i < AHEAD; ++i) {
        live[i] = false;
        if (j + i < each) {
          const ChoiceRow target = row_of(args.choices, token * each + j + i);
          live[i] = target.live;
          weight[i] = target.weight;
          if (target.live) piece[i] = load_piece<T, WIDE>(args.from, target.row * args.stride + col);
        }
      }
#pragma unroll
      for (int i = 0; i < AHEAD; ++i) {
        if (!live[i]) continue;
#pragma unroll
        for (int v = 0; v < PieceT::values; ++v) {
          sums[v] += WEIGHTED ? piece[i].value(v) * weight[i] : piece[i].value(v);
        }
      }
    }
    store_piece<T, WIDE>(args.out, token * args.cols + col, rounded_piece<T, WIDE>(sums));
  });
}

// One warp per choice: lane l has columns 8 l to 8 l + 7 of every 256.
template <class T, bool WIDE>
__global__ void __launch_bounds__(DOT_THREADS) dot_kernel(const __grid_constant__ DotArgs args) {
  const int64_t choice = int64_t{blockIdx.x} * (DOT_THREADS / WARP) + threadIdx.x / WARP;
  if (choice >= args.choices.tokens * args.choices.each) return;
  const int lane = static_cast<int>(threadIdx.x % WARP);
  const ChoiceRow target = row_of(args.choices, choice);
  float sum = 0.0f;
  if (target.live) {
    const int64_t row = target.row * args.row_stride, token = choice / args.choices.each * args.dy_stride;
#pragma unroll 4
    for (int64_t col = 8 * lane; col < args.cols; col += 8 * WARP) {
      if constexpr (WIDE) {
        const Pack<T> left = load_pack<T>(static_cast<const char*>(args.rows) + (row + col) * Pack<T>::bytes);
        const Pack<T> right = load_pack<T>(static_cast<const char*>(args.dy) + (token + col) * Pack<T>::bytes);
#pragma unroll
        for (int i = 0; i < 8; ++i) sum += left.value(i) * right.value(i);
      } else {
        for (int64_t at = col; at < col + 8 && at < args.cols; ++at) {
          sum += load_value<T>(args.rows, row + at) * load_value<T>(args.dy, token + at);
        }
      }
    }
  }
#pragma unroll
  for (int bit = 1; bit < WARP; bit *= 2) sum += __shfl_xor_sync(~0u, sum, bit);
  if (lane == 0) args.out[choice] = canonical(sum);
}

bool wide(const void* array, int64_t stride, int64_t cols, DType dtype) {
  return cols % 8 == 0 && stride * dtype_bytes(dtype) % 16 == 0 && aligned(array, 16);
}

// body(T{}, std::bool_constant<wide>{}).
template <class Body>
void with_type(DType dtype, bool is_wide, const Body& body) {
  const auto with = [&](auto type) { is_wide ? body(type, std::true_type{}) : body(type, std::false_type{}); };
  switch (dtype) {
    case DType::bf16: return with(BF16{});
    case DType::f16: return with(F16{});
    case DType::f32: return with(F32{});
  }
}

enum class Move { permute, combine };

template <Move M, class T, bool WIDE, bool WEIGHTED>
void launch_move(const MoveArgs& args, cudaStream_t stream) {
  const int64_t pieces = ceil_div(args.cols, Piece<T, WIDE>::values);
  unsigned lanes = 1;
  while (lanes < THREADS && lanes < pieces) lanes *= 2;
  const dim3 block = {lanes, THREADS / lanes};
  const dim3 grid = {static_cast<unsigned>(ceil_div(args.choices.tokens, block.y)),
                     grid_for(ceil_div(pieces, lanes), MAX_GRID_Y)};
  if constexpr (M == Move::permute) {
    permute_kernel<T, WIDE, WEIGHTED><<<grid, block, 0, stream>>>(args);
  } else if (args.choices.each > 2) {
    combine_kernel<T, WIDE, WEIGHTED, 4><<<grid, block, 0, stream>>>(args);
  } else {
    combine_kernel<T, WIDE, WEIGHTED, 2><<<grid, block, 0, stream>>>(args);
  }
}

template <Move M>
Error move(const MoveArgs& args, cudaStream_t stream) {
  if (const Error error = check_move(args)) return error;
  if (args.choices.tokens == 0 || args.cols == 0) return {};
  const bool is_wide =
      wide(args.from, args.stride, args.cols, args.dtype) && wide(args.out, args.cols, args.cols, args.dtype);
  with_type(args.dtype, is_wide, [&](auto type, auto is_wide_too) {
    using T = decltype(type);
    constexpr bool WIDE = decltype(is_wide_too)::value;
    args.choices.weights == nullptr ? launch_move<M, T, WIDE, false>(args, stream)
                                    : launch_move<M, T, WIDE, true>(args, stream);
  });
  return launched();
}

}  // namespace
}  // namespace cuda

Error permute_cuda(const MoveArgs& args, void* stream) {
  return cuda::move<cuda::Move::permute>(args, cuda::stream_of(stream));
}

Error combine_cuda(const MoveArgs& args, void* stream) {
  return cuda::move<cuda::Move::combine>(args, cuda::stream_of(stream));
}

Error dot_cuda(const DotArgs& args, void* stream) {
  if (const Error error = check_dot(args)) return error;
  const int64_t choices = args.choices.tokens * args.choices.each;
  if (choices == 0) return {};
  const bool is_wide = cuda::wide(args.rows, args.row_stride, args.cols, args.dtype) &&
                       cuda::wide(args.dy, args.dy_stride, args.cols, args.dtype);
  const auto grid = static_cast<unsigned>(ceil_div(choices, cuda::DOT_THREADS / cuda::WARP));
  cuda::with_type(args.dtype, is_wide, [&](auto type, auto is_wide_too) {
    cuda::dot_kernel<decltype(type), decltype(is_wide_too)::value>
        <<<grid, cuda::DOT_THREADS, 0, cuda::stream_of(stream)>>>(args);
  });
  return cuda::launched();
}

}  // namespace octavo
