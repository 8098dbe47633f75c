#include "interleave_scales.h"

#include "octavo/interleave.h"
#include "octavo/layouts.h"

namespace octavo::cuda {
namespace {

constexpr int THREADS_EACH = 256;

__global__ void __launch_bounds__(THREADS_EACH)
    interleave(const float* halves, int64_t rows, int64_t pitch, int64_t cols, int64_t block, PlanView plan,
               float* interleaved) {
  const int64_t at = int64_t{blockIdx.x} * THREADS_EACH + threadIdx.x, row = at / pitch, col = at - row * pitch;
  const int64_t count = plan.words ? plan.blocks_in_use(HEIGHT_128) : rows;
  if (row < count && col < cols) interleaved[row * pitch + interleaved_at(col, cols / 2, block)] = halves[at];
}

}  // namespace

void interleave_scales(const float* halves, int64_t rows, int64_t pitch, int64_t cols, int64_t block,
                       const PlanView* plan, float* interleaved, cudaStream_t stream) {
  const int64_t count = rows * pitch;
  if (count == 0) return;
  const auto ctas = static_cast<uint32_t>(ceil_div(count, THREADS_EACH));
  interleave<<<ctas, THREADS_EACH, 0, stream>>>(halves, rows, pitch, cols, block, plan ? *plan : PlanView{},
                                                interleaved);
}

}  // namespace octavo::cuda
