#include "panels.h"

#include <cstring>

namespace octavo::cpu {

void codes_to_columns(const octavo_loops::Loops& loops, Format format, uint8_t* codes, int rows, int64_t cols,
                      uint8_t* turned, uint8_t* to) {
  std::memset(codes + rows * 128, 0, static_cast<size_t>(128 - rows) * 128);
  loops.transpose(codes, 128, round_up(cols, 32), turned);
  const int64_t bytes = cols * panel_height(format);
  if (format == Format::e2m1) {
    loops.pack(turned, bytes, to);
  } else {
    std::memcpy(to, turned, static_cast<size_t>(bytes));
  }
}

void columns_to_codes(const octavo_loops::Loops& loops, Format format, const uint8_t* from, int64_t cols,
                      uint8_t* turned, uint8_t* codes) {
  const int64_t bytes = cols * panel_height(format);
  std::memset(turned, 0, 128 * 128);
  if (format == Format::e2m1) {
    loops.unpack(from, bytes, turned);
  } else {
    std::memcpy(turned, from, static_cast<size_t>(bytes));
  }
  loops.transpose(turned, 128, 128, codes);
}

}  // namespace octavo::cpu
