// The table of XLA FFI handlers: platform, then target name, then capsule. jax.ffi.register_ffi_target takes these.
#include <vector>

#include "bindings/python/bindings.h"
#include "handler.h"

namespace octavo {

namespace nb = nanobind;

nb::dict ffi_targets() {
  nb::dict cpu, cuda;
  for (const auto& targets :
       {plan_targets(), quantize_targets(), dequantize_targets(), convert_targets(), gemm_targets()}) {
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

}  // namespace octavo
