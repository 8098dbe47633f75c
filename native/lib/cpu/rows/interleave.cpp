// Two halves of a row to blocks that take turns, and back.
#include "octavo/interleave.h"

#include <cstring>

#include "cpu/loops/threads.h"

namespace octavo {

namespace cpu {

namespace {

// A block of BYTES, or of `bytes` where that is 0: copies of constant size are single instructions.
template <int BYTES>
void move_row(const uint8_t* from, uint8_t* into, int64_t blocks, int64_t bytes, bool interleave) {
  const auto size = static_cast<size_t>(BYTES ? BYTES : bytes);
  const auto half = static_cast<size_t>(blocks) * size;
  for (size_t block = 0; block < static_cast<size_t>(blocks); ++block) {
    for (size_t side = 0; side < 2; ++side) {
      const size_t halves = side * half + block * size, turns = (2 * block + side) * size;
      std::memcpy(into + (interleave ? turns : halves), from + (interleave ? halves : turns), size);
    }
  }
}

void move_any_row(const uint8_t* from, uint8_t* into, const InterleaveArgs& args) {
  switch (args.block_bytes) {
    case 1: return move_row<1>(from, into, args.blocks, 1, args.interleave);
    case 2: return move_row<2>(from, into, args.blocks, 2, args.interleave);
    case 4: return move_row<4>(from, into, args.blocks, 4, args.interleave);
    case 8: return move_row<8>(from, into, args.blocks, 8, args.interleave);
    default: return move_row<0>(from, into, args.blocks, args.block_bytes, args.interleave);
  }
}

}  // namespace

}  // namespace cpu

Error interleave_halves_cpu(const InterleaveArgs& args, int threads) {
  if (threads < 0) return invalid("threads is negative; give 1 or more");
  if (const Error error = check_interleave(args)) return error;
  const int64_t bytes = 2 * args.half();
  if (args.rows == 0 || bytes == 0) return {};
  cpu::split(args.rows, bytes, threads, [&](int64_t first, int64_t last) {
    for (int64_t row = first; row < last; ++row) {
      cpu::move_any_row(static_cast<const uint8_t*>(args.from) + row * bytes,
                        static_cast<uint8_t*>(args.into) + row * bytes, args);
    }
  });
  return {};
}

}  // namespace octavo
