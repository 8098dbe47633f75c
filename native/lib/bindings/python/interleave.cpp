// Halves of rows to blocks that take turns, and back.
#include "octavo/interleave.h"

#include "arguments.h"
#include "bindings.h"

namespace octavo::bindings {

namespace {

void interleave_halves(bool cuda, Address from, Address into, int64_t rows, int64_t blocks, int64_t block_bytes,
                       bool interleave, Address stream, int threads) {
  const InterleaveArgs args = {pointer<const void>(from), pointer<void>(into), rows, blocks, block_bytes, interleave};
  launch(
      cuda, [&] { return interleave_halves_cpu(args, threads); },
      [&] { return interleave_halves_cuda(args, cuda_stream(stream)); });
}

}  // namespace

void bind_interleave(nb::module_& m) {
  using namespace nb::literals;
  m.def("interleave_halves", &interleave_halves, nb::kw_only(), "cuda"_a, "from_"_a, "into"_a, "rows"_a, "blocks"_a,
        "block_bytes"_a, "interleave"_a, "stream"_a = 0, "threads"_a = 1,
        "Rows of two halves [rows, 2, blocks, block_bytes] to blocks that take turns [rows, blocks, 2, block_bytes], "
        "or back.");
}

}  // namespace octavo::bindings
