// quantize_cpu: passes over the panels of the operand. A panel is quantized by one thread, from a tile in fp32: its
// row codes, then its columnwise codes.
#include "octavo/quantize.h"

#include <algorithm>

#include "cpu/loops/threads.h"
#include "job.h"

namespace octavo {

namespace cpu {

namespace {

class Carver {
 public:
  explicit Carver(void* base) : base_(static_cast<uint8_t*>(base)) {}

  template <typename T>
  T* take(int64_t count) {
    uint8_t* here = base_ == nullptr ? nullptr : base_ + used_;
    used_ += static_cast<size_t>(round_up(count * static_cast<int64_t>(sizeof(T)), 64));
    return reinterpret_cast<T*>(here);
  }

  size_t used() const { return used_; }

 private:
  uint8_t* base_;
  size_t used_ = 0;
};

// One tile's part of dbias: within a panel, 16 slots of 8 consecutive rows are each summed in row order, then added
// in slot order. A tile here has all rows of its panel.
void add_columns(const Job& job, const Tile& tile, const float* values) {
  float* sums = job.panel_sums + tile.panel_index * job.cols + tile.col;
  std::fill(sums, sums + tile.cols, 0.0f);
  for (int slot = 0; slot < tile.rows; slot += 8) {
    alignas(64) float part[128] = {};
    for (int r = slot; r < std::min(slot + 8, tile.rows); ++r) {
      job.loops.add(values + r * tile.stride, tile.cols, part);
    }
    job.loops.add(part, tile.cols, sums);
  }
}

// dbias [G, C]: the panels of a group in order; every NaN canonical, whose own bits would depend on the terms.
void sum_panels(const Job& job) {
  const int64_t all = job.groups() * job.cols;
  std::fill(job.args.dbias, job.args.dbias + all, 0.0f);
  for (int64_t index = 0; index < job.panels.used(); ++index) {
    const int64_t group = job.panels.at(index).group;
    job.loops.add(job.panel_sums + index * job.cols, job.cols, job.args.dbias + group * job.cols);
  }
  std::transform(job.args.dbias, job.args.dbias + all, job.args.dbias, canonical);
}

void store_activated(const Job& job, const Tile& tile, const float* values) {
  const int bytes = dtype_bytes(job.args.input.dtype);
  auto* to = static_cast<uint8_t*>(job.args.activated);
  for (int r = 0; r < tile.rows; ++r) {
    const int64_t element = (tile.panel.row0 + tile.row + r) * job.cols + tile.col;
    job.loops.store(static_cast<int>(job.args.input.dtype), values + r * tile.stride, to + element * bytes, tile.cols);
  }
}

void store_statistics(const Job& job, const Panel& panel, const Scratch& scratch) {
  const Prologue& prologue = job.args.prologue;
  if (prologue.kind != PrologueKind::norm) return;
  for (int r = 0; r < panel.rows; ++r) {
    const int64_t row = panel.row0 + r;
    if (prologue.mean != nullptr && prologue.norm == Norm::layer) {
      prologue.mean[row] = static_cast<float>(scratch.mean[r]);
    }
    if (prologue.rstd != nullptr) prologue.rstd[row] = static_cast<float>(scratch.rstd[r]);
  }
}

// True where args.amax needs no pass of its own.
bool amax_in_tiles(const Job& job) { return job.panel_amax != nullptr && !job.needs_group_amax(); }

void quantize_panel(const Job& job, int64_t index, Scratch& scratch) {
  const Panel panel = job.panels.at(index);
  begin_panel(job, panel, scratch);
  store_statistics(job, panel, scratch);
  if (job.args.prologue.dprobs != nullptr) probability_gradients(job, panel, scratch);
  if (job.args.prologue.forward != nullptr) forward_values(job, panel, scratch);
  if (job.row_wanted && job.spec().scaling == Scaling::row) row_scales(job, index, scratch);
  const bool wide = !job.column_wanted && !job.spec().square && job.args.dbias == nullptr;
  int32_t amax = 0;
  each_tile(job, index, wide, 0, job.cols, scratch, [&](const Tile& tile) {
    if (amax_in_tiles(job)) {
      for (int r = 0; r < tile.rows; ++r) {
        amax = std::max(amax, job.loops.amax_all(scratch.values + r * tile.stride, tile.cols));
      }
    }
    if (job.args.activated != nullptr) store_activated(job, tile, scratch.values);
    if (job.args.dbias != nullptr) add_columns(job, tile, scratch.values);
    if (job.row_pass()) row_codes(job, tile, scratch);
    if (job.column_pass()) column_codes(job, tile, scratch);
  });
  if (amax_in_tiles(job)) job.panel_amax[index] = amax;
}

Error run(const Job& job) {
  // rows of no group have no panel
  if (job.args.prologue.dprobs != nullptr) std::fill_n(job.args.prologue.dprobs, job.args.input.rows, 0.0f);
  constexpr Error no_memory = {ErrorCode::unsupported, "no memory for a thread's tile (about 0.3 MB); free some"};
  if (job.needs_group_amax() && !panel_amax_pass(job)) return no_memory;
  group_scales(job);
  if (job.column_amax != nullptr && !column_amax_pass(job)) return no_memory;
  const bool good = split_with<Scratch>(job.panels.used(), job.panel_bytes(), job.threads,
                                        [&](int64_t first, int64_t last, Scratch& scratch) {
                                          for (int64_t index = first; index < last; ++index)
                                            quantize_panel(job, index, scratch);
                                        });
  if (!good) return no_memory;
  if (job.args.amax != nullptr) write_amax(job);
  if (job.args.dbias != nullptr) sum_panels(job);
  return {};
}

}  // namespace

size_t lay_out_workspace(Job& job, void* base) {
  Carver carver(base);
  const QuantizeArgs& args = job.args;
  const QuantizerSpec& spec = job.spec();
  const int64_t panels = job.panels.bound(), groups = job.groups();
  if (job.needs_group_amax() || args.amax != nullptr) {
    job.panel_amax = carver.take<int32_t>(panels);
    job.group_amax = carver.take<int32_t>(groups);
  }
  if (spec.scaling == Scaling::nvfp4 && spec.hadamard && job.column_wanted) {
    job.transformed_amax = carver.take<int32_t>(panels);
  }
  if (has_group_scales(spec) || spec.scaling == Scaling::nvfp4) {
    job.row_groups = {carver.take<float>(groups), carver.take<float>(groups), carver.take<float>(groups)};
    job.column_groups = {nullptr, carver.take<float>(groups), carver.take<float>(groups)};
  }
  if (spec.scaling == Scaling::row && job.column_wanted) job.column_amax = carver.take<int32_t>(groups * job.cols);
  if (args.dbias != nullptr) job.panel_sums = carver.take<float>(panels * job.cols);
  return carver.used();
}

}  // namespace cpu

size_t quantize_workspace_cpu(const QuantizeArgs& args) {
  const Input& input = args.input;
  if (input.rows < 0 || input.cols < 0 || input.groups < 1 || input.matrix_rows < 0) return 0;
  cpu::Job job(args, 1);
  return cpu::lay_out_workspace(job, nullptr);
}

Error quantize_cpu(const QuantizeArgs& args, int threads) {
  if (const Error error = check_quantize(args)) return error;
  if (threads < 0) return invalid("threads is negative; give 1 or more");
  if (args.input.mxfp4_scales != nullptr)
    return unsupported("mxfp4_scales was given, which a GPU alone quantizes from; expand_mxfp4 makes values of it");
  if (args.unchanged != nullptr && *args.unchanged != 0) return {};
  const cpu::FloatMode mode;
  cpu::Job job(args, threads);
  const size_t needed = cpu::lay_out_workspace(job, args.workspace);
  if (needed != 0 && args.workspace == nullptr) {
    return {ErrorCode::workspace_too_small, "workspace is null; give the bytes that quantize_workspace_cpu says"};
  }
  if (needed > args.workspace_bytes) {
    return {ErrorCode::workspace_too_small,
            "workspace_bytes is less than the call needs; give what quantize_workspace_cpu says of the same arguments"};
  }
  return cpu::run(job);
}

}  // namespace octavo
