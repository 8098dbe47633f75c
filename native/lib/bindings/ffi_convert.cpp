// octavo_convert: one plane from the plain layout to the native one, or back. NVFP4's second level is the same in both.
//
// operands  codes, scales; plan (ragged operands)
// results   codes, scales, in the layout `to`
#include "octavo/dequantize.h"

#include "ffi_extent.h"
#include "ffi_handler.h"

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

constexpr const char* NAME = "octavo_convert";

void read_plane(Buffers& buffers, const QuantizerSpec& spec, Direction direction, const Extent& extent, Plane& plane) {
  for (const char* needed : {"codes", "scales"}) buffers.need(needed);
  plane.codes = buffers.take("codes", codes_type(spec.format), codes_dims(spec, direction, plane.layout, extent));
  plane.scales = buffers.take("scales", scales_type(spec.scaling), scales_dims(spec, direction, plane.layout, extent));
}

ffi::Error convert(const Launch& launch, ffi::RemainingArgs given_operands, ffi::RemainingRets given_results,
                   const ConvertAttributes& given) {
  Buffers operands(NAME, "operand"), results(NAME, "result");
  operands.read(given.operands, given_operands);
  results.read(given.results, given_results);
  ConvertArgs args;
  args.spec.format = enum_from<Format>(given.format, Format::e2m1, "format", operands);
  args.spec.scaling = enum_from<Scaling>(given.scaling, Scaling::nvfp4, "scaling", operands);
  args.spec.square = given.square;
  args.spec.hadamard = given.hadamard;
  args.direction = enum_from<Direction>(given.direction, Direction::columnwise, "direction", operands);
  args.to = enum_from<Layout>(given.to, Layout::native, "to", operands);
  const Extent extent = extent_of(given, operands);
  if (ffi::Error error = operands.checked(); error.failure()) return error;

  args.rows = extent.rows;
  args.cols = extent.cols;
  args.groups = extent.groups;
  args.matrix_rows = extent.matrix_rows;
  args.into.layout = args.to;
  args.from.layout = args.to == Layout::native ? Layout::plain : Layout::native;
  read_plane(operands, args.spec, args.direction, extent, args.from);
  read_plane(results, args.spec, args.direction, extent, args.into);
  if (!extent.stacked()) {
    operands.need("plan");
    args.plan = operands.take<const int64_t>("plan", ffi::S32, {2 * plan_words(extent.rows, extent.groups)});
  }
  if (ffi::Error error = operands.finish(); error.failure()) return error;
  if (ffi::Error error = results.finish(); error.failure()) return error;
  return as_ffi(launch.cuda() ? convert_cuda(args, launch.stream) : convert_cpu(args, thread_count(given.threads)),
                NAME);
}

}  // namespace

std::vector<Target> convert_targets() { return {target<ConvertAttributes, convert>(NAME)}; }

}  // namespace octavo
