// octavo_native.Gemm: a GemmSpec and what can be done with it.
#include "octavo/gemm.h"

#include "arguments.h"
#include "bindings.h"
#include "common/gemm_strides.h"
#include "sequence.h"

namespace octavo::bindings {

namespace {

// A placeholder address for checks and workspace sizes; it is never dereferenced.
template <typename T>
T* somewhere() {
  return pointer<T>(256);
}

class GroupedGemm {
 public:
  GroupedGemm(int gemm, bool quantized, int dtype, int scaling, int left_format, int right_format, bool right_square,
              bool hadamard, int out_dtype, bool accumulate, bool fast_accumulation, bool left_square, bool left_values,
              bool right_values, int64_t left_interleave, int64_t right_interleave)
      : spec_{enum_of(gemm, Gemm::wgrad, "gemm"),
              quantized,
              enum_of(dtype, DType::bf16, "dtype"),
              enum_of(scaling, Scaling::nvfp4, "scaling"),
              enum_of(left_format, Format::e2m1, "left_format"),
              enum_of(right_format, Format::e2m1, "right_format"),
              right_square,
              hadamard,
              enum_of(out_dtype, DType::bf16, "out_dtype"),
              accumulate,
              fast_accumulation,
              left_square,
              left_values,
              right_values,
              left_interleave,
              right_interleave} {}

  size_t workspace_bytes(bool cuda, int64_t rows, int64_t n, int64_t k, int64_t groups, int tile) const {
    GemmArgs args = anywhere(rows, n, k, groups);
    args.tile = tile;
    raise_if(check_gemm(args, cuda));
    return cuda ? gemm_workspace_cuda(args) : gemm_workspace_cpu(args);
  }

  void run(bool cuda, int64_t rows, int64_t n, int64_t k, int64_t groups, Address plan, Address left, Address right,
           Address out, Address left_scales, Address left_global, int64_t left_stride, Address right_scales,
           Address right_global, int64_t right_stride, int64_t out_row_stride, int64_t out_group_stride, Address bias,
           int bias_dtype, Address bias_scales, Address left_index, Address right_index, int64_t each, int64_t count,
           int tile, int ctas, Address workspace, size_t workspace_bytes, Address stream, int threads,
           Sequence* into) const {
    GemmArgs args = sides(rows, n, k, groups);
    args.plan = pointer<const int64_t>(plan);
    args.left = {pointer<const void>(left),
                 pointer<const void>(left_scales),
                 pointer<const float>(left_global),
                 left_stride,
                 {pointer<const int64_t>(left_index), each, count}};
    args.right = {pointer<const void>(right),
                  pointer<const void>(right_scales),
                  pointer<const float>(right_global),
                  right_stride,
                  {pointer<const int64_t>(right_index), each, count}};
    args.out = pointer<void>(out);
    args.out_row_stride = out_row_stride;
    args.out_group_stride = out_group_stride;
    args.bias = pointer<const void>(bias);
    args.bias_dtype = enum_of(bias_dtype, DType::bf16, "bias_dtype");
    args.bias_scales = pointer<const float>(bias_scales);
    args.tile = tile;
    args.ctas = ctas;
    args.workspace = pointer<void>(workspace);
    args.workspace_bytes = workspace_bytes;
    launch_or_record(into, cuda, with_strides(args), stream, threads);
  }

  nb::tuple tiles() const {
    int count = 0;
    const GemmTile* found = gemm_tiles(spec_, &count);
    nb::list names;
    for (int i = 0; i < count; ++i) names.append(found[i].name);
    return nb::tuple(names);
  }

  nb::dict tile(int64_t rows, int64_t n, int64_t k, int64_t groups, int sms, int tile) const {
    GemmArgs args = anywhere(rows, n, k, groups);
    args.tile = tile;
    raise_if(check_gemm(args, true));
    if (sms < 1) throw nb::value_error("sms is less than 1; give the multiprocessors of the device, 132 of an H100");
    int count = 0;
    const GemmTile* found = gemm_tiles(spec_, &count);
    const GemmTileChoice choice = gemm_tile(spec_, rows, n, k, groups, sms, tile);
    if (choice.tile < 0 || choice.tile >= count)
      throw nb::value_error("tile is not a tile number of this GEMM; give one of `tiles`, or -1");
    nb::dict made;
    made["name"] = found[choice.tile].name;
    made["tile"] = choice.tile;
    made["tiles"] = choice.tiles;
    made["waves"] = choice.waves;
    made["filled"] = choice.filled;
    made["microseconds"] = choice.microseconds;
    return made;
  }

 private:
  GemmArgs sides(int64_t rows, int64_t n, int64_t k, int64_t groups) const {
    GemmArgs args;
    args.spec = spec_;
    args.rows = rows;
    args.n = n;
    args.k = k;
    args.groups = groups;
    return args;
  }

  // A call with these sides whose arrays are all present and contiguous.
  GemmArgs anywhere(int64_t rows, int64_t n, int64_t k, int64_t groups) const {
    GemmArgs args = sides(rows, n, k, groups);
    args.plan = somewhere<const int64_t>();
    args.left.data = args.right.data = somewhere<const void>();
    if (spec_.quantized) {
      if (!spec_.left_values) args.left.scales = somewhere<const void>();
      if (!spec_.right_values) args.right.scales = somewhere<const void>();
      if (spec_.scaling == Scaling::nvfp4) args.left.global = args.right.global = somewhere<const float>();
    }
    args.out = somewhere<void>();
    return with_strides(args);
  }

  const GemmSpec spec_;
};

}  // namespace

void bind_gemm(nb::module_& m) {
  using namespace nb::literals;
  nb::class_<GroupedGemm>(m, "Gemm", nb::is_final(),
                          "One grouped GEMM of a linear layer, in numbers of GEMMS, DTYPES, SCALINGS and FORMATS:\n\n"
                          "    fprop  y [M, N]     = x w[g]^T     left x, right w, both rowwise\n"
                          "    dgrad  dx [M, K]    = dy w[g]      left dy rowwise, right w columnwise\n"
                          "    wgrad  dw [G, N, K] = dy_g^T x_g   left dy, right x, both columnwise\n\n"
                          "Immutable. Unquantized operands are arrays of `dtype`, x [M, K], dy [M, N], w [G, N, K];\n"
                          "quantized ones the codes and scales of the plane that the GEMM reads, in the native layout\n"
                          "(octavo_native.layouts), or with left_values, right_values its values and no scales.\n"
                          "left_interleave, right_interleave: of wgrad of quantized operands, two halves of dw's rows\n"
                          "or of its columns take turns in blocks of so many, with the bits of the halves; for CUDA a\n"
                          "divisor of 32.\n"
                          "Arrays are addresses, 0 where there is none; with cuda=True they are on the current\n"
                          "device, work is put on `stream`, and nothing waits or allocates. ValueError says what of\n"
                          "the arguments does not fit; RuntimeError is CUDA's own.")
      .def(nb::init<int, bool, int, int, int, int, bool, bool, int, bool, bool, bool, bool, bool, int64_t, int64_t>(),
           nb::kw_only(), "gemm"_a, "quantized"_a, "dtype"_a = 2, "scaling"_a = 0, "left_format"_a = 0,
           "right_format"_a = 0, "right_square"_a = false, "hadamard"_a = false, "out_dtype"_a = 2,
           "accumulate"_a = false, "fast_accumulation"_a = false, "left_square"_a = false, "left_values"_a = false,
           "right_values"_a = false, "left_interleave"_a = 0, "right_interleave"_a = 0)
      .def("workspace_bytes", &GroupedGemm::workspace_bytes, nb::kw_only(), "cuda"_a, "rows"_a, "n"_a, "k"_a,
           "groups"_a, "tile"_a = -1,
           "Bytes of the workspace that `run` needs with these arguments; 256-byte aligned, undefined at entry.")
      .def(
          "run", &GroupedGemm::run, nb::kw_only(), "cuda"_a, "rows"_a, "n"_a, "k"_a, "groups"_a, "plan"_a, "left"_a,
          "right"_a, "out"_a, "left_scales"_a = 0, "left_global"_a = 0, "left_stride"_a = 0, "right_scales"_a = 0,
          "right_global"_a = 0, "right_stride"_a = 0, "out_row_stride"_a = 0, "out_group_stride"_a = 0, "bias"_a = 0,
          "bias_dtype"_a = 2, "bias_scales"_a = 0, "left_index"_a = 0, "right_index"_a = 0, "each"_a = 1, "count"_a = 0,
          "tile"_a = -1, "ctas"_a = 0, "workspace"_a = 0, "workspace_bytes"_a = 0, "stream"_a = 0, "threads"_a = 1,
          nb::arg("into").none() = nb::none(),
          "Write the product to `out`: rows M, n out-features, k in-features. Strides are elements, 0: contiguous.\n\n"
          "Rows past the plan's sum are not read and come back as +0. wgrad of a group without rows is +0, or with\n"
          "accumulate what `out` holds. bias [G, N] of fprop, [G, K] of dgrad: y[r] = ... +\n"
          "bias_scales[r] * bias[g], with bias_scales [M]. With left_index or right_index, int64 [M], that ragged\n"
          "operand is an array of `count` rows and its row i is row index[i] // each; zeros where index[i] is outside\n"
          "0 to count * each - 1. It is unquantized, on CUDA bf16; or the left one of fprop or dgrad in block "
          "scaling,\n"
          "codes and scales in the plain layout of `count` rows, on CUDA both operands e4m3 and the weights in square\n"
          "blocks.\n"
          "tile: a number of `tiles`, -1 for the model's choice (CUDA).\n"
          "ctas: most CTAs of the product, each of which has a multiprocessor to itself, with the same bits; 0: one\n"
          "for each multiprocessor. The CPU takes any and has none.")
      .def("tiles", &GroupedGemm::tiles, "Names of the tiles that the CUDA kernels of this GEMM come in, by number.")
      .def("tile", &GroupedGemm::tile, nb::kw_only(), "rows"_a, "n"_a, "k"_a, "groups"_a, "sms"_a = 132, "tile"_a = -1,
           "What the model expects of a tile (-1: of the one that it chooses) for M rows in equal groups:\n\n"
           "name; tile, its number; tiles that are computed; waves, tiles per CTA; filled, part of the computed "
           "outputs\n"
           "that the result has; microseconds. Host arithmetic alone.");
}

}  // namespace octavo::bindings
