// Stages in shared memory between the warp that asks for copies and the warpgroups that multiply.
#pragma once

#include "cuda/device/ptx.cuh"
#include "cuda/device/wgmma.cuh"
#include "params.h"
#include "schedule.cuh"

namespace octavo::cuda {

constexpr int MATH_WARPGROUPS = 2;
constexpr int MATH_WARPS = 4 * MATH_WARPGROUPS;
constexpr int GEMM_THREADS = 128 * (1 + MATH_WARPGROUPS);
constexpr uint32_t TILE_SLOTS = 4;  // tiles that the producer may be ahead

// Row scales are fetched from a multiple of 4 before the tile's first row: a copy begins at 16 bytes.
constexpr int SCALE_BOX_EXTRA = 4, SCALE_ROOM_EXTRA = 32;

// Floats from one staged row to the next: eight rows of eight words each then meet all banks twice, and no more.
constexpr int STAGED_PITCH = 128 + 8;

// Rounded results on their way out: boxes of a warp's 16 rows and 128 bytes, swizzled.
constexpr int OUT_BOX_BYTES = 16 * SWIZZLE_BYTES;

template <class Config>
struct GemmShared {
  alignas(1024) uint8_t left[Config::STAGES][Config::TILE_M * SWIZZLE_BYTES];
  alignas(1024) uint8_t right[Config::STAGES][Config::TILE_N * SWIZZLE_BYTES];
  union {  // a launch uses one of them
    alignas(1024) uint8_t boxes[MATH_WARPS][Config::OUT_BOXES * OUT_BOX_BYTES + (Config::OUT_BOXES == 0)];
    alignas(128) float staged[Config::STAGED ? Config::TILE_M : 1][Config::STAGED ? STAGED_PITCH : 4];
  };
  alignas(128) float left_scales[Config::LEFT_SCALES ? Config::STAGES : 1]
                                [Config::LEFT_SCALES ? Config::TILE_M + SCALE_ROOM_EXTRA : 1];
  alignas(128) float right_scales[Config::RIGHT_SCALES ? Config::STAGES : 1][Config::RIGHT_SCALES ? Config::TILE_N : 1];
  // factors of the result's columns
  alignas(16) float columns[MATH_WARPGROUPS][Config::LEFT_SCALES ? 1 : Config::TILE_N];
  alignas(16) GemmTileAt tiles[TILE_SLOTS];
  uint64_t full[Config::STAGES], empty[Config::STAGES];
  uint64_t tile_full[TILE_SLOTS], tile_empty[TILE_SLOTS];
};

// A position in a ring of SIZE barriers and the parity of its phase.
template <int SIZE>
struct Ring {
  int at = 0;
  uint32_t parity = 0;

  __device__ void next() {
    if (++at == SIZE) {
      at = 0;
      parity ^= 1;
    }
  }
};

// One side's view of the stages. Both sides walk the same K-blocks of the same tiles, in order.
template <class Config>
class GemmPipeline {
 public:
  __device__ explicit GemmPipeline(GemmShared<Config>& shared) : shared_(shared) {}

  __device__ static void init(GemmShared<Config>& shared) {
    for (int stage = 0; stage < Config::STAGES; ++stage) {
      barrier_init(&shared.full[stage], 1);
      barrier_init(&shared.empty[stage], MATH_WARPS);
    }
    for (uint32_t slot = 0; slot < TILE_SLOTS; ++slot) {
      barrier_init(&shared.tile_full[slot], 1);
      barrier_init(&shared.tile_empty[slot], MATH_WARPS);
    }
    barrier_init_fence();
  }

  __device__ uint8_t* left(int stage) const { return shared_.left[stage]; }
  __device__ uint8_t* right(int stage) const { return shared_.right[stage]; }
  __device__ float* left_scales(int stage) const { return shared_.left_scales[stage]; }
  __device__ float* right_scales(int stage) const { return shared_.right_scales[stage]; }
  __device__ float* staged(int row) const { return shared_.staged[row]; }
  // Math: room for a warp's box `number` of a tile whose stages have all been read: its own, and then the warpgroup's
  // left rows of the last stages.
  __device__ uint8_t* box(int warp, int number) const {
    if (number < Config::OUT_BOXES) return shared_.boxes[warp] + number * OUT_BOX_BYTES;
    const int stage = (read_.at + Config::STAGES - 1 - (number - Config::OUT_BOXES)) % Config::STAGES;
    return shared_.left[stage] + warp * OUT_BOX_BYTES;
  }
  __device__ float* columns() const { return shared_.columns[threadIdx.x / 128 - 1]; }

  // Producer: the next stage, once it is empty, with `bytes` announced at the barrier that is returned.
  __device__ uint64_t* begin_fill(int& stage, uint32_t bytes) {
    barrier_wait(&shared_.empty[read_.at], read_.parity ^ 1);
    stage = read_.at;
    read_.next();
    barrier_arrive_expecting(&shared_.full[stage], bytes);
    return &shared_.full[stage];
  }

  // Math: the next stage, and whether it is full already.
  __device__ int next_stage() const { return read_.at; }
  __device__ bool next_is_full() const { return barrier_passed(&shared_.full[read_.at], read_.parity); }

  // Math: the next stage, once it is full, which it may be known to be.
  __device__ int wait_full(bool full = false) {
    if (!full) barrier_wait(&shared_.full[read_.at], read_.parity);
    const int stage = read_.at;
    read_.next();
    return stage;
  }

  // Math: the stage was read. Once a warp.
  __device__ void release(int stage) {
    if (threadIdx.x % 32 == 0) barrier_arrive(&shared_.empty[stage]);
  }

  // Producer: hands a tile to the math warpgroups. All lanes of the warp together.
  __device__ void put_tile(uint32_t number, const GemmTileAt& tile) {
    const uint32_t slot = number % TILE_SLOTS;
    barrier_wait(&shared_.tile_empty[slot], number / TILE_SLOTS % 2 ^ 1);
    if (threadIdx.x % 32 == 0) {
      shared_.tiles[slot] = tile;
      barrier_arrive(&shared_.tile_full[slot]);
    }
  }

  // Math: tile `number`, which stays in shared memory until it is released.
  __device__ const GemmTileAt& take_tile(uint32_t number) {
    const uint32_t slot = number % TILE_SLOTS;
    barrier_wait(&shared_.tile_full[slot], number / TILE_SLOTS % 2);
    return shared_.tiles[slot];
  }

  // Math: the tile's description and the stages lent to its results are of no more use.
  __device__ void release_tile(uint32_t number) {
    __syncwarp();
    if (threadIdx.x % 32 == 0) {
      if (Config::LENT_BOXES > 0) bulk_wait_read<1>();  // the boxes of its own are behind the lent ones
      barrier_arrive(&shared_.tile_empty[number % TILE_SLOTS]);
    }
  }

  // Producer: returns when the tile before `number` has been released.
  __device__ void wait_released(uint32_t number) {
    if (number > 0) barrier_wait(&shared_.tile_empty[(number - 1) % TILE_SLOTS], (number - 1) / TILE_SLOTS % 2);
  }

 private:
  GemmShared<Config>& shared_;
  Ring<Config::STAGES> read_;
};

}  // namespace octavo::cuda
