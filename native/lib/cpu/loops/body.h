// Definitions of the loops of loops.h, included by one source file per instruction set. No standard-library template
// may be used here: the linker keeps one copy of each instantiation, and it could be the AVX2 one.

// GCC does not vectorise a loop in which both sides of a conditional compute in floating point, because it might raise
// a flag that the source would not. Nothing reads the flags here, and no value depends on this.
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC optimize("no-trapping-math")
#endif

#include "bytes.h"
#include "casts.h"
#include "draws.h"
#include "loops.h"
#include "products.h"
#include "scales.h"
#include "values.h"

namespace octavo {
namespace {

const octavo_loops::Loops& table() {
  static constexpr octavo_loops::Loops loops{
      load,         store,       round,         amax_blocks,     amax_columns,
      amax_all,     fp32_scales, e8m0_scales,   nvfp4_scales,    e8m0_values,
      nvfp4_values, spread,      cast,          cast_stochastic, mark_non_finite,
      decode,       draws_row,   draws_columns, hadamard,        add,
      transpose,    pack,        unpack,        multiply,        transpose_values};
  return loops;
}

}  // namespace
}  // namespace octavo
