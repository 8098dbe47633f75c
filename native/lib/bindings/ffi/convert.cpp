// octavo_convert: one plane from the plain layout to the native one, or back. NVFP4's second level is the same in both.
//
// operands  codes, scales; plan (ragged operands)
// results   codes, scales, in the layout `to`
#include "octavo/dequantize.h"

#include "extent.h"
#include "handler.h"

namespace octavo {

struct ConvertAttributes {
  std::string_view operands;
  std::string_view results;
  int64_t format;
  int64_t scaling;
  bool square;
  bool hadamard;
  int64_t direction;
  int64_t to;
  int64_t rows;
  int64_t cols;
  int64_t groups;
  int64_t matrix_rows;
  int64_t threads;
};

}  // namespace octavo

XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(
    octavo::ConvertAttributes, ::xla::ffi::StructMember<std::string_view>("operands"),
    ::xla::ffi::StructMember<std::string_view>("results"), ::xla::ffi::StructMember<int64_t>("format"),
    ::xla::ffi::StructMember<int64_t>("scaling"), ::xla::ffi::StructMember<bool>("square"),
    ::xla::ffi::StructMember<bool>("hadamard"), ::xla::ffi::StructMember<int64_t>("direction"),
    ::xla::ffi::StructMember<int64_t>("to"), ::xla::ffi::StructMember<int64_t>("rows"),
    ::xla::ffi::StructMember<int64_t>("cols"), ::xla::ffi::StructMember<int64_t>("groups"),
    ::xla::ffi::StructMember<int64_t>("matrix_rows"), ::xla::ffi::StructMember<int64_t>("threads"));

namespace octavo {
namespace {

constexpr const char* CONVERT = "octavo_convert";

ffi::Error convert(const Launch& launch, ffi::RemainingArgs given_operands, ffi::RemainingRets given_results,
                   const ConvertAttributes& given) {
  Buffers operands(CONVERT, "operand"), results(CONVERT, "result");
  operands.read(given.operands, given_operands);
  results.read(given.results, given_results);
  ConvertArgs args;
  read_spec(given, operands, args);
  args.to = enum_from<Layout>(given.to, Layout::native, "to", operands);
  const Extent extent = read_extent(given, operands, args);
  if (ffi::Error error = operands.checked(); error.failure()) return error;

  args.into.layout = args.to;
  args.from.layout = args.to == Layout::native ? Layout::plain : Layout::native;
  read_codes(operands, args.spec, args.direction, extent, args.from);
  read_codes(results, args.spec, args.direction, extent, args.into);
  args.plan = read_plan(operands, extent);
  if (ffi::Error error = operands.finish(); error.failure()) return error;
  if (ffi::Error error = results.finish(); error.failure()) return error;
  return as_ffi(launch.cuda() ? convert_cuda(args, launch.stream) : convert_cpu(args, thread_count(given.threads)),
                CONVERT);
}

}  // namespace

std::vector<Target> convert_targets() { return {target<ConvertAttributes, convert>(CONVERT)}; }

}  // namespace octavo
