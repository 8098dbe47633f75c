// Rows that are read where a router's tokens stand.
#pragma once

#include "divisor.cuh"
#include "octavo/quantize.h"

namespace octavo::cuda {

// Where the rows of an operand stand, see octavo::RowIndex.
struct RowsAt {
  const int64_t* of_rows;   // null: row i is the array's row i
  uint32_t count, choices;  // rows of the array, and choices of all of them
  Divisor by_each;

  static RowsAt of(const RowIndex& index) {
    return {index.of_rows, static_cast<uint32_t>(index.count), static_cast<uint32_t>(index.count * index.each),
            Divisor::of(static_cast<uint32_t>(index.each))};
  }
  // -1: nowhere, the row is zeros.
  __device__ int operator()(int64_t row) const { return token_of(__ldg(of_rows + row)); }
  // The same of a number that has been loaded.
  __device__ int token_of(int64_t choice) const {
    return static_cast<uint64_t>(choice) < choices ? static_cast<int>(by_each.quotient(static_cast<uint32_t>(choice)))
                                                   : -1;
  }
};

}  // namespace octavo::cuda
