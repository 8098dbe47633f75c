#include "amax_scales.h"

#include "cuda/scaling/finish.cuh"

namespace octavo::cuda {
namespace {

constexpr int SMALL_BLOCK = 256;

uint32_t small_blocks(int64_t count) { return static_cast<uint32_t>(ceil_div(count, SMALL_BLOCK)); }

void clear_words(uint32_t* words, int64_t count, const int32_t* unchanged, cudaStream_t stream) {
  if (count) clear<<<small_blocks(count), SMALL_BLOCK, 0, stream>>>(words, count, unchanged);
}

void finish_levels_of(const QuantizeArgs& args, const Dispatch& dispatch, const Workspace& space, cudaStream_t stream) {
  const int64_t groups = args.input.groups;
  float* row_out = args.rowwise.codes ? args.rowwise.global : nullptr;
  float* col_out = args.columnwise.codes ? args.columnwise.global : nullptr;
  if (dispatch.group_amax)
    finish_levels<<<small_blocks(groups), SMALL_BLOCK, 0, stream>>>(
        workspace_at<uint32_t>(args, space.group), groups, workspace_at<SecondLevel>(args, space.row_levels), row_out,
        dispatch.hadamard_amax ? nullptr : col_out, args.amax, args.unchanged);
  if (dispatch.hadamard_amax)
    finish_levels<<<small_blocks(groups), SMALL_BLOCK, 0, stream>>>(
        workspace_at<uint32_t>(args, space.hadamard), groups, workspace_at<SecondLevel>(args, space.col_levels),
        col_out, nullptr, nullptr, args.unchanged);
}

}  // namespace

void clear_amaxes(const QuantizeArgs& args, const Dispatch& dispatch, const Workspace& space, cudaStream_t stream) {
  clear_words(workspace_at<uint32_t>(args, 0), static_cast<int64_t>(space.cleared / 4), args.unchanged, stream);
  // Delayed scaling clears its amax together with storing its scales.
  if (args.amax && !dispatch.group_amax && args.spec.scaling != Scaling::delayed)
    clear_words(reinterpret_cast<uint32_t*>(args.amax), args.input.groups, args.unchanged, stream);
}

void scales_of_amaxes(const QuantizeArgs& args, const Dispatch& dispatch, const Workspace& space, cudaStream_t stream) {
  const int64_t groups = args.input.groups;
  float* row_out = static_cast<float*>(args.rowwise.codes ? args.rowwise.scales : nullptr);
  float* col_out = static_cast<float*>(args.columnwise.codes ? args.columnwise.scales : nullptr);
  const auto finish = [&](size_t bits, int64_t count, float* first, float* second, float* amax) {
    if (count)
      finish_scales<<<small_blocks(count), SMALL_BLOCK, 0, stream>>>(workspace_at<uint32_t>(args, bits), count,
                                                                     args.spec.format, options_of(args.spec), first,
                                                                     second, amax, args.unchanged);
  };
  switch (args.spec.scaling) {
    case Scaling::delayed:
      store_decode_scales<<<small_blocks(groups), SMALL_BLOCK, 0, stream>>>(args.encode_scales, groups, row_out,
                                                                            col_out, args.amax, args.unchanged);
      break;
    case Scaling::current: finish(space.group, groups, row_out, col_out, args.amax); break;
    case Scaling::row:
      if (dispatch.rows_amax) finish(space.rows, args.input.rows, row_out, nullptr, nullptr);
      if (dispatch.columns_amax) finish(space.columns, groups * output_cols(args), nullptr, col_out, nullptr);
      break;
    case Scaling::nvfp4: finish_levels_of(args, dispatch, space, stream); break;
    default: break;
  }
}

}  // namespace octavo::cuda
