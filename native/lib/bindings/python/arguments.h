// Conversion of Python's integers to the library's arguments, and of its errors to exceptions.
#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>
#include <string>
#include <utility>

#include "octavo/types.h"

namespace octavo::bindings {

namespace nb = nanobind;

// An address, or 0 if there is no array. Only the caller keeps the array alive.
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

// Raises ValueError with the library's message, or RuntimeError for an error of CUDA.
inline void raise_if(const Error& error) {
  if (!error) return;
  if (error.code == ErrorCode::cuda) throw std::runtime_error(error.message);
  throw nb::value_error(error.message);
}

// Releases the GIL during work on the CPU; a CUDA launch returns at once and keeps it.
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
