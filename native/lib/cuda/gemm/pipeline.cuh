// The smem pipeline between the producer warp, which issues TMA loads, the consumer warpgroups, which issue wgmma, and
// in some launches a store warp for each of them, which issues the TMA stores of its results, or warps that gather rows
// of tokens, which TMA cannot load by an index.
#pragma once

#include "config.cuh"
#include "cuda/device/ptx.cuh"
#include "params.h"
#include "schedule.cuh"

namespace octavo::cuda {

constexpr uint32_t TILE_SLOTS = 4;  // how many tiles the producer may run ahead

// The four warps of the producer's warpgroup are the producer itself, then those that store, one for each consumer
// warpgroup, then those that gather rows of tokens. Where two gather, one is left to store for all consumers.
constexpr int GATHER_WARPS = 2;
template <class Config>
constexpr int store_warps = Config::GATHERED == Gathered::none ? Config::WARPGROUPS : 1;

// Whether whoever fills the left operand's stages waits at a tile's FIRST_BORROWED: its results are stored by TMA, and
// the consumers wait for that. Where store warps do, load_around_borrowed waits.
template <class Config>
__device__ __forceinline__ bool waits_for_borrowed(const GemmParams& params) {
  return Config::BORROWED_TILES > 0 && params.out_by_tma && !params.store_warps;
}

// Floats from one staged row to the next: eight rows of eight words then hit every bank exactly twice.
constexpr int STAGED_PITCH = 128 + 8;

// Rounded results before their TMA store: TMA tiles of a warp's 16 rows of 128 bytes, swizzled.
constexpr int OUT_TILE_BYTES = WARP_ROWS * SWIZZLE_BYTES;

template <class Config>
struct GemmSmem {
  // The result's TMA tiles lie by warp; by tile where a store warp stores the same tile of four warps at once.
  static constexpr int OUT_ROWS = Config::STORE_WARPS ? Config::OUT_TILES : Config::CONSUMER_WARPS;
  static constexpr int OUT_BYTES = Config::OUT_TILES * Config::CONSUMER_WARPS / OUT_ROWS * OUT_TILE_BYTES;

  alignas(1024) uint8_t left[Config::STAGES][Config::TILE_M * SWIZZLE_BYTES];
  alignas(1024) uint8_t right[Config::STAGES][Config::TILE_N * SWIZZLE_BYTES];
  union {  // a launch uses only one of the two
    alignas(1024) uint8_t out_tiles[OUT_ROWS][OUT_BYTES + (OUT_BYTES == 0)];
    alignas(128) float staged[Config::STAGED ? Config::TILE_M : 1][Config::STAGED ? STAGED_PITCH : 4];
  };
  alignas(128) float left_scales[Config::LEFT_SCALES ? Config::STAGES : 1]
                                [Config::LEFT_SCALES ? Config::TILE_M + SCALE_ROOM_EXTRA : 1];
  alignas(128) float right_scales[Config::RIGHT_SCALES ? Config::STAGES : 1][Config::RIGHT_SCALES ? Config::TILE_N : 1];
  // Factors of the result's columns.
  alignas(16) float columns[Config::WARPGROUPS][Config::LEFT_SCALES ? 1 : Config::TILE_N];
  alignas(16) GemmTileAt tiles[TILE_SLOTS];
  // Who arrives at which barrier, and what has then happened; `init` has the counts.
  //   full            the producer, which expects TMA's bytes; every lane that gathers, or of the relay: it has copied
  //   empty           a lane of each consumer warp: it has read the stage. Every lane where a relay stores scales, for
  //                   its stores must follow each lane's loads. Of addends, a store thread for its warpgroups
  //   copied          every lane that gathers, to the relay: it has copied
  //   tile_full       the producer: the slot describes the next tile
  //   tile_empty      each warp that reads slots: it needs neither the slot nor smem that the tile's results borrowed
  //   results_full    a lane of each consumer warp: its part of a bf16 result is in smem. With store warps alone
  //   results_empty   the store thread: TMA has read the results
  //   addends_full    a lane of each consumer warp: its sums have been added to the addends in a stage
  uint64_t full_barriers[Config::STAGES], empty_barriers[Config::STAGES];
  uint64_t copied_barriers[Config::RELAYED ? Config::STAGES : 1];
  uint64_t tile_full_barriers[TILE_SLOTS], tile_empty_barriers[TILE_SLOTS];
  uint64_t results_full_barriers[Config::WARPGROUPS], results_empty_barriers[Config::WARPGROUPS];
  uint64_t addends_full_barriers[Config::WARPGROUPS][Config::STAGES];
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
  // Moves the position alone: for a thread that waits at none of the ring's barriers, and needs no parity.
  __device__ void skip(int count) { at = (at + count) % SIZE; }
};

// The pipeline as the producer, a consumer thread or a store thread sees it. All walk the same K-blocks of the same
// tiles, in order.
template <class Config>
class GemmPipeline {
 public:
  __device__ explicit GemmPipeline(GemmSmem<Config>& smem) : smem_(smem) {}

  __device__ static void init(GemmSmem<Config>& smem, bool stores) {
    const int gathering = Config::GATHERED == Gathered::none ? 0 : GATHER_WARPS;
    for (int stage = 0; stage < Config::STAGES; ++stage) {
      mbarrier_init(&smem.full_barriers[stage], 1 + 32 * (Config::RELAYED ? 1 : gathering));
      if (Config::RELAYED) mbarrier_init(&smem.copied_barriers[stage], 32 * gathering);
      mbarrier_init(&smem.empty_barriers[stage], Config::CONSUMER_WARPS * (Config::RELAYED ? 32 : 1));
    }
    for (uint32_t slot = 0; slot < TILE_SLOTS; ++slot) {
      mbarrier_init(&smem.tile_full_barriers[slot], 1);
      mbarrier_init(&smem.tile_empty_barriers[slot],
                    Config::CONSUMER_WARPS + (stores ? store_warps<Config> : 0) + gathering + Config::RELAYED);
    }
    for (int warpgroup = 0; warpgroup < Config::WARPGROUPS; ++warpgroup) {
      mbarrier_init(&smem.results_full_barriers[warpgroup], WARPGROUP_WARPS);
      mbarrier_init(&smem.results_empty_barriers[warpgroup], 1);
      for (uint64_t& barrier : smem.addends_full_barriers[warpgroup]) mbarrier_init(&barrier, WARPGROUP_WARPS);
    }
    fence_mbarrier_init();
  }

  __device__ uint8_t* left(int stage) const { return smem_.left[stage]; }
  __device__ uint8_t* right(int stage) const { return smem_.right[stage]; }
  __device__ float* left_scales(int stage) const { return smem_.left_scales[stage]; }
  __device__ float* right_scales(int stage) const { return smem_.right_scales[stage]; }
  __device__ float* staged(int row) const { return smem_.staged[row]; }
  // Where a stage holds a warpgroup's 64 rows of the result's TMA tile `number`, 32 fp32 columns.
  __device__ uint8_t* addends(int stage, int number, int warpgroup) const {
    uint8_t* const tile =
        number == 0 ? smem_.left[stage] : smem_.right[stage] + (number - 1) * Config::WARPGROUPS * BLOCK_BYTES;
    return tile + warpgroup * BLOCK_BYTES;
  }
  // Consumer and store thread, behind a tile's last K-block: smem for a warp's TMA tile `number` of the result, its own
  // or, from OUT_TILES on, borrowed.
  __device__ uint8_t* out_tile(int warp, int number) const {
    if (number < Config::OUT_TILES) {
      return Config::STORE_WARPS ? smem_.out_tiles[number] + warp * OUT_TILE_BYTES
                                 : smem_.out_tiles[warp] + number * OUT_TILE_BYTES;
    }
    const int stage = (read_.at + Config::STAGES - 1 - (number - Config::OUT_TILES)) % Config::STAGES;
    return smem_.left[stage] + warp * OUT_TILE_BYTES;
  }
  __device__ float* columns() const { return smem_.columns[threadIdx.x / WARPGROUP_THREADS - 1]; }

  __device__ int next_stage() const { return read_.at; }
  __device__ uint64_t* full_barrier(int stage) const { return &smem_.full_barriers[stage]; }
  // Where a gathering warp's copies arrive.
  __device__ uint64_t* copied_barrier(int stage) const {
    return Config::RELAYED ? &smem_.copied_barriers[stage] : full_barrier(stage);
  }

  // Producer: waits until the next stage is empty, expects `bytes` at its full barrier and returns that barrier.
  __device__ uint64_t* producer_acquire(int& stage, uint32_t bytes) {
    mbarrier_wait(&smem_.empty_barriers[read_.at], read_.parity ^ 1);
    stage = read_.at;
    read_.next();
    mbarrier_arrive_expect_tx(&smem_.full_barriers[stage], bytes);
    return &smem_.full_barriers[stage];
  }

  // Gathering warp: waits until the next stage is empty and returns it.
  __device__ int gather_acquire() {
    mbarrier_wait(&smem_.empty_barriers[read_.at], read_.parity ^ 1);
    const int stage = read_.at;
    read_.next();
    return stage;
  }

  // Consumer: whether the next stage is already full.
  __device__ bool consumer_try_wait() const { return mbarrier_test_wait(&smem_.full_barriers[read_.at], read_.parity); }

  // Consumer: waits until the next stage is full, unless the caller knows that it is, and returns it.
  __device__ int consumer_wait(bool full = false) {
    if (!full) mbarrier_wait(&smem_.full_barriers[read_.at], read_.parity);
    const int stage = read_.at;
    read_.next();
    return stage;
  }

  // Consumer: the stage has been read.
  __device__ void consumer_release(int stage) {
    if (Config::RELAYED || threadIdx.x % 32 == 0) mbarrier_arrive(&smem_.empty_barriers[stage]);
  }

  // Producer: publishes a tile to the consumer warpgroups. Called by all lanes of the warp.
  __device__ void publish_tile(uint32_t number, const GemmTileAt& tile) {
    const uint32_t slot = number % TILE_SLOTS;
    mbarrier_wait(&smem_.tile_empty_barriers[slot], number / TILE_SLOTS % 2 ^ 1);
    if (threadIdx.x % 32 == 0) {
      smem_.tiles[slot] = tile;
      mbarrier_arrive(&smem_.tile_full_barriers[slot]);
    }
  }

  // Consumer and store thread: waits for tile `number`, which stays in smem until it is released.
  __device__ const GemmTileAt& wait_tile(uint32_t number) {
    const uint32_t slot = number % TILE_SLOTS;
    mbarrier_wait(&smem_.tile_full_barriers[slot], number / TILE_SLOTS % 2);
    return smem_.tiles[slot];
  }

  // Gathering warp: the tile's description may be overwritten.
  __device__ void release_gathered_tile(uint32_t number) {
    __syncwarp();
    if (threadIdx.x % 32 == 0) mbarrier_arrive(&smem_.tile_empty_barriers[number % TILE_SLOTS]);
  }

  // Consumer: the tile's description and the stages that its results borrowed may be overwritten.
  __device__ void release_tile(uint32_t number) {
    __syncwarp();
    if (threadIdx.x % 32 == 0) {
      if (Config::BORROWED_TILES > 0) bulk_wait_group_read<1>();  // borrowed tiles were committed before the warp's own
      mbarrier_arrive(&smem_.tile_empty_barriers[number % TILE_SLOTS]);
    }
  }

  // Store thread: the tile's description and what its results borrowed may be overwritten.
  __device__ void release_stored_tile(uint32_t number) {
    mbarrier_arrive(&smem_.tile_empty_barriers[number % TILE_SLOTS]);
  }

  // Store thread: passes a tile's K-blocks.
  __device__ void skip(int k_blocks) { read_.skip(k_blocks); }

  // Consumer: waits until the last tile's results have left smem.
  __device__ void results_acquire() {
    mbarrier_wait(&smem_.results_empty_barriers[threadIdx.x / WARPGROUP_THREADS - 1], results_parity_ ^ 1);
    results_parity_ ^= 1;
  }

  // Consumer, one lane of a warp: its results are in smem, and each lane has fenced its writes.
  __device__ void results_publish() {
    mbarrier_arrive(&smem_.results_full_barriers[threadIdx.x / WARPGROUP_THREADS - 1]);
  }

  // Store thread: waits for a warpgroup's results.
  __device__ void results_wait(int warpgroup) {
    mbarrier_wait(&smem_.results_full_barriers[warpgroup], results_parity_);
    results_parity_ ^= 1;
  }

  // Store thread: they have left smem.
  __device__ void results_release(int warpgroup) { mbarrier_arrive(&smem_.results_empty_barriers[warpgroup]); }

  // Consumer, one lane of a warp: its sums have been added to what a stage holds, and each lane has fenced its writes.
  __device__ void addends_publish(int stage) {
    mbarrier_arrive(&smem_.addends_full_barriers[threadIdx.x / WARPGROUP_THREADS - 1][stage]);
  }

  // Store thread: the next stage of the ring, past which it moves on.
  __device__ int addends_next() {
    const int stage = read_.at;
    addends_parities_ ^= 1u << stage;
    read_.skip(1);
    return stage;
  }

  // Store thread: waits for a warpgroup's sums in the stage that `addends_next` has returned and whose parity it has
  // flipped.
  __device__ void addends_wait(int stage, int warpgroup) const {
    mbarrier_wait(&smem_.addends_full_barriers[warpgroup][stage], addends_parities_ >> stage & 1 ^ 1);
  }

  // Store thread, in place of its warpgroups: the stage has been read.
  __device__ void addends_release(int stage, int warpgroups) {
    mbarrier_arrive_for(&smem_.empty_barriers[stage], WARPGROUP_WARPS * warpgroups);
  }

  // Producer and gathering warp: waits until the tile before `number` has been released.
  __device__ void wait_tile_released(uint32_t number) {
    if (number > 0) mbarrier_wait(&smem_.tile_empty_barriers[(number - 1) % TILE_SLOTS], (number - 1) / TILE_SLOTS % 2);
  }

 private:
  GemmSmem<Config>& smem_;
  Ring<Config::STAGES> read_;
  uint32_t results_parity_ = 0, addends_parities_ = 0;  // one bit; a bit for each stage
};

}  // namespace octavo::cuda
