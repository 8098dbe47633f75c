// The layout of a caller's workspace.
#pragma once

#include "dispatch.h"

namespace octavo::cuda {

// Byte offsets into the workspace. The arrays that must be zeroed come first, contiguously.
struct Workspace {
  size_t group, hadamard, rows, columns, array, cleared;
  size_t order, of_groups, of_panels, of_columns;  // of turns
  size_t row_levels, col_levels, mean, rest, rstd, partial_sums, products, materialized, bytes;
};

// The array at such an offset.
template <class T>
T* workspace_at(const QuantizeArgs& args, size_t offset) {
  return reinterpret_cast<T*>(static_cast<char*>(args.workspace) + offset);
}

Workspace workspace_of(const QuantizeArgs& args, const Dispatch& dispatch);

// Chunks of a row's products with dy.
int64_t product_chunks(const QuantizeArgs& args);

}  // namespace octavo::cuda
