// The portable loops, and the choice at run time.
#include "body.h"

namespace octavo_loops {

const Loops& plain_loops() { return octavo::table(); }

const Loops& loops_for([[maybe_unused]] int threads) {
#if OCTAVO_AVX2
  static const bool has_avx2 = __builtin_cpu_supports("avx2");
  if (has_avx2 && threads != 0) return avx2_loops();
#endif
  return plain_loops();
}

}  // namespace octavo_loops
