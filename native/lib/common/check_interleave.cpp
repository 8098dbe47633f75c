// Argument checks of interleaving, shared by both devices. Pointers are compared and never dereferenced.
#include "check.h"
#include "octavo/interleave.h"

namespace octavo {

namespace {

constexpr int64_t MAX_HALF = int64_t{1} << 30;  // a row is then at most 2^31 words of one byte

}  // namespace

Error check_interleave(const InterleaveArgs& args) {
  if (args.rows < 0 || args.blocks < 0) return invalid("rows or blocks is negative; give 0 or more");
  if (args.block_bytes < 1) return invalid("block_bytes is less than 1; give the bytes that stay together");
  if (args.rows > MAX_ROWS) return invalid("rows is past 2^30, the most that row numbers hold; split the call");
  if (args.blocks > MAX_HALF / args.block_bytes) return invalid("half a row is past 2^30 bytes; split the rows");
  if (args.rows == 0 || args.blocks == 0) return {};
  if (args.from == nullptr || args.into == nullptr) return invalid("from_ or into is null; give both arrays");
  const auto from = reinterpret_cast<uintptr_t>(args.from), into = reinterpret_cast<uintptr_t>(args.into);
  const auto bytes = static_cast<uintptr_t>(2 * args.rows * args.half());
  if (from < into + bytes && into < from + bytes) {
    return invalid("from_ and into overlap; give an array of its own for the result");
  }
  return {};
}

}  // namespace octavo
