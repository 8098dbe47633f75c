// Activations, their gradients and normalization, row by row.
#include <algorithm>
#include <cmath>

#include "job.h"
#include "octavo/activations.h"

namespace octavo::cpu {

namespace {

// Elements [col, col + n) of a row of the input, or of another array of its dtype, in fp32.
void load_row(const Job& job, const void* data, int64_t element, int64_t n, float* to) {
  const DType dtype = job.args.input.dtype;
  job.loops.load(static_cast<int>(dtype), static_cast<const uint8_t*>(data) + element * dtype_bytes(dtype), to, n);
}

// Columns [col, col + n) of act(x), of F.
void activation_run(const Job& job, int64_t row, int64_t col, int64_t n, int64_t features, float* out,
                    Scratch& scratch) {
  const Prologue& prologue = job.args.prologue;
  const Input& input = job.args.input;
  const Activation activation = prologue.activation;
  const int64_t start = row * input.row_stride + col;
  load_row(job, input.data, start, n, scratch.gate);
  if (is_gated(activation)) {
    load_row(job, input.data, start + features, n, scratch.up);
    for (int64_t i = 0; i < n; ++i) out[i] = gated_forward(activation, scratch.gate[i], scratch.up[i]);
  } else {
    for (int64_t i = 0; i < n; ++i) out[i] = act_forward(activation, scratch.gate[i]);
  }
  if (prologue.probs == nullptr) return;
  for (int64_t i = 0; i < n; ++i) out[i] *= prologue.probs[row];
}

// Sum over a row of dy times what the activation gives before it is multiplied by the row's probability, in column
// order.
double product_sum(const Job& job, int64_t row, Scratch& scratch) {
  const Prologue& prologue = job.args.prologue;
  const Input& input = job.args.input;
  const bool gated = is_gated(prologue.activation);
  const int64_t features = gated ? input.cols / 2 : input.cols;
  double sum = 0.0;
  for (int64_t col = 0; col < features; col += 1024) {
    const int64_t n = std::min<int64_t>(features - col, 1024), at = row * input.row_stride + col;
    load_row(job, input.data, at, n, scratch.gate);
    load_row(job, prologue.dy, row * prologue.dy_stride + col, n, scratch.other);
    if (gated) load_row(job, input.data, at + features, n, scratch.up);
    for (int64_t i = 0; i < n; ++i) {
      const float made = gated ? gated_forward(prologue.activation, scratch.gate[i], scratch.up[i])
                               : act_forward(prologue.activation, scratch.gate[i]);
      sum += static_cast<double>(made) * scratch.other[i];
    }
  }
  return sum;
}

// Columns [col, col + n) of the gradient, all in one half where the activation is gated; `half` is F, `upper` which.
void gradient_run(const Job& job, int64_t row, int64_t col, int64_t n, int64_t half, bool upper, float* out,
                  Scratch& scratch) {
  const Prologue& prologue = job.args.prologue;
  const Input& input = job.args.input;
  const Activation activation = prologue.activation;
  const int64_t place = upper ? col - half : col;
  load_row(job, prologue.dy, row * prologue.dy_stride + place, n, scratch.other);
  if (prologue.probs != nullptr) {
    for (int64_t i = 0; i < n; ++i) scratch.other[i] *= prologue.probs[row];
  }
  load_row(job, input.data, row * input.row_stride + place, n, scratch.gate);
  if (half == 0) {
    for (int64_t i = 0; i < n; ++i) out[i] = act_backward(activation, scratch.gate[i], scratch.other[i]);
    return;
  }
  load_row(job, input.data, row * input.row_stride + place + half, n, scratch.up);
  for (int64_t i = 0; i < n; ++i) {
    const GatedGradient both = gated_backward(activation, scratch.gate[i], scratch.up[i], scratch.other[i]);
    out[i] = upper ? both.dup : both.dgate;
  }
}

void gradient_row(const Job& job, const Tile& tile, int64_t row, float* out, Scratch& scratch) {
  const int64_t half = is_gated(job.args.prologue.activation) ? job.cols / 2 : 0, end = tile.col + tile.cols;
  if (half == 0 || end <= half) return gradient_run(job, row, tile.col, tile.cols, half, false, out, scratch);
  if (tile.col >= half) return gradient_run(job, row, tile.col, tile.cols, half, true, out, scratch);
  const int64_t lower = half - tile.col;
  gradient_run(job, row, tile.col, lower, half, false, out, scratch);
  gradient_run(job, row, half, end - half, half, true, out + lower, scratch);
}

// In float64, rounded to fp32 once: x - mean cancels, and fp32 would lose the 4 ulp that the definition allows.
void norm_row(const Job& job, const Tile& tile, int64_t row, float* out, Scratch& scratch) {
  const Prologue& prologue = job.args.prologue;
  const Input& input = job.args.input;
  const int64_t local = row - tile.panel.row0;
  const double mean = scratch.mean[local], rstd = scratch.rstd[local];
  load_row(job, input.data, row * input.row_stride + tile.col, tile.cols, scratch.gate);
  load_row(job, prologue.gamma, tile.col, tile.cols, scratch.up);
  if (prologue.beta == nullptr) {
    for (int64_t i = 0; i < tile.cols; ++i) {
      out[i] = static_cast<float>((scratch.gate[i] - mean) * rstd * scratch.up[i]);
    }
    return;
  }
  load_row(job, prologue.beta, tile.col, tile.cols, scratch.other);
  for (int64_t i = 0; i < tile.cols; ++i) {
    out[i] = static_cast<float>((scratch.gate[i] - mean) * rstd * scratch.up[i] + scratch.other[i]);
  }
}

// Sum over a row of (x - center)^power, power 1 or 2, in column order.
template <int power>
double row_sum(const Job& job, int64_t row, double center, Scratch& scratch) {
  const Input& input = job.args.input;
  double sum = 0.0;
  for (int64_t col = 0; col < input.cols; col += 1024) {
    const int64_t n = input.cols - col < 1024 ? input.cols - col : 1024;
    load_row(job, input.data, row * input.row_stride + col, n, scratch.gate);
    for (int64_t i = 0; i < n; ++i) {
      const double distance = scratch.gate[i] - center;
      sum += power == 1 ? distance : distance * distance;
    }
  }
  return sum;
}

}  // namespace

void begin_panel(const Job& job, const Panel& panel, Scratch& scratch) {
  const Prologue& prologue = job.args.prologue;
  if (prologue.kind != PrologueKind::norm) return;
  const double count = static_cast<double>(job.args.input.cols);
  for (int r = 0; r < panel.rows; ++r) {
    const int64_t row = panel.row0 + r;
    const double mean = prologue.norm == Norm::layer ? row_sum<1>(job, row, 0.0, scratch) / count : 0.0;
    const double square = row_sum<2>(job, row, mean, scratch) / count;
    scratch.mean[r] = mean;
    scratch.rstd[r] = 1.0 / std::sqrt(square + static_cast<double>(prologue.epsilon));
  }
}

void probability_gradients(const Job& job, const Panel& panel, Scratch& scratch) {
  for (int64_t row = panel.row0; row < panel.row0 + panel.rows; ++row) {
    job.args.prologue.dprobs[row] = canonical(static_cast<float>(product_sum(job, row, scratch)));
  }
}

void forward_values(const Job& job, const Panel& panel, Scratch& scratch) {
  const Prologue& prologue = job.args.prologue;
  const int64_t features = is_gated(prologue.activation) ? job.cols / 2 : job.cols;
  const int64_t element = dtype_bytes(job.args.input.dtype);
  for (int64_t row = panel.row0; row < panel.row0 + panel.rows; ++row) {
    for (int64_t col = 0; col < features; col += 1024) {
      const int64_t n = std::min<int64_t>(features - col, 1024);
      activation_run(job, row, col, n, features, scratch.spread, scratch);
      auto* const to = static_cast<uint8_t*>(prologue.forward) + (row * features + col) * element;
      job.loops.store(static_cast<int>(job.args.input.dtype), scratch.spread, to, n);
    }
  }
}

void prologue_row(const Job& job, const Tile& tile, int64_t row, float* out, Scratch& scratch) {
  switch (job.args.prologue.kind) {
    case PrologueKind::activation: return activation_run(job, row, tile.col, tile.cols, job.cols, out, scratch);
    case PrologueKind::activation_grad: return gradient_row(job, tile, row, out, scratch);
    case PrologueKind::norm: return norm_row(job, tile, row, out, scratch);
    case PrologueKind::none: return;
  }
}

}  // namespace octavo::cpu
