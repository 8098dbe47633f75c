// One plane between the plain layout and the native one: codes, then scales.
//
//   reads, writes  1 B/element each way (E2M1 0.5 on the native side), scales
//   bound          device memory
//
// Only rows that belong to groups are read: codes and scales past them are undefined.
#include "bytes.cuh"
#include "code_tile.cuh"
#include "common/check.h"
#include "cuda/device/launch.h"

namespace octavo {

namespace cuda {
namespace {

constexpr int THREADS = 256;

// ---- codes of columns, between rows and panels

struct ColumnCodes {
  const uint8_t* from;
  uint8_t* into;
  Panels panels;
  int64_t cols;
  bool padded;
  bool words;  // rows are aligned to 4 bytes
};

template <bool packed, bool to_panels>
__global__ void __launch_bounds__(CODE_TILE_THREADS) move_columns(const __grid_constant__ ColumnCodes job) {
  __shared__ CodeTile tile;
  constexpr int height = packed ? PANEL_ROWS / 2 : PANEL_ROWS;
  const int64_t used = job.panels.used(), col0 = int64_t{blockIdx.x} * CODE_TILE_COLS;
  for (int64_t index = blockIdx.y; index < used; index += gridDim.y) {
    const Panel panel = job.panels.at(index);
    const int rows = plane_rows(job.padded, panel);
    const int64_t row0 = plane_row0(job.padded, panel), place = index * job.cols * height;
    if constexpr (to_panels) {
      load_rows(tile, job.from, row0, rows, col0, job.cols, job.words);
      __syncthreads();
      store_panel<packed>(tile, job.into + place, col0, job.cols);
    } else {
      load_panel<packed>(tile, job.from + place, col0, job.cols);
      __syncthreads();
      store_rows(tile, job.into, row0, rows, col0, job.cols, job.words);
    }
    __syncthreads();
  }
}

// ---- block scales, indexed by the scale maps of both layouts

struct BlockScales {
  const void* from;
  void* into;
  Panels panels;
  ScaleMap from_map, into_map;
  int64_t cols;
  int block;  // rows per scaling unit; 1 if blocks run along columns
  bool padded;
  bool rows_fastest;  // the axis along which the destination is contiguous
  bool whole_panels;  // the destination holds all blocks of a panel: zeros past the group's end
};

template <class T>
__global__ void __launch_bounds__(THREADS) move_scales(const __grid_constant__ BlockScales job) {
  const int64_t used = job.panels.used();
  const int64_t cols = ceil_div(job.cols, int64_t{1} << job.from_map.col_shift);
  const int slots = PANEL_ROWS / job.block;
  for (int64_t index = blockIdx.y; index < used; index += gridDim.y) {
    const Panel panel = job.panels.at(index);
    const int held = (plane_rows(job.padded, panel) + job.block - 1) / job.block;
    const int count = job.whole_panels ? slots : held;
    const ScaleAt from = job.from_map.at(panel, index), into = job.into_map.at(panel, index);
    const int64_t first = int64_t{blockIdx.x} * THREADS + threadIdx.x, step = int64_t{gridDim.x} * THREADS;
    for (int64_t i = first; i < cols * count; i += step) {
      const int64_t row = job.rows_fastest ? i % count : i / cols, col = job.rows_fastest ? i / count : i % cols;
      const int64_t at_row = row * job.block, at_col = col << job.from_map.col_shift;
      T value = 0;
      if (row < held) value = __ldg(static_cast<const T*>(job.from) + from(at_row, at_col));
      static_cast<T*>(job.into)[into(at_row, at_col)] = value;
    }
  }
}

// ---- arrays that are the same in both layouts

enum class Extent : int32_t { all, rows, blocks16, blocks32, blocks128 };

// Copies `width` bytes of each unit: of all `most` units, or of as many as the groups occupy.
struct Copy {
  const uint8_t* from;
  uint8_t* into;
  Panels panels;
  int64_t width, most;
  Extent extent;
};

__global__ void __launch_bounds__(THREADS) copy_used(const __grid_constant__ Copy job) {
  int64_t units = job.most;
  if (job.extent == Extent::rows) units = job.panels.rows_in_use();
  if (job.extent == Extent::blocks16) units = job.panels.blocks_in_use(16);
  if (job.extent == Extent::blocks32) units = job.panels.blocks_in_use(32);
  if (job.extent == Extent::blocks128) units = job.panels.blocks_in_use(128);
  copy_bytes(job.from, job.into, units * job.width);
}

Error launch_copy(const Copy& job, cudaStream_t stream) {
  const int64_t bytes = job.most * job.width;
  if (bytes == 0) return {};
  copy_used<<<grid_for(ceil_div(bytes, THREADS * 16 * 4)), THREADS, 0, stream>>>(job);
  return launched();
}

// ---- packed codes of rows

struct Packing {
  const uint8_t* from;
  uint8_t* into;
  Panels panels;
  int64_t cols;
  bool pack;
  bool vectors;
};

__global__ void __launch_bounds__(THREADS) pack_rows(const __grid_constant__ Packing job) {
  pack_nibbles(job.from, job.into, job.panels.rows_in_use(), job.cols, job.pack, job.vectors);
}

Error launch_pack(const uint8_t* from, uint8_t* into, const Panels& panels, int64_t cols, bool pack,
                  cudaStream_t stream) {
  const int64_t codes = panels.rows * cols;
  if (codes == 0) return {};
  const bool vectors = cols % 2 == 0 && aligned(pack ? from : into, 16) && aligned(pack ? into : from, 8);
  const Packing job = {from, into, panels, cols, pack, vectors};
  pack_rows<<<grid_for(ceil_div(codes, THREADS * 16)), THREADS, 0, stream>>>(job);
  return launched();
}

// ---- Blackwell's scale tiles

__global__ void __launch_bounds__(THREADS) swizzle(const SwizzleArgs args) { swizzle_tiles(args); }

// ---- launches for one plane

Error convert_codes(const ConvertArgs& args, const Panels& panels, cudaStream_t stream) {
  const auto* from = static_cast<const uint8_t*>(args.from.codes);
  auto* into = static_cast<uint8_t*>(args.into.codes);
  const bool packed = args.spec.format == Format::e2m1, to_native = args.to == Layout::native;
  if (args.direction == Direction::rowwise) {
    if (packed) return launch_pack(from, into, panels, args.cols, to_native, stream);
    return launch_copy({from, into, panels, args.cols, args.rows, Extent::rows}, stream);
  }
  if (!aligned(to_native ? into : from, 16)) {
    return invalid("panels are not aligned to 16 bytes; allocate their codes so");
  }
  const int64_t units = panels.bound(), wide = ceil_div(args.cols, CODE_TILE_COLS);
  if (units * wide == 0) return {};
  const bool words = args.cols % 4 == 0 && aligned(to_native ? from : into, 4);
  const ColumnCodes job = {from, into, panels, args.cols, pads_groups(args.spec, args.direction), words};
  const dim3 grid = {static_cast<unsigned>(wide), grid_for(units, MAX_GRID_Y)};
  if (packed) {
    if (to_native) {
      move_columns<true, true><<<grid, CODE_TILE_THREADS, 0, stream>>>(job);
    } else {
      move_columns<true, false><<<grid, CODE_TILE_THREADS, 0, stream>>>(job);
    }
  } else {
    if (to_native) {
      move_columns<false, true><<<grid, CODE_TILE_THREADS, 0, stream>>>(job);
    } else {
      move_columns<false, false><<<grid, CODE_TILE_THREADS, 0, stream>>>(job);
    }
  }
  return launched();
}

Error convert_scales(const ConvertArgs& args, const Panels& panels, cudaStream_t stream) {
  const QuantizerSpec& spec = args.spec;
  const bool rowwise = args.direction == Direction::rowwise;
  const int size = block_size(spec.scaling);
  const int64_t bytes = size == 0 || spec.scaling == Scaling::block ? 4 : 1;
  const auto* from = static_cast<const uint8_t*>(args.from.scales);
  auto* into = static_cast<uint8_t*>(args.into.scales);
  if (size == 0) {
    if (spec.scaling != Scaling::row) return launch_copy({from, into, panels, bytes, args.groups, Extent::all}, stream);
    if (rowwise) return launch_copy({from, into, panels, bytes, args.rows, Extent::rows}, stream);
    return launch_copy({from, into, panels, bytes * args.cols, args.groups, Extent::all}, stream);
  }
  const int64_t width = bytes * ceil_div(args.cols, size);
  if (spec.square) {
    const Extent extent = size == 16 ? Extent::blocks16 : size == 32 ? Extent::blocks32 : Extent::blocks128;
    const int64_t most =
        args.matrix_rows ? args.groups * ceil_div(args.matrix_rows, size) : block_bound(args.rows, args.groups, size);
    return launch_copy({from, into, panels, width, most, extent}, stream);
  }
  if (rowwise && spec.scaling != Scaling::block) {
    return launch_copy({from, into, panels, width, args.rows, Extent::rows}, stream);
  }
  BlockScales job = {};
  job.from = from, job.into = into;
  job.panels = panels;
  job.from_map = scale_map(spec, args.direction, args.from.layout, args.rows, args.cols);
  job.into_map = scale_map(spec, args.direction, args.into.layout, args.rows, args.cols);
  job.cols = args.cols;
  job.block = rowwise ? 1 : size;
  job.padded = pads_groups(spec, args.direction);
  job.rows_fastest = job.into_map.per_row == 1;
  job.whole_panels = !rowwise && args.to == Layout::native;
  const int64_t units = panels.bound();
  const int64_t each = (PANEL_ROWS / job.block) * ceil_div(args.cols, int64_t{1} << job.from_map.col_shift);
  if (units * each == 0) return {};
  const dim3 grid = {grid_for(ceil_div(each, THREADS * 4)), grid_for(units, MAX_GRID_Y)};
  if (bytes == 4) {
    move_scales<uint32_t><<<grid, THREADS, 0, stream>>>(job);
  } else {
    move_scales<uint8_t><<<grid, THREADS, 0, stream>>>(job);
  }
  return launched();
}

}  // namespace
}  // namespace cuda

Error convert_cuda(const ConvertArgs& args, void* stream) {
  if (const Error error = check_convert(args)) return error;
  const cuda::Panels panels = {args.rows, args.groups, args.matrix_rows, args.plan};
  if (const Error error = cuda::convert_codes(args, panels, cuda::stream_of(stream))) return error;
  return cuda::convert_scales(args, panels, cuda::stream_of(stream));
}

Error swizzle_scales_cuda(const SwizzleArgs& args, void* stream) {
  if (const Error error = check_swizzle(args)) return error;
  const int64_t rows = cuda::swizzle_rows(args);
  if (rows == 0) return {};
  cuda::swizzle<<<cuda::grid_for(ceil_div(rows, cuda::THREADS)), cuda::THREADS, 0, cuda::stream_of(stream)>>>(args);
  return cuda::launched();
}

Error pack_e2m1_cuda(const PackArgs& args, void* stream) {
  if (const Error error = check_pack(args)) return error;
  // As one matrix of all rows, so that none is left out.
  const cuda::Panels all = {args.rows, 1, args.rows, nullptr};
  return cuda::launch_pack(args.from, args.into, all, args.cols, args.pack, cuda::stream_of(stream));
}

}  // namespace octavo
