// Whether octavo/e2m1.h has numerics.h's codes: of every magnitude from 2^-3 to 16, of one in 61 of the others, NaN
// included, and of those next to a border at every place of a word. Prints what differs.
#include "octavo/e2m1.h"

#include <cstdio>
#include <initializer_list>

namespace {

using namespace octavo;

constexpr uint32_t AT_ONCE = 8;

void compare(uint32_t first, uint32_t last, uint32_t step) {
  for (uint32_t bits = first; bits + (AT_ONCE - 1) * step < last; bits += AT_ONCE * step) {
    const auto magnitude = [&](uint32_t i) { return float_of(bits + i * step); };
    const uint32_t codes = e2m1_codes([&](int i) { return magnitude(static_cast<uint32_t>(i)); });
    for (uint32_t i = 0; i < AT_ONCE; ++i) {
      const uint32_t wanted = e2m1_code(magnitude(i)), found = codes >> 4 * i & 0xFu;
      if (found != wanted) std::printf("%a: %x and not %x\n", magnitude(i), found, wanted);
    }
  }
}

// Each of the codes' borders at each place.
void compare_borders() {
  for (const float border : {0.25f, 0.75f, 1.25f, 1.75f, 2.5f, 3.5f, 5.0f, 6.0f, 7.0f})
    for (int place = 0; place < 8; ++place)
      for (int by = -1; by <= 1; ++by) {
        const float value = float_of(bits_of(border) + static_cast<uint32_t>(by));
        for (const float other : {0.0f, 6.0f, float_of(NAN_BITS)}) {
          const uint32_t codes = e2m1_codes([&](int i) { return i == place ? value : other; });
          for (int i = 0; i < 8; ++i)
            if ((codes >> 4 * i & 0xFu) != e2m1_code(i == place ? value : other))
              std::printf("%a at %d among %a: %08x\n", value, place, other, codes);
        }
      }
}

}  // namespace

int main() {
  const uint32_t low = bits_of(0.125f), high = bits_of(16.0f);
  compare(0, low, 61);
  compare(low, high, 1);
  compare(high, 1u << 31, 61);
  compare_borders();
  return 0;
}
