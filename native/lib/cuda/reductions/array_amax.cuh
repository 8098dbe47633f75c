// Amaxes of groups whose rows an index repeats: each row of the array has been read once, in the pass before.
#pragma once

#include "cuda/tile/arrays.cuh"
#include "cuda/tile/maxima.cuh"

namespace octavo::cuda {

// From the amaxes of the array's rows: one CTA of PANEL_ROWS threads per panel.
__global__ void gather_amaxes(const uint32_t* of_array, RowsAt rows_at, Groups groups, uint32_t* most,
                              const int32_t* unchanged) {
  if (unchanged && *unchanged) return;
  const Panel32 panel = panel_at(groups, static_cast<int>(blockIdx.x));
  if (!panel.rows) return;
  const int thread = static_cast<int>(threadIdx.x);
  const int row = thread < panel.rows ? rows_at(int64_t{panel.row0} + thread) : -1;
  const uint32_t bits = __reduce_max_sync(~0u, row >= 0 ? of_array[row] : 0);
  if (thread % 32 == 0) raise(most + panel.group, bits);
}

}  // namespace octavo::cuda
