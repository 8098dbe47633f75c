// A row of two halves that take turns in the array (octavo/interleave.h), run by run.
#pragma once

#include <algorithm>

#include "octavo/interleave.h"

namespace octavo::cpu {

// Calls `body(element of the array, element from first, count)` for the elements [first, first + count) of the halves:
// each time as many as are neighbours in the array, too.
template <class Body>
void each_run(int64_t first, int64_t count, int64_t half, int64_t block, const Body& body) {
  for (int64_t done = 0; done < count;) {
    const int64_t at = first + done, run = std::min(block - at % half % block, count - done);
    body(interleaved_at(at, half, block), done, run);
    done += run;
  }
}

}  // namespace octavo::cpu
