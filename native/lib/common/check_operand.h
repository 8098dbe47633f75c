// Checks of what every call on an operand's planes says of it.
#pragma once

#include "check.h"
#include "octavo/quantize.h"

namespace octavo {

constexpr const char* HADAMARD_STACKED =
    "hadamard is for ragged rows and matrix_rows says stacked matrices; take hadamard off their quantizer";

Error check_spec(const QuantizerSpec& spec);

Error check_shape(int64_t rows, int64_t cols, int64_t groups, int64_t matrix_rows, const int64_t* plan);

// `elements`: of the payload. An operand without elements may have null arrays.
Error check_plane(const QuantizerSpec& spec, const Plane& plane, int64_t elements);

// Rows that stand in an array of `index.count` rows. Without an index, too: kernels divide by `each`.
Error check_row_index(const RowIndex& index);

// What a plane of codes and one of values have beside them.
Error check_second_level(const QuantizerSpec& spec, const Plane& plane, int64_t elements);

}  // namespace octavo
