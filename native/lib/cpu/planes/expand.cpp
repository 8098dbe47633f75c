// expand_mxfp4_cpu: packed E2M1 and its E8M0 scales to values.
#include <algorithm>

#include "cpu/loops/loops.h"
#include "cpu/loops/threads.h"
#include "octavo/dequantize.h"
#include "octavo/numerics.h"

namespace octavo {

Error expand_mxfp4_cpu(const ExpandArgs& args) {
  if (const Error error = check_expand(args)) return error;
  const cpu::FloatMode mode;
  const octavo_loops::Loops& loops = octavo_loops::loops_for(1);
  const int dtype = static_cast<int>(args.out_dtype);
  const int64_t block_bytes = MXFP4_BLOCK * dtype_bytes(args.out_dtype);
  for (int64_t block = 0; block < args.blocks; ++block) {
    const float scale = e8m0_value(args.scales[block]);
    alignas(64) float values[MXFP4_BLOCK];
    for (int i = 0; i < MXFP4_BLOCK; ++i) {
      const int byte = args.codes[block * (MXFP4_BLOCK / 2) + i / 2];
      values[i] = canonical(value_of(Format::e2m1, static_cast<uint8_t>(byte >> (4 * (i % 2)) & 15)) * scale);
    }
    loops.store(dtype, values, static_cast<uint8_t*>(args.out) + block * block_bytes, MXFP4_BLOCK);
  }
  return {};
}

}  // namespace octavo
