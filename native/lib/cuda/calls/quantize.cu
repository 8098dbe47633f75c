// The entry points of quantizers.
#include "call.h"
#include "common/check.h"
#include "cuda/tile/tile.cuh"

namespace octavo {

size_t quantize_workspace_cuda(const QuantizeArgs& args) {
  return cuda::workspace_of(args, cuda::dispatch_of(args)).bytes;
}

Error quantize_cuda(const QuantizeArgs& args, void* stream) {
  if (Error error = check_quantize(args)) return error;
  const int64_t panels = panel_bound(args.input.rows, args.input.groups, args.input.matrix_rows);
  if (panels * ceil_div(output_cols(args), cuda::TILE_COLS) > 0x7FFFFFFF)
    return unsupported("x has more than 2^31 tiles of 128 x 128 elements; split it by rows");
  if (args.columnwise.layout == Layout::native && !aligned(args.columnwise.codes, 16))
    return invalid("columnwise panels are not 16-byte aligned; give memory that is");
  const cuda::Dispatch dispatch = cuda::dispatch_of(args);
  if (args.ctas > 0 && !cuda::has_persistent_kernels(args, dispatch))
    return unsupported(
        "ctas was given and every kernel of this call has a CTA for each tile, which ends within microseconds; give 0, "
        "and a stream of higher priority to what must not wait");
  if (args.columnwise.layout == Layout::values && dispatch.kind == cuda::Kind::nvfp4 && !cuda::in_units(args, dispatch))
    return unsupported(
        "columnwise values of nvfp4 are made of bf16 and f16 whose rows are aligned to 16 bytes, without a prologue or "
        "other outputs, and in square blocks without stochastic rounding; ask for codes in the native layout");
  if (args.input.is_interleaved() && !cuda::serves_interleaved(args, dispatch))
    return unsupported(
        "interleaved_cols and interleaved_rows are for bf16 aligned to 16 bytes, in delayed and current scaling and in "
        "square blocks of 128, in blocks of 1 or a multiple of 8 and halves of a multiple of 8; give the halves");
  const cuda::Workspace space = cuda::workspace_of(args, dispatch);
  if (space.bytes > args.workspace_bytes)
    return {ErrorCode::workspace_too_small, "workspace is smaller than workspace_bytes says; allocate that many bytes"};
  return cuda::launch_call(args, dispatch, space, static_cast<cudaStream_t>(stream));
}

}  // namespace octavo
