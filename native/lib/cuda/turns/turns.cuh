// Both passes of a quantizer in one launch: amaxes of a group, then its codes, which find their input in the L2 cache.
// Each panel has two turns, one for each pass; CTAs take turns in an order in which the codes of a group's panels come
// some tiles after the amaxes of the group (docs/decisions/0064).
//
// A tile of codes waits for its group's amaxes. It cannot wait forever: they belong to CTAs with smaller numbers, which
// do not wait and have started, because CTAs start in the order of their numbers, however few fit on the device. (CUB's
// scans rely on the same order.)
#pragma once

#include "cuda/tile/args.cuh"

namespace octavo::cuda {

constexpr uint32_t NO_PANEL = ~0u;  // in the order: a turn without a panel
constexpr uint32_t READY = ~0u;     // in a count: no tile is left, and scales of their amaxes can be read

struct Turns {
  const uint32_t* order;  // [2 panels] twice the number of a panel, and one more if it is the turn of its codes
  // How many tiles have yet to raise an amax from which scales are made: of a group, or in row scaling of a panel's
  // rows and of 128 columns of a group. Null where there are no such scales.
  uint32_t* of_groups;   // [G]
  uint32_t* of_panels;   // [panels]
  uint32_t* of_columns;  // [G, across]
  Groups groups;
  TileShape shape;
  uint32_t across, a_panel;  // tiles across the columns, and in a panel
  Divisor by_across, by_panel;
};

// The parameters of a kernel for both passes. All amaxes hold fp32 bits and are zeroed before the launch.
template <class S>
struct TurnArgs {
  TileArgs<S> tile;  // its scales are those that the launch makes
  Turns turns;
  uint32_t* group;      // [G]; of FP8 encode scales take their place
  uint32_t* rows;       // [M] or null, likewise
  uint32_t* columns;    // [G, C] or null, likewise
  SecondLevel* levels;  // [G] of NVFP4
  float* row_out;       // stored scales of the planes, NVFP4's of the second level; null: not requested
  float* col_out;
  float* amax;  // [G] or null
};

// This CTA's tile, and whether it is the turn of its codes; false if there is none.
template <int LANES>
__device__ __forceinline__ bool take_turn(const Turns& turns, Tile& tile, bool& codes) {
  const uint32_t turn = turns.by_panel.quotient(blockIdx.x), place = blockIdx.x - turn * turns.a_panel;
  const uint32_t panel = __ldg(turns.order + turn);
  if (panel == NO_PANEL) return false;
  codes = panel % 2;
  const uint32_t down = turns.by_across.quotient(place);
  tile.shape = shape_of<LANES>(turns.shape);
  tile.first = static_cast<int>(down) * tile.shape.rows();
  tile.panel_index = static_cast<int>(panel / 2);
  tile.col0 = static_cast<int>(place - down * turns.across) * tile.shape.cols();
  tile.panel = panel_at(turns.groups, tile.panel_index);
  return true;
}

__device__ __forceinline__ uint32_t* count_of_columns(const Turns& turns, const Tile& tile) {
  return turns.of_columns + tile.panel.group * turns.across + tile.col0 / TILE_COLS;
}

// One thread of a CTA whose amaxes have been raised counts its tile; true if it was the last. Acquire and release: the
// last one sees the amaxes of all others.
__device__ __forceinline__ bool count_down(uint32_t* left) {
  uint32_t before;
  asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], %2;" : "=r"(before) : "l"(left), "r"(~0u) : "memory");
  return before == 1;
}

__device__ __forceinline__ void set_ready(uint32_t* left) {
  asm volatile("st.release.gpu.global.u32 [%0], %1;" ::"l"(left), "r"(READY) : "memory");
}

// Every thread that reads the scales calls it, for it orders that thread's loads alone.
__device__ __forceinline__ void wait_until_ready(const uint32_t* left) {
  for (;;) {
    uint32_t now;
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(now) : "l"(left) : "memory");
    if (now == READY) return;
    __nanosleep(20);
  }
}

// A scale that this launch has made, after the wait for it. __ldg must not read it: ld.global.nc is for memory that
// does not change during the launch, and nvcc may move it across the wait.
__device__ __forceinline__ float made_value(const float* at) {
  float value;
  asm volatile("ld.global.f32 %0, [%1];" : "=f"(value) : "l"(at));
  return value;
}

__device__ __forceinline__ float4 made_values(const float* at) {
  float4 four;
  asm volatile("ld.global.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(four.x), "=f"(four.y), "=f"(four.z), "=f"(four.w)
               : "l"(at));
  return four;
}

}  // namespace octavo::cuda
