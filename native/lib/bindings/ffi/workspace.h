// The workspace of an XLA FFI call: result `workspace`, u8 of any size and of any number of dimensions.
//
// It is a result rather than scratch of the call: XLA gives scratch back when the handler returns, and a command buffer
// that recorded the launch would write there again at every replay. A buffer that XLA assigned is the command buffer's
// own. CPU handlers, which nothing records, allocate memory of their own if it is missing or too small.
#pragma once

#include <cstddef>
#include <memory>
#include <new>

#include "buffers.h"

namespace octavo {

class Workspace {
 public:
  // Takes the aligned part of the result `workspace`, if there is one.
  void read(Buffers& results) {
    const ffi::AnyBuffer* given = results.take("workspace");
    if (given == nullptr) return;
    if (given->element_type() != ffi::U8) {
      return results.refuse("result workspace is " + text(*given) + " and must be bytes, u8");
    }
    void* memory = given->untyped_data();
    size_t bytes = given->size_bytes();
    if (memory != nullptr && std::align(ALIGNMENT, 1, memory, bytes)) {
      memory_ = memory;
      bytes_ = bytes;
    }
  }

  // Allocates host memory for this call if the result has less than `bytes`.
  void grow(size_t bytes) {
    if (bytes <= bytes_) return;
    own_.reset(::operator new(bytes, std::align_val_t(ALIGNMENT)));
    memory_ = own_.get();
    bytes_ = bytes;
  }

  void* memory() const { return memory_; }
  size_t bytes() const { return bytes_; }

 private:
  static constexpr size_t ALIGNMENT = 256;

  struct Free {
    void operator()(void* memory) const { ::operator delete(memory, std::align_val_t(ALIGNMENT)); }
  };

  void* memory_ = nullptr;
  size_t bytes_ = 0;
  std::unique_ptr<void, Free> own_;
};

}  // namespace octavo
