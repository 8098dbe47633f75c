// Dequantization: codes and scales of one plane to values.
//
//   reads   codes  1 B/element (E2M1 in a native layout 0.5), scales
//   writes  out    2 or 4 B/element
//   bound   device memory: 3.03 B/element from FP8 to bf16
//
// One kernel per pair of memory orders, from rows or panels to rows or panels, because neighbouring threads must read
// and write neighbouring addresses. A CTA owns some columns of one panel.
#include "dequantize.h"

#include "common/check.h"
#include "cuda/device/launch.h"
#include "dequantize_panels.cuh"
#include "dequantize_rows.cuh"

namespace octavo {

namespace cuda {
namespace {

template <Format F, Stored S, DType D>
Error launch(const DequantizeArgs& args, DequantizeJob job, cudaStream_t stream) {
  const bool from_panels = args.direction == Direction::columnwise && args.plane.layout == Layout::native;
  const bool to_panels = args.out_layout == Layout::native;
  // Vectors of eight columns between rows, otherwise of four.
  const int vector = from_panels || to_panels ? 4 : 8;
  job.words = job.cols % vector == 0 && (from_panels || aligned(job.codes, 8)) && aligned(job.out, 16);
  if ((from_panels && !aligned(job.codes, 16)) || (to_panels && !aligned(job.out, 16))) {
    return invalid("panels are not aligned to 16 bytes; allocate their codes and values so");
  }
  const int64_t units = job.panels.bound() + (to_panels ? 0 : 1);
  const int64_t wide = ceil_div(job.cols, from_panels || to_panels ? CODE_TILE_COLS : ROW_COLS);
  if (units * wide == 0) return {};
  const dim3 grid = {static_cast<unsigned>(wide), grid_for(units, MAX_GRID_Y)};
  if (from_panels && to_panels) {
    panels_to_panels<F, S, D><<<grid, CODE_TILE_THREADS, 0, stream>>>(job);
  } else if (from_panels) {
    panels_to_rows<F, S, D><<<grid, CODE_TILE_THREADS, 0, stream>>>(job);
  } else if (to_panels) {
    rows_to_panels<F, S, D><<<grid, CODE_TILE_THREADS, 0, stream>>>(job);
  } else {
    rows_to_rows<F, S, D><<<grid, CODE_TILE_THREADS, 0, stream>>>(job);
  }
  return launched();
}

template <Format F, Stored S>
Error launch_as(const DequantizeArgs& args, const DequantizeJob& job, cudaStream_t stream) {
  switch (args.out_dtype) {
    case DType::f32: return launch<F, S, DType::f32>(args, job, stream);
    case DType::f16: return launch<F, S, DType::f16>(args, job, stream);
    default: return launch<F, S, DType::bf16>(args, job, stream);
  }
}

}  // namespace

Error launch_dequantize(const DequantizeArgs& args, cudaStream_t stream) {
  const QuantizerSpec& spec = args.spec;
  DequantizeJob job = {};
  job.codes = static_cast<const uint8_t*>(args.plane.codes);
  job.scales = args.plane.scales;
  job.global = spec.scaling == Scaling::nvfp4 ? args.plane.global : nullptr;
  job.out = args.out;
  job.panels = {args.rows, args.groups, args.matrix_rows, args.plan};
  job.map = scale_map(spec, args.direction, args.plane.layout, args.rows, args.cols);
  job.cols = args.cols;
  job.padded = pads_groups(spec, args.direction);
  job.packed = spec.format == Format::e2m1 && args.plane.layout == Layout::native;
  job.each_column = job.map.per_col != 0 && job.map.col_shift == 0;
  const bool mx = spec.scaling == Scaling::mxfp8;
  switch (spec.format) {
    case Format::e2m1: return launch_as<Format::e2m1, Stored::e4m3>(args, job, stream);
    case Format::e5m2:
      return mx ? launch_as<Format::e5m2, Stored::e8m0>(args, job, stream)
                : launch_as<Format::e5m2, Stored::f32>(args, job, stream);
    default:
      return mx ? launch_as<Format::e4m3, Stored::e8m0>(args, job, stream)
                : launch_as<Format::e4m3, Stored::f32>(args, job, stream);
  }
}

}  // namespace cuda

Error dequantize_cuda(const DequantizeArgs& args, void* stream) {
  if (const Error error = check_dequantize(args)) return error;
  return cuda::launch_dequantize(args, cuda::stream_of(stream));
}

}  // namespace octavo
