// Dequantization: codes and scales of one plane to values.
//
//   reads   codes  1 B/element (E2M1 in a native layout 0.5), scales
//   writes  out    2 or 4 B/element
//   bound   device memory: 3.03 B/element from FP8 to bf16
//
// One kernel per pair of memory orders, from rows or panels to rows or panels, because neighbouring threads must read
// and write neighbouring addresses. A CTA owns some columns of one panel. If the order changes, the codes pass through
// smem as bytes, a quarter or half of what the values would take.
#include "dequantize.h"

#include "code_tile.cuh"
#include "common/check.h"
#include "cuda/device/launch.h"

namespace octavo {

namespace cuda {
namespace {

struct Job {
  const uint8_t* codes;
  const void* scales;
  const float* global;
  void* out;
  Panels panels;
  ScaleMap map;
  int64_t cols;
  bool padded;       // Hadamard data: groups padded to 16 rows
  bool packed;       // rows of E2M1, two codes per byte
  bool words;        // rows are aligned to the vector size
  bool each_column;  // every column has a scale of its own
};

struct PanelSlice {
  int64_t index, col0;
  Panel panel;
  int rows;  // in this plane
  float global;
  ScaleAt scale;
};

__device__ __forceinline__ PanelSlice slice_of(const Job& job, int64_t index, int64_t col0) {
  PanelSlice slice;
  slice.index = index;
  slice.col0 = col0;
  slice.panel = job.panels.at(index);
  slice.rows = plane_rows(job.padded, slice.panel);
  slice.global = job.global ? __ldg(job.global + slice.panel.group) : 1.0f;
  slice.scale = job.map.at(slice.panel, index);
  return slice;
}

// Zeroes rows [used, all) of a plain output, one contiguous range that `parts` rows of CTAs share.
template <DType D>
__device__ __forceinline__ void zero_tail(const Job& job, int64_t part, int64_t parts) {
  const int64_t all = job.padded ? block_bound(job.panels.rows, job.panels.groups, 16) * 16 : job.panels.rows;
  const int64_t used = job.padded ? job.panels.blocks_in_use(16) * 16 : job.panels.rows_in_use();
  const int64_t first = used * job.cols, end = all * job.cols;
  const int64_t thread = (part * gridDim.x + blockIdx.x) * CODE_TILE_THREADS + threadIdx.x;
  const int64_t step = parts * gridDim.x * CODE_TILE_THREADS;
  if (job.words) {  // then both bounds are multiples of 4 elements
    for (int64_t i = first / 4 + thread; i < end / 4; i += step) {
      store_values<D, 4>(job.out, 4 * i, {0.0f, 0.0f, 0.0f, 0.0f});
    }
  } else {
    for (int64_t i = first + thread; i < end; i += step) store_value<D>(job.out, i, 0.0f);
  }
}

// ---- rows to rows: eight columns per thread, 256 per warp

constexpr int ROW_COLS = 256;
constexpr int WARPS = CODE_TILE_THREADS / 32;
constexpr int BATCH = 4;  // rows in flight per thread

template <Format F>
__device__ __forceinline__ uint2 load_row8(const Job& job, int64_t row, int64_t col) {
  if (F == Format::e2m1 && job.packed) {
    const uint32_t word = __ldg(reinterpret_cast<const uint32_t*>(job.codes + (row * job.cols + col) / 2));
    return {spread_nibbles(word & 0xFFFFu), spread_nibbles(word >> 16)};
  }
  return __ldg(reinterpret_cast<const uint2*>(job.codes + row * job.cols + col));
}

// Fast path: rows aligned to eight elements, and one scale for all eight columns.
template <Format F, Stored S, DType D>
__device__ __forceinline__ void dequantize_rows(const Job& job, const PanelSlice& slice) {
  const int64_t col = slice.col0 + threadIdx.x % 32 * 8;
  if (col >= job.cols) return;
  const int64_t row0 = plane_row0(job.padded, slice.panel);
  for (int first = threadIdx.x / 32; first < slice.rows; first += WARPS * BATCH) {
    uint2 codes[BATCH];
    float scale[BATCH];
#pragma unroll
    for (int b = 0; b < BATCH; ++b) {
      const int row = first + WARPS * b;
      if (row >= slice.rows) break;
      codes[b] = load_row8<F>(job, row0 + row, col);
      scale[b] = scale_value<S>(job.scales, slice.scale(row, col), slice.global);
    }
#pragma unroll
    for (int b = 0; b < BATCH; ++b) {
      const int row = first + WARPS * b;
      if (row >= slice.rows) break;
      float values[8];
      decode4<F>(codes[b].x, values);
      decode4<F>(codes[b].y, values + 4);
#pragma unroll
      for (int i = 0; i < 8; ++i) values[i] *= scale[b];
      store_values<D, 8>(job.out, (row0 + row) * job.cols + col, values);
    }
  }
}

// General path, element by element: any columns, any scales.
template <Format F, Stored S, DType D>
__device__ __forceinline__ void dequantize_elements(const Job& job, const PanelSlice& slice) {
  const int64_t row0 = plane_row0(job.padded, slice.panel);
  for (int row = threadIdx.x / 32; row < slice.rows; row += WARPS) {
    for (int step = 0; step < ROW_COLS; step += 32) {
      const int64_t col = slice.col0 + step + threadIdx.x % 32, at = (row0 + row) * job.cols + col;
      if (col >= job.cols) break;
      uint32_t code;
      if (F == Format::e2m1 && job.packed) {
        code = __ldg(job.codes + (row0 + row) * ((job.cols + 1) / 2) + col / 2) >> (4 * (col & 1)) & 0xFu;
      } else {
        code = __ldg(job.codes + at);
      }
      float values[4];
      decode4<F>(code, values);
      const float scale = scale_value<S>(job.scales, slice.scale(row, col), slice.global);
      store_value<D>(job.out, at, values[0] * scale);
    }
  }
}

template <Format F, Stored S, DType D>
__global__ void __launch_bounds__(CODE_TILE_THREADS) rows_to_rows(const __grid_constant__ Job job) {
  const int64_t used = job.panels.used(), bound = job.panels.bound();
  for (int64_t index = blockIdx.y; index < bound + 1; index += gridDim.y) {
    if (index >= used) {
      zero_tail<D>(job, index - used, bound + 1 - used);
      continue;
    }
    const PanelSlice slice = slice_of(job, index, int64_t{blockIdx.x} * ROW_COLS);
    if (job.words && !job.each_column) {
      dequantize_rows<F, S, D>(job, slice);
    } else {
      dequantize_elements<F, S, D>(job, slice);
    }
  }
}

// ---- to panels: eight rows of a column per thread; scales past the group's end are not read

template <Format F, Stored S, DType D>
__device__ __forceinline__ void emit_column8(const Job& job, const PanelSlice& slice, int col, int row, uint2 codes) {
  float values[8] = {};
  if (row < slice.rows) {
    const float scale = scale_value<S>(job.scales, slice.scale(row, slice.col0 + col), slice.global);
    decode4<F>(codes.x, values);
    decode4<F>(codes.y, values + 4);
#pragma unroll
    for (int i = 0; i < 8; ++i) values[i] = row + i < slice.rows ? values[i] * scale : 0.0f;
  }
  store_values<D, 8>(job.out, (slice.index * job.cols + slice.col0 + col) * PANEL_ROWS + row, values);
}

constexpr int EIGHTS = PANEL_ROWS / 8;

template <Format F, Stored S, DType D>
__global__ void __launch_bounds__(CODE_TILE_THREADS) panels_to_panels(const __grid_constant__ Job job) {
  constexpr int rounds = CODE_TILE_COLS * EIGHTS / CODE_TILE_THREADS;
  const int64_t used = job.panels.used();
  const int row = threadIdx.x % EIGHTS * 8, first = threadIdx.x / EIGHTS;
  for (int64_t index = blockIdx.y; index < used; index += gridDim.y) {
    const PanelSlice slice = slice_of(job, index, int64_t{blockIdx.x} * CODE_TILE_COLS);
    const int64_t base = slice.index * job.cols + slice.col0;
    uint2 codes[rounds];
#pragma unroll
    for (int i = 0; i < rounds; ++i) {
      const int col = first + CODE_TILE_COLS / rounds * i;
      if (slice.col0 + col >= job.cols) break;
      const int64_t at = (base + col) * PANEL_ROWS + row;
      if constexpr (F == Format::e2m1) {
        const uint32_t word = __ldg(reinterpret_cast<const uint32_t*>(job.codes + at / 2));
        codes[i] = {spread_nibbles(word & 0xFFFFu), spread_nibbles(word >> 16)};
      } else {
        codes[i] = __ldg(reinterpret_cast<const uint2*>(job.codes + at));
      }
    }
#pragma unroll
    for (int i = 0; i < rounds; ++i) {
      const int col = first + CODE_TILE_COLS / rounds * i;
      if (slice.col0 + col >= job.cols) break;
      emit_column8<F, S, D>(job, slice, col, row, codes[i]);
    }
  }
}

template <Format F, Stored S, DType D>
__global__ void __launch_bounds__(CODE_TILE_THREADS) rows_to_panels(const __grid_constant__ Job job) {
  __shared__ CodeTile tile;
  const int64_t used = job.panels.used();
  for (int64_t index = blockIdx.y; index < used; index += gridDim.y) {
    const PanelSlice slice = slice_of(job, index, int64_t{blockIdx.x} * CODE_TILE_COLS);
    load_rows(tile, job.codes, plane_row0(job.padded, slice.panel), slice.rows, slice.col0, job.cols, job.words);
    __syncthreads();
    for (int i = threadIdx.x; i < CODE_TILE_COLS * EIGHTS; i += CODE_TILE_THREADS) {
      const int col = i / EIGHTS, row = i % EIGHTS * 8;
      if (slice.col0 + col >= job.cols) break;
      const uint32_t* word = tile.word + col * COLUMN_PITCH + row / 4;
      emit_column8<F, S, D>(job, slice, col, row, {word[0], word[1]});
    }
    __syncthreads();
  }
}

// ---- panels to rows: 4 x 4 codes per thread

template <Format F, Stored S, DType D>
__device__ __forceinline__ void emit_rows4(const Job& job, const PanelSlice& slice, const CodeTile& tile, int i) {
  const Block4 block = block4(i);
  const int row = 4 * block.row4;
  const int64_t col = slice.col0 + 4 * block.col4;
  if (row >= slice.rows || col >= job.cols) return;
  const int count = job.cols - col < 4 ? static_cast<int>(job.cols - col) : 4;
  float scale[4];
#pragma unroll
  for (int c = 0; c < 4; ++c) {
    // A scaling unit's height is a multiple of 4 rows.
    scale[c] = c < count ? scale_value<S>(job.scales, slice.scale(row, col + c), slice.global) : 0.0f;
  }
  uint32_t words[4];
  get_rows(tile, block, words);
#pragma unroll
  for (int r = 0; r < 4; ++r) {
    if (row + r >= slice.rows) break;
    float values[4];
    decode4<F>(words[r], values);
#pragma unroll
    for (int c = 0; c < 4; ++c) values[c] *= scale[c];
    const int64_t at = (plane_row0(job.padded, slice.panel) + row + r) * job.cols + col;
    if (job.words) {
      store_values<D, 4>(job.out, at, values);
    } else {
      for (int c = 0; c < 4; ++c) {
        if (c < count) store_value<D>(job.out, at + c, values[c]);
      }
    }
  }
}

template <Format F, Stored S, DType D>
__global__ void __launch_bounds__(CODE_TILE_THREADS, 4) panels_to_rows(const __grid_constant__ Job job) {
  __shared__ CodeTile tile;
  const int64_t used = job.panels.used(), bound = job.panels.bound();
  for (int64_t index = blockIdx.y; index < bound + 1; index += gridDim.y) {
    if (index >= used) {
      zero_tail<D>(job, index - used, bound + 1 - used);
      continue;
    }
    const PanelSlice slice = slice_of(job, index, int64_t{blockIdx.x} * CODE_TILE_COLS);
    constexpr bool packed = F == Format::e2m1;
    load_panel<packed>(tile, job.codes + index * job.cols * (packed ? PANEL_ROWS / 2 : PANEL_ROWS), slice.col0,
                       job.cols);
    __syncthreads();
#pragma unroll
    for (int i = threadIdx.x; i < CODE_TILE_COLS * COLUMN_WORDS / 4; i += CODE_TILE_THREADS) {
      emit_rows4<F, S, D>(job, slice, tile, i);
    }
    __syncthreads();
  }
}

// ---- dispatch

template <Format F, Stored S, DType D>
Error launch(const DequantizeArgs& args, Job job, cudaStream_t stream) {
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
Error launch_as(const DequantizeArgs& args, const Job& job, cudaStream_t stream) {
  switch (args.out_dtype) {
    case DType::f32: return launch<F, S, DType::f32>(args, job, stream);
    case DType::f16: return launch<F, S, DType::f16>(args, job, stream);
    default: return launch<F, S, DType::bf16>(args, job, stream);
  }
}

}  // namespace

Error launch_dequantize(const DequantizeArgs& args, cudaStream_t stream) {
  const QuantizerSpec& spec = args.spec;
  Job job = {};
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
