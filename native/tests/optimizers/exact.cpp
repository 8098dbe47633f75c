// Whether octavo/exact.h is: every root, every quotient that is near to the middle between two numbers, and updates of
// random numbers, with every approximation that PTX allows: rsqrt.approx within 2^-22.9 of itself, rcp.approx within an
// ulp. Prints each root, divisor and update that is wrong; the seed is the argument. Updates of the roots and divisors
// that were found wrong take the nearest approximation: the others' faults are theirs, and are printed already.
#include "octavo/exact.h"

#include <cstdio>
#include <cstdlib>
#include <random>
#include <set>
#include <vector>

#include "octavo/adamw.h"

namespace {

using namespace octavo;

constexpr double ROOT_ERROR = 1.2776536e-07;  // 2^-22.9, rounded up

// The numbers that may stand for `exact`.
std::vector<float> allowed(double exact, double error) {
  std::vector<float> found;
  const uint32_t middle = bits_of(static_cast<float>(exact));
  for (int by = -4; by <= 4; ++by) {
    const float near = float_of(middle + static_cast<uint32_t>(by));
    if (std::fabs(static_cast<double>(near) - exact) <= error) found.push_back(near);
  }
  return found;
}

std::vector<float> inverse_roots(float x) {
  const double exact = 1.0 / std::sqrt(static_cast<double>(x));
  return allowed(exact, ROOT_ERROR * exact);
}

std::vector<float> inverses(float b) {
  const double exact = 1.0 / static_cast<double>(b);
  return allowed(exact, std::ldexp(1.0, std::ilogb(exact) - 23));
}

std::set<uint32_t> wrong_roots, wrong_divisors;

// What they have in common with the same number in another binade: roots do with every other binade.
uint32_t digits_of_root(float x) { return bits_of(x) & 0xFFFFFFu; }
uint32_t digits_of_divisor(float b) { return bits_of(b) & 0x7FFFFFu; }

// All of [1, 4): every other root has the bits of one of these.
void roots() {
  for (uint32_t bits = 0x3F800000u; bits < 0x40800000u; ++bits) {
    const float x = float_of(bits), exact = std::sqrt(x);
    for (const float inverse : inverse_roots(x)) {
      if (root_from(x, inverse) == exact) continue;
      std::printf("root %08x\n", bits);
      wrong_roots.insert(digits_of_root(x));
    }
  }
}

// a = A 2^-23 and b = B 2^-23 in [1, 2). With M odd and of 25 bits, a quotient is |n| / (2 B) ulp away from the middle
// M 2^-k between two numbers, A 2^k = M B + n, k = 24 from 1 on and 25 below. quotient_from rounds what is at most
// 3 2^-24 ulp away from the quotient, so it can be wrong where |n| is at most 6.
void near_middles(uint32_t b, int k, std::vector<float>& quotients) {
  int zeros = 0;
  while (!(b >> zeros & 1u)) ++zeros;
  const uint32_t odd = b >> zeros;
  uint32_t inverse = odd;  // modulo 2^32, by Newton's steps
  for (int step = 0; step < 5; ++step) inverse *= 2u - odd * inverse;
  for (int n = -8; n <= 8; ++n) {
    if (n == 0 || zeros > 3 || n % (1 << zeros) != 0) continue;
    const int width = k - zeros;
    const uint64_t period = uint64_t{1} << width;
    const uint64_t first = static_cast<uint32_t>(-n / (1 << zeros)) * inverse & (period - 1);
    for (uint64_t middle = first; middle < 1u << 25; middle += period) {
      if (middle < 1u << 24 || middle % 2 == 0) continue;
      const auto product = static_cast<int64_t>(middle * b) + n;
      const int64_t a = product >> k;
      if (product & ((int64_t{1} << k) - 1)) std::abort();
      if (a >= 1 << 23 && a < 1 << 24 && (k == 24) == (a >= b)) quotients.push_back(std::ldexp(float(a), -23));
    }
  }
}

void quotients() {
  std::vector<float> dividends;
  for (uint32_t b = 1u << 23; b < 1u << 24; ++b) {
    const float divisor = std::ldexp(static_cast<float>(b), -23);
    dividends.clear();
    near_middles(b, 24, dividends), near_middles(b, 25, dividends);
    for (const float inverse : inverses(divisor))
      for (const float a : dividends) {
        if (quotient_from(a, divisor, inverse) == a / divisor) continue;
        std::printf("divisor %08x\n", bits_of(divisor));
        wrong_divisors.insert(digits_of_divisor(divisor));
      }
  }
}

// Exact updates, and masters between those of the two step sizes.
void updates(uint32_t seed) {
  std::mt19937 draw(seed);
  const auto chosen = [&](const std::vector<float>& from) { return from[draw() % from.size()]; };
  const auto inverse_root = [&](float x) {
    const bool wrong = wrong_roots.count(digits_of_root(x)) != 0;
    return wrong ? static_cast<float>(1.0 / std::sqrt(static_cast<double>(x))) : chosen(inverse_roots(x));
  };
  const auto inverse = [&](float b) {
    return wrong_divisors.count(digits_of_divisor(b)) ? 1.0f / b : chosen(inverses(b));
  };
  std::uniform_real_distribution<float> mantissa(1.0f, 2.0f);
  const auto number = [&](int least, int most) {
    return std::ldexp(mantissa(draw), least + static_cast<int>(draw() % static_cast<uint32_t>(most - least)));
  };
  for (int i = 0; i < 2'000'000; ++i) {
    const float first = number(-80, 60), second = number(-101, 20), master = number(-40, 2);
    const float scale = draw() % 2 ? 1.0f : number(0, 13), eps = draw() % 4 ? number(-60, 10) : 0.0f;
    const float step_size = number(-22, 4);
    const float exact = first / (std::sqrt(second) * scale + eps);
    if (exact_update(first, second, scale, eps, inverse_root, inverse) != exact) std::puts("update");
    const float near = update_near(first, second, scale, eps, inverse_root, inverse);
    const float stepped = master - exact * step_size;
    const float least = fused(-near, step_size * (1.0f + UPDATE_ERROR), master);
    const float most = fused(-near, step_size * (1.0f - UPDATE_ERROR), master);
    if (!(least <= stepped && stepped <= most)) std::puts("update");
  }
}

}  // namespace

int main(int, char** arguments) {
  roots();
  quotients();
  updates(static_cast<uint32_t>(std::atol(arguments[1])));
}
