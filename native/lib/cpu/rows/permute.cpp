// Rows of tokens to rows in group order, and back; choices sorted by group.
#include "octavo/permute.h"

#include <algorithm>
#include <cstring>

#include "cpu/loops/loops.h"
#include "cpu/loops/threads.h"
#include "octavo/numerics.h"

namespace octavo {

namespace cpu {

namespace {

using octavo_loops::Loops;

constexpr int64_t RUN = 1024;  // columns that are worked on at once

struct Buffers {
  alignas(64) float values[RUN];
  alignas(64) float other[RUN];
};

// Rows at one stride in memory.
struct Array {
  const void* data;
  int64_t stride;
  int bytes;

  const uint8_t* at(int64_t row, int64_t col) const {
    return static_cast<const uint8_t*>(data) + (row * stride + col) * bytes;
  }
};

bool inside(const Choices& choices, int64_t choice) {
  const int64_t row = choices.position[choice];
  return row >= 0 && row < choices.rows;
}

bool live(const Choices& choices, int64_t choice) { return choices.routed[choice] != 0 && inside(choices, choice); }

void multiply(float* values, float factor, int64_t n) {
  for (int64_t i = 0; i < n; ++i) values[i] *= factor;
}

void permute_token(const MoveArgs& args, const Loops& loops, int64_t token, Buffers& buffers) {
  const int dtype = static_cast<int>(args.dtype), bytes = dtype_bytes(args.dtype);
  const Array from = {args.from, args.stride, bytes};
  for (int64_t choice = token * args.choices.each; choice < (token + 1) * args.choices.each; ++choice) {
    const bool is_live = live(args.choices, choice);
    if (!is_live && !(inside(args.choices, choice) && args.choices.row_for_each())) continue;
    uint8_t* out = static_cast<uint8_t*>(args.out) + args.choices.position[choice] * args.cols * bytes;
    const auto size = static_cast<size_t>(args.cols * bytes);
    if (!is_live) {
      std::memset(out, 0, size);
    } else if (args.choices.weights == nullptr) {
      std::memcpy(out, from.at(token, 0), size);
    } else {
      for (int64_t col = 0; col < args.cols; col += RUN) {
        const int64_t n = std::min(RUN, args.cols - col);
        loops.load(dtype, from.at(token, col), buffers.values, n);
        multiply(buffers.values, args.choices.weights[choice], n);
        loops.round(dtype, buffers.values, n);
        loops.store(dtype, buffers.values, out + col * bytes, n);
      }
    }
  }
}

void combine_token(const MoveArgs& args, const Loops& loops, int64_t token, Buffers& buffers) {
  const int dtype = static_cast<int>(args.dtype), bytes = dtype_bytes(args.dtype);
  const Array from = {args.from, args.stride, bytes};
  uint8_t* out = static_cast<uint8_t*>(args.out) + token * args.cols * bytes;
  for (int64_t col = 0; col < args.cols; col += RUN) {
    const int64_t n = std::min(RUN, args.cols - col);
    std::fill(buffers.values, buffers.values + n, 0.0f);
    for (int64_t choice = token * args.choices.each; choice < (token + 1) * args.choices.each; ++choice) {
      if (!live(args.choices, choice)) continue;
      loops.load(dtype, from.at(args.choices.position[choice], col), buffers.other, n);
      if (args.choices.weights != nullptr) multiply(buffers.other, args.choices.weights[choice], n);
      loops.add(buffers.other, n, buffers.values);
    }
    loops.round(dtype, buffers.values, n);
    loops.store(dtype, buffers.values, out + col * bytes, n);
  }
}

// In float64, rounded once.
void dot_token(const DotArgs& args, const Loops& loops, int64_t token, Buffers& buffers) {
  const int dtype = static_cast<int>(args.dtype), bytes = dtype_bytes(args.dtype);
  const Array rows = {args.rows, args.row_stride, bytes}, dy = {args.dy, args.dy_stride, bytes};
  for (int64_t choice = token * args.choices.each; choice < (token + 1) * args.choices.each; ++choice) {
    double sum = 0.0;
    for (int64_t col = 0; live(args.choices, choice) && col < args.cols; col += RUN) {
      const int64_t n = std::min(RUN, args.cols - col);
      loops.load(dtype, rows.at(args.choices.position[choice], col), buffers.values, n);
      loops.load(dtype, dy.at(token, col), buffers.other, n);
      for (int64_t i = 0; i < n; ++i) sum += static_cast<double>(buffers.values[i]) * buffers.other[i];
    }
    args.out[choice] = canonical(static_cast<float>(sum));
  }
}

template <class Args, class PerToken>
Error for_tokens(const Args& args, int threads, PerToken per_token) {
  if (threads < 0) return invalid("threads is negative; give 1 or more");
  const Loops& loops = octavo_loops::loops_for(threads);
  const int64_t bytes_each = args.choices.each * args.cols * dtype_bytes(args.dtype);
  const bool good =
      split_with<Buffers>(args.choices.tokens, bytes_each, threads, [&](int64_t first, int64_t last, Buffers& buffers) {
        for (int64_t token = first; token < last; ++token) per_token(args, loops, token, buffers);
      });
  if (!good) return {ErrorCode::unsupported, "no memory for a thread's buffers (8 KB); free some"};
  return {};
}

}  // namespace

}  // namespace cpu

Error route_cpu(const RouteArgs& args) {
  if (const Error error = check_route(args)) return error;
  const auto group_of = [&](int64_t choice) {
    const int64_t index = args.index[choice];
    return index >= 0 && index < args.groups ? index : args.groups;
  };
  std::fill(args.group_sizes, args.group_sizes + args.groups, int64_t{0});
  int64_t used = 0;
  for (int64_t choice = 0; choice < args.choices; ++choice) {
    const int64_t group = group_of(choice);
    args.routed[choice] = group < args.groups ? 1 : 0;
    if (group == args.groups) continue;
    ++args.group_sizes[group];
    ++used;
  }
  // sizes become the ends of groups while rows are given out from the last choice on, and sizes again at the end
  for (int64_t group = 1; group < args.groups; ++group) args.group_sizes[group] += args.group_sizes[group - 1];
  int64_t nowhere = args.choices;
  for (int64_t choice = args.choices - 1; choice >= 0; --choice) {
    const int64_t group = group_of(choice);
    const int64_t row = group == args.groups ? --nowhere : --args.group_sizes[group];
    args.order[row] = choice;
    args.position[choice] = row;
  }
  for (int64_t group = 0; group < args.groups; ++group) {
    const int64_t end = group + 1 < args.groups ? args.group_sizes[group + 1] : used;
    args.group_sizes[group] = end - args.group_sizes[group];
  }
  return {};
}

Error permute_cpu(const MoveArgs& args, int threads) {
  if (const Error error = check_move(args)) return error;
  return cpu::for_tokens(args, threads, cpu::permute_token);
}

Error combine_cpu(const MoveArgs& args, int threads) {
  if (const Error error = check_move(args)) return error;
  return cpu::for_tokens(args, threads, cpu::combine_token);
}

Error dot_cpu(const DotArgs& args, int threads) {
  if (const Error error = check_dot(args)) return error;
  return cpu::for_tokens(args, threads, cpu::dot_token);
}

}  // namespace octavo
