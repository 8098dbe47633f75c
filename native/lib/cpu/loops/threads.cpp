#include "threads.h"

#include <exception>
#include <thread>
#include <vector>

#if defined(__x86_64__) || defined(_M_X64)
#include <immintrin.h>
#endif

namespace octavo::cpu {

#if defined(__x86_64__) || defined(_M_X64)
// 0x1F80: exceptions masked, round to nearest, no FTZ, no DAZ.
FloatMode::FloatMode() : saved_(_mm_getcsr()) { _mm_setcsr(0x1F80); }
FloatMode::~FloatMode() { _mm_setcsr(static_cast<unsigned>(saved_)); }
#elif defined(__aarch64__)
FloatMode::FloatMode() {
  asm volatile("mrs %0, fpcr" : "=r"(saved_));
  asm volatile("msr fpcr, %0" : : "r"(uint64_t{0}));
}
FloatMode::~FloatMode() { asm volatile("msr fpcr, %0" : : "r"(saved_)); }
#else
FloatMode::FloatMode() : saved_(0) {}
FloatMode::~FloatMode() = default;
#endif

void split_pieces(int64_t count, int64_t bytes_each, int threads, Piece piece, void* body) {
  if (count <= 0) return;
  const int64_t worth = bytes_each > 0 && count > (int64_t{1} << 20) / bytes_each ? threads : 1;
  const int64_t pieces = worth < 1 ? 1 : worth < count ? worth : count;
  const auto run = [=](int64_t index) {
    const FloatMode mode;
    const int64_t each = count / pieces, more = count % pieces;
    const int64_t first = index * each + (index < more ? index : more);
    piece(body, first, first + each + (index < more ? 1 : 0));
  };
  std::vector<std::thread> workers;
  int64_t started = 1;
  if (pieces > 1) {
    try {
      workers.reserve(static_cast<size_t>(pieces - 1));
      for (; started < pieces; ++started) workers.emplace_back(run, started);
    } catch (const std::exception&) {
      // No memory or no thread left: the calling thread does the rest.
    }
  }
  run(0);
  for (; started < pieces; ++started) run(started);
  for (std::thread& worker : workers) worker.join();
}

}  // namespace octavo::cpu
