// Splitting a range over threads, and the floating-point mode that the numerical definition requires.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <new>
#include <type_traits>

namespace octavo::cpu {

// During its lifetime subnormals are honoured and rounding is to nearest; frameworks' threads may have set FTZ and DAZ.
class FloatMode {
 public:
  FloatMode();
  ~FloatMode();
  FloatMode(const FloatMode&) = delete;
  FloatMode& operator=(const FloatMode&) = delete;

 private:
  uint64_t saved_;
};

using Piece = void (*)(void* body, int64_t first, int64_t last);
void split_pieces(int64_t count, int64_t bytes_each, int threads, Piece piece, void* body);

// body(first, last) over [0, count) in at most `threads` contiguous pieces, each under a FloatMode. One piece where
// all the work, count * bytes_each, is less than 1 MiB; the calling thread takes the pieces that no thread could be
// started for. The pieces' results never overlap, so they do not depend on `threads`.
template <typename Body>
void split(int64_t count, int64_t bytes_each, int threads, Body&& body) {
  // not std::function, which allocates and may throw
  const Piece piece = [](void* given, int64_t first, int64_t last) {
    (*static_cast<std::remove_reference_t<Body>*>(given))(first, last);
  };
  split_pieces(count, bytes_each, threads, piece, &body);
}

// `split` with one Scratch per piece: body(first, last, scratch). False if a thread had no memory for its Scratch; its
// piece is then not processed.
template <typename Scratch, typename Body>
[[nodiscard]] bool split_with(int64_t count, int64_t bytes_each, int threads, const Body& body) {
  std::atomic<bool> good = true;
  split(count, bytes_each, threads, [&](int64_t first, int64_t last) {
    const auto scratch = std::unique_ptr<Scratch>(new (std::nothrow) Scratch);
    if (scratch) {
      body(first, last, *scratch);
    } else {
      good = false;
    }
  });
  return good;
}

}  // namespace octavo::cpu
