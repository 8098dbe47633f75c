// The loops compiled with -mavx2. Every inline function of the headers is renamed here: the linker keeps one copy of
// each name, and an AVX2 copy would crash a processor without AVX2.
#define octavo octavo_avx2
#include "body.h"

namespace octavo_loops {
const Loops& avx2_loops() { return octavo_avx2::table(); }
}  // namespace octavo_loops
