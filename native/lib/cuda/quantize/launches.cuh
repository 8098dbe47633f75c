// Definitions for launches.h: run-time choices to template arguments.
#pragma once

#include "cuda/units/kernels.cuh"
#include "launches.h"
#include "square_kernel.cuh"

namespace octavo::cuda {

// Calls `body` with a std::bool_constant.
template <class Body>
void with_bool(bool value, const Body& body) {
  value ? body(std::true_type{}) : body(std::false_type{});
}

// Bytes of a slab (slab_width): what was fastest on an H200, whose L2 cache of 50 MB also holds what is written, and
// the most with which slabs are faster than reading all columns.
constexpr int64_t SLAB_BYTES = 6'000'000, MOST_SLAB_BYTES = 25'000'000;

inline uint32_t multiprocessors() {
  int device = 0, count = 1;
  cudaGetDevice(&device);
  cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device);
  return static_cast<uint32_t>(count);
}

// Bytes of a slab of the array that an index reads, one tile wide; 0 without an index.
template <class Source>
int64_t slab_bytes(const Source& source, const TileShape& shape) {
  if constexpr (is_plain<Source>) {
    if (source.rows_at.of_rows) return source.rows_at.count * shape.cols() * Pack<typename Source::Type>::bytes;
  }
  return 0;
}

// `widest`, or a narrower shape where a slab of one tile would be too large.
template <class Source>
TileShape shape_within_slab(const Source& source, const TileShape& widest) {
  for (TileShape shape = widest; shape.lane_bits >= SQUARE.lane_bits; --shape.lane_bits)
    if (slab_bytes(source, shape) <= MOST_SLAB_BYTES) return shape;
  return widest;
}

// The width of a slab in tiles. A row that an index names several times is read as often, at times far apart, so as few
// columns of the whole array are processed at a time as stay in the L2 cache. All columns where there is no index, or
// where even one tile across is too much.
template <class Source>
uint32_t slab_width(const Source& source, const TileShape& shape, uint32_t col_blocks) {
  const int64_t narrowest = slab_bytes(source, shape);
  if (!narrowest) return col_blocks;
  for (uint32_t width = col_blocks; width > 0; --width)
    if (col_blocks % width == 0 && width * narrowest <= (width > 1 ? SLAB_BYTES : MOST_SLAB_BYTES)) return width;
  return col_blocks;
}

// One CTA per tile, or, for persistent kernels, as many CTAs as the device holds at once, each with smem slots, within
// the limit of `tiles`. Every tile has the same bits whichever CTA computes it.
template <int LANES, bool WIDE, class Args>
void launch_on_tiles(void (*kernel)(Args), Args args, int ctas, cudaStream_t stream, int threads = THREADS) {
  using Source = decltype(args.source);
  const int64_t cols = makes_halves<Source> ? args.cols / 2 : args.cols;
  const TileShape shape = shape_within_slab(args.source, shape_for<LANES>(cols));
  args.tiles.shape = shape;
  args.tiles.col_blocks = static_cast<uint32_t>(ceil_div(cols, shape.cols()));
  args.tiles.down = static_cast<uint32_t>(args.panels << shape.part_bits());
  const uint32_t count = args.tiles.down * args.tiles.col_blocks;
  if (!count) return;  // x has no rows, and a grid may not be empty
  args.tiles.width = slab_width(args.source, shape, args.tiles.col_blocks);
  args.tiles.by_width = Divisor::of(args.tiles.width);
  args.tiles.by_down = Divisor::of(args.tiles.down);
  constexpr bool persistent = is_persistent<Source, WIDE>;
  const uint32_t fit = persistent ? multiprocessors() * static_cast<uint32_t>(ctas) : count;
  const uint32_t limit = args.tiles.most_ctas;
  const uint32_t most = persistent && limit && limit < fit ? limit : fit;
  const uint32_t grid = count < most ? count : most;
  args.tiles.step_down = grid / args.tiles.col_blocks;
  args.tiles.step_across = grid % args.tiles.col_blocks;
  constexpr int slots = arrays_kept<Source, WIDE>() * Slots<typename Source::Type>::bytes;
  if (slots) cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, slots);
  kernel<<<grid, threads, slots, stream>>>(args);
}

template <Kind K, Format F, bool COLUMNS, bool STOCHASTIC, bool HADAMARD, bool WIDE, class S>
void launch_one(const TileArgs<S>& args, cudaStream_t stream) {
  constexpr int at_once = ctas<S, COLUMNS, heavy<S, K, COLUMNS, STOCHASTIC, HADAMARD>(), WIDE>();
  launch_on_tiles<COLUMNS ? COLUMN_LANES : ROW_LANES, WIDE>(quantize_tile<S, K, F, COLUMNS, STOCHASTIC, HADAMARD, WIDE>,
                                                            args, at_once, stream);
}

template <Kind K, Format F, bool COLUMNS, bool STOCHASTIC, bool WIDE, class S>
void launch_one_square(const TileArgs<S>& args, cudaStream_t stream) {
  launch_on_tiles<COLUMN_LANES, WIDE>(quantize_square<S, K, F, COLUMNS, STOCHASTIC, WIDE>, args, 2, stream);
}

// NVFP4 by the kernels of cuda/units/kernels.cuh; `kernel` is one for both planes.
template <class Args>
void launch_units(void (*kernel)(Args), const Args& args, cudaStream_t stream) {
  launch_on_tiles<COLUMN_LANES, true>(kernel, args, 1, stream, UNIT_THREADS);
}

template <Kind K, Format F, bool WIDE, class S>
void launch_kind(const TileArgs<S>& args, const Choice& choice, cudaStream_t stream) {
  if constexpr (K == Kind::nvfp4 && WIDE && has_units<S>) {
    if (served_in_units(args))
      return with_bool(choice.stochastic, [&](auto stochastic) {
        with_bool(choice.hadamard, [&](auto hadamard) {
          launch_units(quantize_units<typename S::Type, stochastic(), hadamard()>, args, stream);
        });
      });
  }
  const auto columns = [&](auto with_columns) {
    constexpr bool COLUMNS = decltype(with_columns)::value;
    if constexpr (K == Kind::nvfp4) {
      with_bool(choice.stochastic, [&](auto stochastic) {
        if constexpr (COLUMNS) {
          with_bool(choice.hadamard,
                    [&](auto hadamard) { launch_one<K, F, true, stochastic(), hadamard(), WIDE>(args, stream); });
        } else {
          launch_one<K, F, false, stochastic(), false, WIDE>(args, stream);
        }
      });
    } else {
      launch_one<K, F, COLUMNS, false, false, WIDE>(args, stream);
    }
  };
  // Odd shapes always take the kernel for both planes, which skips the plane that is not requested.
  if constexpr (WIDE) {
    with_bool(choice.columns, columns);
  } else {
    columns(std::true_type{});
  }
}

template <Kind K, Format F, bool WIDE, class S>
void launch_square(const TileArgs<S>& args, const Choice& choice, cudaStream_t stream) {
  if constexpr (K == Kind::nvfp4 && WIDE && has_units<S>) {
    if (!choice.stochastic && served_in_units(args))
      return with_bool(
          args.rowwise.layout == Layout::values || args.columnwise.layout == Layout::values,
          [&](auto values) { launch_units(quantize_square_units<typename S::Type, values()>, args, stream); });
  }
  const auto columns = [&](auto with_columns) {
    constexpr bool COLUMNS = decltype(with_columns)::value;
    if constexpr (K == Kind::nvfp4) {
      with_bool(choice.stochastic,
                [&](auto stochastic) { launch_one_square<K, F, COLUMNS, stochastic(), WIDE>(args, stream); });
    } else {
      launch_one_square<K, F, COLUMNS, false, WIDE>(args, stream);
    }
  };
  if constexpr (WIDE) {
    with_bool(choice.columns, columns);
  } else {
    columns(std::true_type{});
  }
}

template <class S, bool EVERYTHING, Format F, bool WIDE>
void launch_fp8(const TileArgs<S>& args, const Choice& choice, cudaStream_t stream) {
  if constexpr (EVERYTHING) {
    if (choice.square) {
      return choice.kind == Kind::block ? launch_square<Kind::block, F, WIDE>(args, choice, stream)
                                        : launch_square<Kind::mxfp8, F, WIDE>(args, choice, stream);
    }
    if (choice.kind == Kind::rows) return launch_kind<Kind::rows, F, WIDE>(args, choice, stream);
  }
  if (choice.kind == Kind::known) return launch_kind<Kind::known, F, WIDE>(args, choice, stream);
  if (choice.kind == Kind::block) return launch_kind<Kind::block, F, WIDE>(args, choice, stream);
  launch_kind<Kind::mxfp8, F, WIDE>(args, choice, stream);
}

template <class S, bool EVERYTHING, bool WIDE>
void launch_format(const TileArgs<S>& args, const Choice& choice, cudaStream_t stream) {
  if (choice.format == Format::e4m3) return launch_fp8<S, EVERYTHING, Format::e4m3, WIDE>(args, choice, stream);
  if (choice.format == Format::e5m2) return launch_fp8<S, EVERYTHING, Format::e5m2, WIDE>(args, choice, stream);
  if constexpr (EVERYTHING) {
    if (choice.square) return launch_square<Kind::nvfp4, Format::e2m1, WIDE>(args, choice, stream);
  }
  launch_kind<Kind::nvfp4, Format::e2m1, WIDE>(args, choice, stream);
}

template <class S>
void launch_tiles(const TileArgs<S>& args, const Choice& choice, cudaStream_t stream) {
  if constexpr (is_plain<S>) {
    with_bool(choice.wide, [&](auto wide) { launch_format<S, true, wide()>(args, choice, stream); });
  } else {
    launch_format<S, false, true>(args, choice, stream);
  }
}

template <class S>
void launch_amax(const AmaxArgs<S>& args, Amax what, bool wide, cudaStream_t stream) {
  const auto launch = [&](auto is_wide) {
    constexpr bool WIDE = decltype(is_wide)::value;
    if (what == Amax::group) {
      launch_on_tiles<ROW_LANES, WIDE>(amax_tile<S, Amax::group, WIDE>, args, amax_ctas<S, Amax::group, WIDE>(),
                                       stream);
    } else if (what == Amax::hadamard) {
      if constexpr (has_units<S>) {
        if (WIDE) return launch_units(amax_units<typename S::Type>, args, stream);
      }
      if constexpr (!WIDE || !has_units<S>) {
        launch_on_tiles<COLUMN_LANES, WIDE>(amax_tile<S, Amax::hadamard, WIDE>, args,
                                            amax_ctas<S, Amax::hadamard, WIDE>(), stream);
      }
    } else if constexpr (is_plain<S> || keeps_slots<S>) {
      launch_on_tiles<COLUMN_LANES, WIDE>(amax_tile<S, Amax::rows_and_columns, WIDE>, args,
                                          amax_ctas<S, Amax::rows_and_columns, WIDE>(), stream);
    }
  };
  if constexpr (is_plain<S>) {
    with_bool(wide, launch);
  } else {
    launch(std::true_type{});
  }
}

template <class S, bool WIDE>
__global__ void __launch_bounds__(THREADS, 1) materialize_tile(const __grid_constant__ TileArgs<S> args) {
  if (args.unchanged && *args.unchanged) return;
  const auto work = [&](const Tile& tile, Pack<typename S::Type>(&values)[8]) {
    store_activated<WIDE>(args, tile, values);
  };
  for_each_tile<ROW_LANES, WIDE>(args.source, args.tiles, false, args.cols, dynamic_smem, work, [](const Tile&) {});
}

template <class S>
void launch_materialize(const TileArgs<S>& args, bool wide, cudaStream_t stream) {
  with_bool(wide, [&](auto is_wide) {
    constexpr bool WIDE = decltype(is_wide)::value;
    launch_on_tiles<ROW_LANES, WIDE>(materialize_tile<S, WIDE>, args, 1, stream);
  });
}

template <class S>
void launch_rows(const RowArgs<S>& args, Format format, bool wide, cudaStream_t stream) {
  const uint32_t rows = static_cast<uint32_t>(args.rows);
  if (wide && keeps_row<typename S::Type>(args.cols)) {
    if constexpr (Pack<typename S::Type>::bytes == 2)
      format == Format::e4m3 ? quantize_kept_row<S, Format::e4m3><<<rows, ROW_THREADS, 0, stream>>>(args)
                             : quantize_kept_row<S, Format::e5m2><<<rows, ROW_THREADS, 0, stream>>>(args);
    return;
  }
  with_bool(wide, [&](auto is_wide) {
    format == Format::e4m3 ? quantize_row<S, Format::e4m3, is_wide()><<<rows, ROW_THREADS, 0, stream>>>(args)
                           : quantize_row<S, Format::e5m2, is_wide()><<<rows, ROW_THREADS, 0, stream>>>(args);
  });
}

}  // namespace octavo::cuda
