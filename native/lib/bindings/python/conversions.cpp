// Conversions that need no quantizer: swizzled scales, packed E2M1, MXFP4.
#include "arguments.h"
#include "bindings.h"
#include "octavo/dequantize.h"

namespace octavo::bindings {

namespace {

void swizzle(bool cuda, Address from, Address into, int64_t outer, int64_t blocks, bool to_swizzled, Address stream) {
  const SwizzleArgs args = {pointer<const uint8_t>(from), pointer<uint8_t>(into), outer, blocks, to_swizzled};
  launch(
      cuda, [&] { return swizzle_scales_cpu(args); }, [&] { return swizzle_scales_cuda(args, cuda_stream(stream)); });
}

void pack(bool cuda, Address from, Address into, int64_t rows, int64_t cols, bool pack, Address stream) {
  const PackArgs args = {pointer<const uint8_t>(from), pointer<uint8_t>(into), rows, cols, pack};
  launch(cuda, [&] { return pack_e2m1_cpu(args); }, [&] { return pack_e2m1_cuda(args, cuda_stream(stream)); });
}

void expand(bool cuda, Address codes, Address scales, int64_t blocks, Address out, int out_dtype, Address stream) {
  const ExpandArgs args = {pointer<const uint8_t>(codes), pointer<const uint8_t>(scales), blocks, pointer<void>(out),
                           enum_of(out_dtype, DType::bf16, "out_dtype")};
  launch(cuda, [&] { return expand_mxfp4_cpu(args); }, [&] { return expand_mxfp4_cuda(args, cuda_stream(stream)); });
}

}  // namespace

void bind_conversions(nb::module_& m) {
  using namespace nb::literals;
  m.def("swizzle_scales", &swizzle, nb::kw_only(), "cuda"_a, "from_"_a, "into"_a, "outer"_a, "blocks"_a,
        "to_swizzled"_a, "stream"_a = 0,
        "One-byte block scales [outer, blocks] to Blackwell's tiles of 128 x 4, padded with zeros, or back.");
  m.def("pack_e2m1", &pack, nb::kw_only(), "cuda"_a, "from_"_a, "into"_a, "rows"_a, "cols"_a, "pack"_a, "stream"_a = 0,
        "One-byte E2M1 codes [rows, cols] to two per byte [rows, ceil(cols / 2)], the even column low, or back.");
  m.def("expand_mxfp4", &expand, nb::kw_only(), "cuda"_a, "codes"_a, "scales"_a, "blocks"_a, "out"_a, "out_dtype"_a,
        "stream"_a = 0,
        "MXFP4, packed E2M1 [blocks, 16] and E8M0 [blocks], to values [blocks, 32], rounded once to out_dtype.");
}

}  // namespace octavo::bindings
