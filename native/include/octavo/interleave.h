// Two halves of a row, such as gate and up columns of a weight, to blocks that take turns, and back: bytes are moved,
// whatever they stand for.
#pragma once

#include "octavo/types.h"

namespace octavo {

// halves        [rows][2][blocks][block_bytes]
// interleaved   [rows][blocks][2][block_bytes]
//
// The arrays do not overlap. Any alignment is served; elements of 1, 2, 4 or 8 bytes that take turns one by one move
// fastest where half a row is a multiple of 8 bytes, the halves are aligned to 8 and the interleaved array to 16.
struct InterleaveArgs {
  const void* from = nullptr;
  void* into = nullptr;
  int64_t rows = 0, blocks = 0, block_bytes = 0;
  bool interleave = true;  // from halves to interleaved; otherwise back

  OCTAVO_HD int64_t half() const { return blocks * block_bytes; }
};

// Where element `at` of two halves stands when they are interleaved: `block` elements of the first half, as many of the
// second, and so on.
OCTAVO_HD int64_t interleaved_at(int64_t at, int64_t half, int64_t block) {
  const int64_t second = at >= half, local = second ? at - half : at, number = local / block;
  return (2 * number + second) * block + (local - number * block);
}

Error check_interleave(const InterleaveArgs& args);
Error interleave_halves_cpu(const InterleaveArgs& args, int threads);
Error interleave_halves_cuda(const InterleaveArgs& args, void* stream);

}  // namespace octavo
