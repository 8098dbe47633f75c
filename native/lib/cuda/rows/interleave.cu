// Two halves of a row to blocks that take turns, and back.
//
//   reads   each byte once
//   writes  each byte once
//   bound   device memory
//
// Elements of at most 8 bytes that take turns one by one (move_elements): a thread has 16 bytes of the interleaved
// array, which are 8 of each half, so that neighbours in a warp are neighbours in memory on both sides. Anything else
// moves by the widest word of which blocks and addresses are multiples (move_blocks).
#include "common/check.h"
#include "cuda/device/launch.h"
#include "octavo/interleave.h"

namespace octavo {

namespace cuda {
namespace {

constexpr int THREADS = 256, EACH = 4;            // EACH: words of a thread in move_blocks, all in flight
constexpr int64_t MOST_WORDS = int64_t{1} << 31;  // of a launch, so that 32 bits number them

struct Slice {
  const char* from;
  char* into;
  uint32_t words, half, block;  // in all, in half a row, in a block
  bool interleave;
};

// The even elements of two interleaved words, or the odd ones, by PRMT; elements of 4 and 8 bytes are whole words.
template <int BYTES>
__device__ __forceinline__ uint32_t picked(uint32_t low, uint32_t high, bool odd) {
  if constexpr (BYTES == 1) return __byte_perm(low, high, odd ? 0x7531 : 0x6420);
  return __byte_perm(low, high, odd ? 0x7632 : 0x5410);
}

template <int BYTES>
__device__ __forceinline__ void apart(uint4 interleaved, uint2& gate, uint2& up) {
  if constexpr (BYTES == 8) {
    gate = {interleaved.x, interleaved.y}, up = {interleaved.z, interleaved.w};
  } else if constexpr (BYTES == 4) {
    gate = {interleaved.x, interleaved.z}, up = {interleaved.y, interleaved.w};
  } else {
    gate = {picked<BYTES>(interleaved.x, interleaved.y, false), picked<BYTES>(interleaved.z, interleaved.w, false)};
    up = {picked<BYTES>(interleaved.x, interleaved.y, true), picked<BYTES>(interleaved.z, interleaved.w, true)};
  }
}

template <int BYTES>
__device__ __forceinline__ uint4 joined(uint2 gate, uint2 up) {
  if constexpr (BYTES == 8) return {gate.x, gate.y, up.x, up.y};
  if constexpr (BYTES == 4) return {gate.x, up.x, gate.y, up.y};
  constexpr uint32_t low = BYTES == 1 ? 0x5140 : 0x5410, high = BYTES == 1 ? 0x7362 : 0x7632;
  return {__byte_perm(gate.x, up.x, low), __byte_perm(gate.x, up.x, high), __byte_perm(gate.y, up.y, low),
          __byte_perm(gate.y, up.y, high)};
}

// Each thread moves 16 bytes of the interleaved array, a word; `slice.half` words are a row. What belongs to the first
// half of a row is at byte 16 row half + 8 (word - row half) of the halves. More words in flight in each thread, and
// loads that do not stay in the cache in front of stores that do, were slower.
template <int BYTES, bool INTERLEAVE>
__global__ void __launch_bounds__(THREADS) move_elements(const __grid_constant__ Slice slice) {
  const uint32_t word = blockIdx.x * THREADS + threadIdx.x;
  if (word >= slice.words) return;
  const int64_t at = 8 * (int64_t{word} + int64_t{word / slice.half} * slice.half),
                up_at = at + 8 * int64_t{slice.half};
  if constexpr (INTERLEAVE) {
    const uint2 gate = *reinterpret_cast<const uint2*>(slice.from + at);
    const uint2 up = *reinterpret_cast<const uint2*>(slice.from + up_at);
    reinterpret_cast<uint4*>(slice.into)[word] = joined<BYTES>(gate, up);
  } else {
    uint2 gate, up;
    apart<BYTES>(reinterpret_cast<const uint4*>(slice.from)[word], gate, up);
    *reinterpret_cast<uint2*>(slice.into + at) = gate;
    *reinterpret_cast<uint2*>(slice.into + up_at) = up;
  }
}

// Each thread moves EACH words of the interleaved array. A block is a whole number of words.
template <class Word>
__global__ void __launch_bounds__(THREADS) move_blocks(const __grid_constant__ Slice slice) {
  const auto* from = reinterpret_cast<const Word*>(slice.from);
  auto* into = reinterpret_cast<Word*>(slice.into);
  const uint32_t blocks = slice.half / slice.block, first = blockIdx.x * THREADS * EACH + threadIdx.x;
  uint32_t halves[EACH];
  Word value[EACH];
#pragma unroll
  for (int i = 0; i < EACH; ++i) {
    const uint32_t word = first + i * THREADS;
    const uint32_t turn = word / slice.block, within = word - turn * slice.block;
    const uint32_t pair = turn / 2, row = pair / blocks;
    // 2 row blocks + side blocks + (pair - row blocks) blocks stand before it
    halves[i] = ((row + turn % 2) * blocks + pair) * slice.block + within;
    if (word < slice.words) value[i] = from[slice.interleave ? halves[i] : word];
  }
#pragma unroll
  for (int i = 0; i < EACH; ++i) {
    const uint32_t word = first + i * THREADS;
    if (word < slice.words) into[slice.interleave ? word : halves[i]] = value[i];
  }
}

template <int BYTES>
void launch_elements(const Slice& slice, unsigned grid, cudaStream_t stream) {
  slice.interleave ? move_elements<BYTES, true><<<grid, THREADS, 0, stream>>>(slice)
                   : move_elements<BYTES, false><<<grid, THREADS, 0, stream>>>(slice);
}

// The largest power of two, at most 16, that divides everything.
int common_word(const InterleaveArgs& args) {
  const uintptr_t bits = reinterpret_cast<uintptr_t>(args.from) | reinterpret_cast<uintptr_t>(args.into) |
                         static_cast<uintptr_t>(args.block_bytes) | 16;
  return static_cast<int>(bits & -bits);
}

bool by_elements(const InterleaveArgs& args) {
  const void* interleaved = args.interleave ? args.into : args.from;
  const void* halves = args.interleave ? args.from : args.into;
  const bool one_word = args.block_bytes <= 8 && (args.block_bytes & (args.block_bytes - 1)) == 0;
  return one_word && args.half() % 8 == 0 && aligned(interleaved, 16) && aligned(halves, 8);
}

void launch(const Slice& slice, int block_bytes, bool elements, int word, cudaStream_t stream) {
  const auto grid = static_cast<unsigned>(ceil_div(int64_t{slice.words}, elements ? THREADS : THREADS * EACH));
  if (elements) {
    switch (block_bytes) {
      case 1: return launch_elements<1>(slice, grid, stream);
      case 2: return launch_elements<2>(slice, grid, stream);
      case 4: return launch_elements<4>(slice, grid, stream);
      default: return launch_elements<8>(slice, grid, stream);
    }
  }
  switch (word) {
    case 1: return move_blocks<uint8_t><<<grid, THREADS, 0, stream>>>(slice);
    case 2: return move_blocks<uint16_t><<<grid, THREADS, 0, stream>>>(slice);
    case 4: return move_blocks<uint32_t><<<grid, THREADS, 0, stream>>>(slice);
    case 8: return move_blocks<uint2><<<grid, THREADS, 0, stream>>>(slice);
    default: return move_blocks<uint4><<<grid, THREADS, 0, stream>>>(slice);
  }
}

}  // namespace
}  // namespace cuda

Error interleave_halves_cuda(const InterleaveArgs& args, void* stream) {
  if (const Error error = check_interleave(args)) return error;
  if (args.rows == 0 || args.blocks == 0) return {};
  const bool elements = cuda::by_elements(args);
  const int word = elements ? 16 : cuda::common_word(args);
  const int64_t row_bytes = 2 * args.half(), row_words = row_bytes / word;
  const int64_t most = cuda::MOST_WORDS / row_words;
  for (int64_t row = 0; row < args.rows; row += most) {
    const int64_t rows = args.rows - row < most ? args.rows - row : most;
    const cuda::Slice slice = {static_cast<const char*>(args.from) + row * row_bytes,
                               static_cast<char*>(args.into) + row * row_bytes,
                               static_cast<uint32_t>(rows * row_words),
                               static_cast<uint32_t>(elements ? row_words : row_words / 2),
                               static_cast<uint32_t>(elements ? 0 : args.block_bytes / word),
                               args.interleave};
    cuda::launch(slice, static_cast<int>(args.block_bytes), elements, word, cuda::stream_of(stream));
    if (const Error error = cuda::launched()) return error;
  }
  return {};
}

}  // namespace octavo
