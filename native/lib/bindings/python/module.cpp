// octavo_native._native: the library for Python, as addresses and numbers. No framework, no numpy.
#include "bindings.h"

namespace nb = nanobind;

NB_MODULE(_native, m) {
  using namespace nb::literals;
  // Caches keep bound objects alive until the process ends, which nanobind would report as leaks.
  nb::set_leak_warnings(false);
  octavo::bindings::bind_names(m);
  octavo::bindings::bind_sequence(m);
  octavo::bindings::bind_plan(m);
  octavo::bindings::bind_quantizer(m);
  octavo::bindings::bind_gemm(m);
  octavo::bindings::bind_delayed(m);
  octavo::bindings::bind_conversions(m);
  octavo::bindings::bind_permute(m);
  octavo::bindings::bind_router(m);
  octavo::bindings::bind_interleave(m);
  octavo::bindings::bind_adamw(m);
  m.def("ffi_targets", &octavo::ffi_targets, "Handlers for XLA: platform (cpu, CUDA) to target name to capsule.");
  m.def("ffi_plane_shapes", &octavo::ffi_plane_shapes, nb::kw_only(), "format"_a, "scaling"_a, "direction"_a,
        "layout"_a, "square"_a, "hadamard"_a, "rows"_a, "cols"_a, "groups"_a, "matrix_rows"_a,
        "Shapes of codes and scales that the handlers for XLA require of one plane.");
}
