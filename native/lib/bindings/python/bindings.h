// The parts of the Python module, one file each.
#pragma once

#include <nanobind/nanobind.h>

namespace octavo::bindings {

void bind_names(nanobind::module_& m);               // names.cpp
void bind_plan(nanobind::module_& m);                // plan.cpp
void bind_quantize_arguments(nanobind::module_& m);  // quantize_arguments.cpp
void bind_quantizer(nanobind::module_& m);           // quantizer.cpp
void bind_gemm(nanobind::module_& m);                // gemm.cpp
void bind_delayed(nanobind::module_& m);             // delayed.cpp
void bind_sequence(nanobind::module_& m);            // sequence.cpp
void bind_conversions(nanobind::module_& m);         // conversions.cpp
void bind_permute(nanobind::module_& m);             // permute.cpp
void bind_router(nanobind::module_& m);              // router.cpp
void bind_interleave(nanobind::module_& m);          // interleave.cpp
void bind_adamw(nanobind::module_& m);               // adamw.cpp

}  // namespace octavo::bindings

namespace octavo {

// Handlers for XLA by platform ("cpu", "CUDA") and target name (ffi/targets.cpp).
nanobind::dict ffi_targets();

// Shapes that these handlers require of one plane's codes and scales, for a test to compare with layouts.py.
nanobind::tuple ffi_plane_shapes(int format, int scaling, int direction, int layout, bool square, bool hadamard,
                                 int64_t rows, int64_t cols, int64_t groups, int64_t matrix_rows);

}  // namespace octavo
