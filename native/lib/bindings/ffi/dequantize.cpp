// octavo_dequantize: one plane to values. The attributes give the logical shape, which the native layouts pad.
//
// operands  codes, scales; global f32[G] (nvfp4); plan (ragged operands)
// results   out, of f32, f16 or bf16
#include "octavo/dequantize.h"

#include "extent.h"
#include "handler.h"

namespace octavo {

struct DequantizeAttributes {
  std::string_view operands;
  int64_t format;
  int64_t scaling;
  bool square;
  bool hadamard;
  int64_t direction;
  int64_t layout;
  int64_t out_layout;
  int64_t rows;
  int64_t cols;
  int64_t groups;
  int64_t matrix_rows;
  int64_t threads;
};

}  // namespace octavo

XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(
    octavo::DequantizeAttributes, ::xla::ffi::StructMember<std::string_view>("operands"),
    ::xla::ffi::StructMember<int64_t>("format"), ::xla::ffi::StructMember<int64_t>("scaling"),
    ::xla::ffi::StructMember<bool>("square"), ::xla::ffi::StructMember<bool>("hadamard"),
    ::xla::ffi::StructMember<int64_t>("direction"), ::xla::ffi::StructMember<int64_t>("layout"),
    ::xla::ffi::StructMember<int64_t>("out_layout"), ::xla::ffi::StructMember<int64_t>("rows"),
    ::xla::ffi::StructMember<int64_t>("cols"), ::xla::ffi::StructMember<int64_t>("groups"),
    ::xla::ffi::StructMember<int64_t>("matrix_rows"), ::xla::ffi::StructMember<int64_t>("threads"));

namespace octavo {
namespace {

constexpr const char* DEQUANTIZE = "octavo_dequantize";

ffi::Error dequantize(const Launch& launch, ffi::RemainingArgs given_operands, ffi::RemainingRets given_results,
                      const DequantizeAttributes& given) {
  Buffers operands(DEQUANTIZE, "operand"), results(DEQUANTIZE, "result");
  operands.read(given.operands, given_operands);
  results.read("out", given_results);
  DequantizeArgs args;
  read_spec(given, operands, args);
  args.plane.layout = enum_from<Layout>(given.layout, Layout::native, "layout", operands);
  args.out_layout = enum_from<Layout>(given.out_layout, Layout::native, "out_layout", operands);
  const Extent extent = read_extent(given, operands, args);
  if (ffi::Error error = operands.checked(); error.failure()) return error;

  read_codes(operands, args.spec, args.direction, extent, args.plane);
  if (args.spec.scaling == Scaling::nvfp4) {
    operands.need("global");
    args.plane.global = operands.take<float>("global", ffi::F32, {extent.groups});
  }
  args.plan = read_plan(operands, extent);
  results.need("out");
  if (const ffi::AnyBuffer* out = results.take("out")) {
    if (!dtype_of(out->element_type(), args.out_dtype)) {
      results.refuse("result out is " + text(*out) + " and must be f32, f16 or bf16");
    }
    // Values have the shape of plain one-byte codes, or of native ones.
    QuantizerSpec unpacked = args.spec;
    unpacked.format = Format::e4m3;
    args.out = results.take("out", out->element_type(), codes_dims(unpacked, args.direction, args.out_layout, extent));
  }
  if (ffi::Error error = operands.finish(); error.failure()) return error;
  if (ffi::Error error = results.finish(); error.failure()) return error;
  if (launch.cuda()) return as_ffi(dequantize_cuda(args, launch.stream), DEQUANTIZE);
  return as_ffi(dequantize_cpu(args, thread_count(given.threads)), DEQUANTIZE);
}

}  // namespace

std::vector<Target> dequantize_targets() { return {target<DequantizeAttributes, dequantize>(DEQUANTIZE)}; }

}  // namespace octavo
