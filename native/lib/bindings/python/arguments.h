// From Python's integers to the library's arguments, and from its errors to exceptions.
#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>
#include <string>
#include <utility>

#include "octavo/types.h"

namespace octavo::bindings {

namespace nb = nanobind;

// An address, 0 where there is no array. Nothing keeps the array alive but the caller.
using Address = uint64_t;

template <typename T>
T* pointer(Address address) {
  return reinterpret_cast<T*>(static_cast<uintptr_t>(address));
}

inline void* cuda_stream(Address stream) { return pointer<void>(stream); }

// The enum whose values are 0 to `last`; ValueError for any other number.
template <typename Enum>
Enum enum_of(int value, Enum last, const char* name) {
  if (value < 0 || value > static_cast<int>(last)) {
    const std::string text = std::string(name) + " is " + std::to_string(value) + "; it takes 0 to " +
                             std::to_string(static_cast<int>(last)) + ", named in octavo_native";
    throw nb::value_error(text.c_str());
  }
  return static_cast<Enum>(value);
}

// ValueError with the library's sentence; RuntimeError where it is CUDA's.
inline void raise_if(const Error& error) {
  if (!error) return;
  if (error.code == ErrorCode::cuda) throw std::runtime_error(error.message);
  throw nb::value_error(error.message);
}

// Other Python threads run beside work on the CPU; a launch returns at once and keeps the lock.
template <typename OnCpu, typename OnCuda>
void launch(bool cuda, OnCpu&& on_cpu, OnCuda&& on_cuda) {
  Error error;
  if (cuda) {
    error = on_cuda();
  } else {
    nb::gil_scoped_release release;
    error = on_cpu();
  }
  raise_if(error);
}

}  // namespace octavo::bindings
