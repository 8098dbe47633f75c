// XLA's FFI API, at the one minor version that every supported jaxlib loads.
#pragma once

#include "xla/ffi/api/c_api.h"
#include "xla/ffi/api/ffi.h"

static_assert(XLA_FFI_API_MAJOR == 0 && XLA_FFI_API_MINOR == 1,
              "build against API 0.1 (jaxlib 0.6.2): an older jaxlib does not start with handlers of a newer API");
