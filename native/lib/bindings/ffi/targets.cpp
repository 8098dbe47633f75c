// The table of XLA FFI handlers: platform, then target name, then capsule. jax.ffi.register_ffi_target takes these.
#include <vector>

#include "bindings/python/arguments.h"
#include "bindings/python/bindings.h"
#include "handler.h"
#include "shapes.h"

namespace octavo {

namespace nb = nanobind;

nb::dict ffi_targets() {
  nb::dict cpu, cuda;
  for (const auto& targets : {plan_targets(), quantize_targets(), dequantize_targets(), convert_targets(),
                              gemm_targets(), router_targets(), rows_targets()}) {
    for (const Target& one : targets) {
      cpu[one.name] = nb::capsule(reinterpret_cast<void*>(one.cpu));
      if (one.cuda != nullptr) cuda[one.name] = nb::capsule(reinterpret_cast<void*>(one.cuda));
    }
  }
  nb::dict table;
  table["cpu"] = cpu;
  if (nb::len(cuda) != 0) table["CUDA"] = cuda;
  return table;
}

nb::tuple ffi_plane_shapes(int format, int scaling, int direction, int layout, bool square, bool hadamard, int64_t rows,
                           int64_t cols, int64_t groups, int64_t matrix_rows) {
  QuantizerSpec spec;
  spec.format = bindings::enum_of(format, Format::e2m1, "format");
  spec.scaling = bindings::enum_of(scaling, Scaling::nvfp4, "scaling");
  spec.square = square;
  spec.hadamard = hadamard;
  const Direction of_plane = bindings::enum_of(direction, Direction::columnwise, "direction");
  const Layout in_layout = bindings::enum_of(layout, Layout::native, "layout");
  const Extent extent{rows, cols, groups, matrix_rows};
  const auto as_tuple = [](const Dims& dims) {
    nb::list sizes;
    for (const int64_t size : dims) sizes.append(size);
    return nb::tuple(sizes);
  };
  return nb::make_tuple(as_tuple(codes_dims(spec, of_plane, in_layout, extent)),
                        as_tuple(scales_dims(spec, of_plane, in_layout, extent)));
}

}  // namespace octavo
