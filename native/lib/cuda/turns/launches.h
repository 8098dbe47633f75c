// Quantizers whose two passes are one launch.
#pragma once

#include "octavo/quantize.h"
#include "turns.cuh"

namespace octavo::cuda {

// Byte sizes of what such a call needs besides amaxes and levels: the order, and counts of tiles.
struct TurnBytes {
  int64_t order, groups, panels, columns;
};

TurnBytes turn_bytes(const QuantizeArgs& args, bool row_scaling);

// True where the passes of a call can be one launch: of bf16 as it is, in groups that are small enough. It has to be
// known before there are arrays, for the workspace; layouts, further outputs and alignment are not.
bool may_take_turns(const QuantizeArgs& args);

// True where they are, with wide loads.
bool takes_turns(const QuantizeArgs& args);

// `args`: all but what follows from the call's sizes. `cleared`: the words of its amaxes, side by side.
void launch_in_turns(const QuantizeArgs& call, TurnArgs<Plain<BF16>> args, uint32_t* cleared, int64_t cleared_count,
                     cudaStream_t stream);

}  // namespace octavo::cuda
