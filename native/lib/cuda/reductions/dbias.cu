// The second stage of dbias: column sums of panels to column sums of groups.
//
//   reads   partial [P][C] fp32, 1/128 of the operand's elements
//   writes  out     [G, C] fp32
//
// One thread owns a column of a group and adds its panels in order, so the bits do not depend on the launch. Small CTAs
// spread even few groups over the device.
#include "dbias.h"

#include "cuda/device/launch.h"
#include "cuda/planes/planes.cuh"

namespace octavo::cuda {
namespace {

constexpr int THREADS = 64;
constexpr int AHEAD = 16;  // loads in flight, because the additions depend on one another

struct Job {
  const float* partial;
  float* out;
  Panels panels;
  int64_t cols;
  const int32_t* unchanged;
};

// Panels [first, end) of a group.
struct Range {
  int64_t first, end;
};

OCTAVO_HD Range panels_of(const Panels& panels, int64_t group) {
  if (panels.matrix_rows) {
    const int64_t each = ceil_div(panels.matrix_rows, PANEL_ROWS);
    return {group * each, (group + 1) * each};
  }
  if (panels.plan == nullptr) return {0, 0};
  const int64_t* start = PlanView{panels.plan, panels.rows, panels.groups}.block_start(HEIGHT_128);
  return {start[group], start[group + 1]};
}

__global__ void __launch_bounds__(THREADS) sum_panels_kernel(const __grid_constant__ Job job) {
  if (job.unchanged != nullptr && __ldg(job.unchanged) != 0) return;
  const int64_t col = int64_t{blockIdx.x} * THREADS + threadIdx.x;
  if (col >= job.cols) return;
  for (int64_t group = blockIdx.y; group < job.panels.groups; group += gridDim.y) {
    const Range range = panels_of(job.panels, group);
    const float* from = job.partial + col;
    float sum = 0.0f;
    int64_t panel = range.first;
    for (; panel + AHEAD <= range.end; panel += AHEAD) {
      float next[AHEAD];
#pragma unroll
      for (int i = 0; i < AHEAD; ++i) next[i] = __ldg(from + (panel + i) * job.cols);
#pragma unroll
      for (int i = 0; i < AHEAD; ++i) sum += next[i];
    }
    for (; panel < range.end; ++panel) sum += __ldg(from + panel * job.cols);
    job.out[group * job.cols + col] = sum;
  }
}

}  // namespace

Error sum_panels(const float* partial, float* out, const Input& x, int64_t cols, const int32_t* unchanged,
                 cudaStream_t stream) {
  if (cols == 0) return {};
  const Job job = {partial, out, {x.rows, x.groups, x.matrix_rows, x.plan}, cols, unchanged};
  const dim3 grid = {static_cast<unsigned>(ceil_div(cols, THREADS)), grid_for(x.groups, MAX_GRID_Y)};
  sum_panels_kernel<<<grid, THREADS, 0, stream>>>(job);
  return launched();
}

}  // namespace octavo::cuda
