// Operands and results of an XLA FFI call by name, with their types and shapes checked.
//
// A call's attribute `operands` (and `results`) lists the names of what is there, in order and separated by commas, so
// that one handler serves every combination and a plane that is not listed is neither allocated nor computed.
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "shapes.h"
#include "xla_ffi.h"

namespace octavo {

namespace ffi = ::xla::ffi;

inline const char* type_name(ffi::DataType type) {
  switch (type) {
    case ffi::F32: return "f32";
    case ffi::F16: return "f16";
    case ffi::BF16: return "bf16";
    case ffi::PRED: return "pred";
    case ffi::U8: return "u8";
    case ffi::S32: return "s32";
    case ffi::U32: return "u32";
    case ffi::S64: return "s64";
    case ffi::F8E4M3FN: return "f8e4m3fn";
    case ffi::F8E5M2: return "f8e5m2";
    default: return "another type";
  }
}

inline std::string text(ffi::DataType type, const int64_t* dims, size_t rank) {
  std::string out = std::string(type_name(type)) + "[";
  for (size_t i = 0; i < rank; ++i) out += (i ? ", " : "") + std::to_string(dims[i]);
  return out + "]";
}

inline std::string text(const ffi::AnyBuffer& buffer) {
  return text(buffer.element_type(), buffer.dimensions().begin(), buffer.dimensions().size());
}

inline bool dtype_of(ffi::DataType type, DType& dtype) {
  if (type == ffi::F32)
    dtype = DType::f32;
  else if (type == ffi::F16)
    dtype = DType::f16;
  else if (type == ffi::BF16)
    dtype = DType::bf16;
  else
    return false;
  return true;
}

inline ffi::DataType codes_type(Format format) {
  return format == Format::e4m3 ? ffi::F8E4M3FN : format == Format::e5m2 ? ffi::F8E5M2 : ffi::U8;
}

inline ffi::DataType scales_type(Scaling scaling) {
  return scaling == Scaling::mxfp8 ? ffi::U8 : scaling == Scaling::nvfp4 ? ffi::F8E4M3FN : ffi::F32;
}

inline ffi::Error as_ffi(const Error& error, std::string_view target) {
  if (!error) return ffi::Error::Success();
  const ffi::ErrorCode code = error.code == ErrorCode::cuda          ? ffi::ErrorCode::kInternal
                              : error.code == ErrorCode::unsupported ? ffi::ErrorCode::kUnimplemented
                                                                     : ffi::ErrorCode::kInvalidArgument;
  return ffi::Error(code, std::string(target) + ": " + error.message);
}

// The operands or the results of one call. The first error is kept; later checks then do nothing.
class Buffers {
 public:
  // `kind` is "operand" or "result".
  Buffers(std::string_view target, const char* kind) : target_(target), kind_(kind) {}

  void read(std::string_view names, const ffi::RemainingArgs& args) {
    for (size_t i = 0; i < args.size(); ++i) {
      auto buffer = args.get<ffi::AnyBuffer>(i);
      if (!buffer) return refuse(std::string(kind_) + " " + std::to_string(i) + " is not a buffer");
      entries_.push_back({{}, *buffer});
    }
    name(names);
  }

  void read(std::string_view names, const ffi::RemainingRets& rets) {
    for (size_t i = 0; i < rets.size(); ++i) {
      auto buffer = rets.get<ffi::AnyBuffer>(i);
      if (!buffer) return refuse(std::string(kind_) + " " + std::to_string(i) + " is not a buffer");
      entries_.push_back({{}, **buffer});
    }
    name(names);
  }

  bool has(std::string_view name) const {
    for (const Entry& entry : entries_) {
      if (entry.name == name) return true;
    }
    return false;
  }

  // The buffer of that name, marked as known to the call, or null.
  const ffi::AnyBuffer* take(std::string_view name) {
    for (Entry& entry : entries_) {
      if (entry.name == name) {
        entry.taken = true;
        return &entry.buffer;
      }
    }
    return nullptr;
  }

  // Its address if it is present with this type and shape; otherwise null.
  void* take(std::string_view name, ffi::DataType type, const Dims& dims) {
    const ffi::AnyBuffer* buffer = take(name);
    if (buffer == nullptr || !error_.empty()) return nullptr;
    const auto actual = buffer->dimensions();
    if (buffer->element_type() != type || !std::equal(actual.begin(), actual.end(), dims.begin(), dims.end())) {
      refuse(std::string(kind_) + " " + std::string(name) + " is " + text(*buffer) + " and must be " +
             text(type, dims.data(), dims.size()));
      return nullptr;
    }
    return address(*buffer);
  }

  template <typename T>
  T* take(std::string_view name, ffi::DataType type, const Dims& dims) {
    return static_cast<T*>(take(name, type, dims));
  }

  // Operands `start_<result>`: XLA aliases the result with them, so that what a kernel leaves unwritten keeps their
  // values. The kernels do not read them.
  void take_starts() {
    for (Entry& entry : entries_) entry.taken = entry.taken || entry.name.substr(0, 6) == "start_";
  }

  // An empty buffer may have no address, and null means "not there" in the native calls.
  static void* address(const ffi::AnyBuffer& buffer) {
    alignas(256) static char nothing[256];
    return buffer.untyped_data() != nullptr ? buffer.untyped_data() : nothing;
  }

  void need(std::string_view name) {
    if (!has(name)) refuse(std::string(kind_) + " " + std::string(name) + " is missing");
  }

  void refuse(std::string reason) {
    if (error_.empty()) error_ = std::string(target_) + ": " + std::move(reason);
  }

  // Success if there has been no error so far.
  ffi::Error checked() const { return error_.empty() ? ffi::Error::Success() : ffi::Error::InvalidArgument(error_); }

  // Success if there was no error and every buffer was taken.
  ffi::Error finish() {
    for (const Entry& entry : entries_) {
      if (!entry.taken) refuse(std::string(kind_) + " " + std::string(entry.name) + " is not known to this call");
    }
    return checked();
  }

 private:
  struct Entry {
    std::string_view name;
    ffi::AnyBuffer buffer;
    bool taken = false;
  };

  void name(std::string_view names) {
    size_t index = 0;
    while (!names.empty()) {
      const size_t end = names.find(',');
      const std::string_view one = names.substr(0, end);
      if (has(one)) refuse(std::string(kind_) + " " + std::string(one) + " is named twice");
      if (index < entries_.size()) entries_[index].name = one;
      ++index;
      names = end == std::string_view::npos ? std::string_view() : names.substr(end + 1);
    }
    if (index != entries_.size()) {
      refuse("the attribute names " + std::to_string(index) + " " + kind_ + "s and " + std::to_string(entries_.size()) +
             " are given");
    }
  }

  std::string_view target_;
  const char* kind_;
  std::vector<Entry> entries_;
  std::string error_;
};

// The enum value of an attribute; 0 and an error if it is out of range.
template <typename Enum>
Enum enum_from(int64_t value, Enum last, const char* attribute, Buffers& operands) {
  if (value >= 0 && value <= static_cast<int64_t>(last)) return static_cast<Enum>(value);
  operands.refuse(std::string("attribute ") + attribute + " is " + std::to_string(value) + "; it takes 0 to " +
                  std::to_string(static_cast<int64_t>(last)));
  return static_cast<Enum>(0);
}

}  // namespace octavo
