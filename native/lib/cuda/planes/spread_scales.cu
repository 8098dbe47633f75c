#include "spread_scales.h"

#include "octavo/layouts.h"

namespace octavo::cuda {
namespace {

constexpr int THREADS_EACH = 256;

__global__ void __launch_bounds__(THREADS_EACH)
    spread(const float* squares, int64_t across, int64_t pitch, PlanView plan, float* columns) {
  const int64_t at = int64_t{blockIdx.x} * THREADS_EACH + threadIdx.x, panel = at / pitch;
  if (panel < plan.blocks_in_use(HEIGHT_128)) columns[at] = squares[panel * across + at % pitch / PANEL_ROWS];
}

}  // namespace

void spread_scales(const float* squares, int64_t cols, int64_t panels, const PlanView& plan, float* columns,
                   cudaStream_t stream) {
  const int64_t pitch = round_up(cols, 4), count = panels * pitch;
  if (count == 0) return;
  const auto blocks = static_cast<uint32_t>(ceil_div(count, THREADS_EACH));
  spread<<<blocks, THREADS_EACH, 0, stream>>>(squares, ceil_div(cols, PANEL_ROWS), pitch, plan, columns);
}

}  // namespace octavo::cuda
