// One handler function per device from one body:
// `ffi::Error body(const Launch&, RemainingArgs, RemainingRets, Attributes)`.
#pragma once

#include <exception>
#include <string>

#include "buffers.h"

namespace octavo {

enum class Device { cpu, cuda };

struct Launch {
  Device device = Device::cpu;
  void* stream = nullptr;  // a cudaStream_t: the files of this folder need no CUDA header

  bool cuda() const { return device == Device::cuda; }
};

// XLA's frames are not exception safe: nothing may leave a handler by throwing.
template <typename Body>
ffi::Error guarded(const Body& body) {
  try {
    return body();
  } catch (const std::exception& error) {
    return ffi::Error::Internal(std::string("octavo: ") + error.what());
  } catch (...) {
    return ffi::Error::Internal("octavo: an exception that is not a std::exception");
  }
}

// CUDA handlers only launch: no synchronisation, no allocation, no read of device memory. So XLA may record them into
// a command buffer.
template <Device device, typename Attributes, auto body>
XLA_FFI_Error* handler(XLA_FFI_CallFrame* frame) {
  if constexpr (device == Device::cpu) {
    static auto* const made = ffi::Ffi::Bind()
                                  .RemainingArgs()
                                  .RemainingRets()
                                  .Attrs<Attributes>()
                                  .To([](ffi::RemainingArgs args, ffi::RemainingRets rets, Attributes attributes) {
                                    return guarded([&] { return body(Launch{}, args, rets, attributes); });
                                  })
                                  .release();
    return made->Call(frame);
  } else {
    static auto* const made =
        ffi::Ffi::Bind()
            .Ctx<ffi::PlatformStream<void*>>()
            .RemainingArgs()
            .RemainingRets()
            .Attrs<Attributes>()
            .To(
                [](void* stream, ffi::RemainingArgs args, ffi::RemainingRets rets, Attributes attributes) {
                  return guarded([&] { return body(Launch{Device::cuda, stream}, args, rets, attributes); });
                },
                {ffi::Traits::kCmdBufferCompatible})
            .release();
    return made->Call(frame);
  }
}

// The attribute `threads`, clamped to what the CPU calls take.
inline int thread_count(int64_t threads) { return static_cast<int>(std::clamp<int64_t>(threads, 1, 1024)); }

using Handler = XLA_FFI_Error* (*)(XLA_FFI_CallFrame*);

// An entry of the table in targets.cpp.
struct Target {
  const char* name;
  Handler cpu;
  Handler cuda;
};

// The CUDA handler is null in builds without the kernels.
template <typename Attributes, auto body>
Target target(const char* name) {
#if OCTAVO_HAS_CUDA
  return {name, handler<Device::cpu, Attributes, body>, handler<Device::cuda, Attributes, body>};
#else
  return {name, handler<Device::cpu, Attributes, body>, nullptr};
#endif
}

std::vector<Target> plan_targets();
std::vector<Target> quantize_targets();
std::vector<Target> dequantize_targets();
std::vector<Target> convert_targets();
std::vector<Target> gemm_targets();
std::vector<Target> router_targets();
std::vector<Target> rows_targets();

}  // namespace octavo
