// A router's choices and weights, and the gradient of its logits, row by row. Sums are float64.
#include <algorithm>
#include <cmath>

#include "cpu/loops/loops.h"
#include "cpu/loops/threads.h"
#include "octavo/router.h"

namespace octavo {

namespace cpu {

namespace {

using octavo_loops::Loops;

struct Buffers {
  alignas(64) float logits[MAX_EXPERTS];
  alignas(64) float other[MAX_EXPERTS];
  uint32_t order[MAX_EXPERTS];
};

void load_row(const Logits& logits, const Loops& loops, int64_t token, float* to) {
  const auto* from = static_cast<const uint8_t*>(logits.data) + token * logits.stride * dtype_bytes(logits.dtype);
  loops.load(static_cast<int>(logits.dtype), from, to, logits.experts);
}

// Of softmax; what the other scores never read is left as it is.
router::Row row_of(Score score, const float* logits, int64_t experts) {
  router::Row row;
  if (score != Score::softmax) return row;
  row.largest = logits[0];
  for (int64_t i = 1; i < experts; ++i) row.largest = std::fmax(row.largest, logits[i]);
  double total = 0.0;
  for (int64_t i = 0; i < experts; ++i) total += router::power_of(logits[i], row.largest);
  row.total = static_cast<float>(total);
  return row;
}

// The first of the largest orders from `begin` up to `end`.
int64_t first_largest(const uint32_t* order, int64_t begin, int64_t end) {
  return std::max_element(order + begin, order + end) - order;
}

void keep_groups(const RouterRule& rule, int64_t experts, uint32_t* order) {
  const int64_t size = experts / rule.groups;
  uint32_t sums[MAX_CHOICES];
  for (int64_t group = 0; group < rule.groups; ++group) {
    const int64_t begin = group * size, end = begin + size, first = first_largest(order, begin, end);
    float both = router::number_of(order[first]);
    if (size > 1) {
      const uint32_t before = order[first];
      order[first] = router::ABSENT;
      both += router::number_of(order[first_largest(order, begin, end)]);
      order[first] = before;
    }
    sums[group] = router::order_of(both);
  }
  bool kept[MAX_CHOICES] = {};
  for (int round = 0; round < rule.kept_groups; ++round) {
    const int64_t best = first_largest(sums, 0, rule.groups);
    kept[best] = true;
    sums[best] = router::ABSENT;
  }
  for (int64_t i = 0; i < experts; ++i)
    if (!kept[i / size]) order[i] = router::LOWEST;
}

void choose_row(const ChooseArgs& args, const router::Row& row, Buffers& buffers, int64_t* choices) {
  const int64_t experts = args.logits.experts;
  const bool by_scores = args.bias != nullptr || router::by_groups(args.rule);
  for (int64_t i = 0; i < experts; ++i) {
    float value = buffers.logits[i];
    if (by_scores) {
      value = router::score_of(args.rule.score, value, row);
      if (args.bias != nullptr) value += args.bias[i];
    }
    buffers.order[i] = router::order_of(value);
  }
  if (router::by_groups(args.rule)) keep_groups(args.rule, experts, buffers.order);
  for (int choice = 0; choice < args.rule.k; ++choice) {
    choices[choice] = first_largest(buffers.order, 0, experts);
    buffers.order[choices[choice]] = router::ABSENT;
  }
}

bool is_there(int64_t choice, int64_t experts) { return choice >= 0 && choice < experts; }

// The scores of a token's choices, 0 for nobody's, and what they are divided by.
double scores_of(const RouterRule& rule, const router::Row& row, const float* logits, int64_t experts,
                 const int64_t* choices, float* scores) {
  double sum = 0.0;
  for (int i = 0; i < rule.k; ++i) {
    scores[i] = is_there(choices[i], experts) ? router::score_of(rule.score, logits[choices[i]], row) : 0.0f;
    sum += scores[i];
  }
  return rule.renormalize ? sum + static_cast<double>(router::SMALL) : 1.0;
}

void choose_token(const ChooseArgs& args, const Loops& loops, int64_t token, Buffers& buffers) {
  const int64_t experts = args.logits.experts;
  const RouterRule& rule = args.rule;
  load_row(args.logits, loops, token, buffers.logits);
  const router::Row row = row_of(rule.score, buffers.logits, experts);
  int64_t* choices = args.choices + token * rule.k;
  if (args.replay != nullptr) {
    std::copy_n(args.replay + token * rule.k, rule.k, choices);
  } else {
    choose_row(args, row, buffers, choices);
  }
  float scores[MAX_CHOICES];
  const double divisor = scores_of(rule, row, buffers.logits, experts, choices, scores);
  for (int i = 0; i < rule.k; ++i) {
    args.weights[token * rule.k + i] = static_cast<float>(scores[i] / divisor) * rule.scale;
  }
}

void gradient_of_token(const ChooseGradientArgs& args, const Loops& loops, int64_t token, Buffers& buffers) {
  const int64_t experts = args.logits.experts;
  const RouterRule& rule = args.rule;
  load_row(args.logits, loops, token, buffers.logits);
  const router::Row row = row_of(rule.score, buffers.logits, experts);
  const int64_t* choices = args.choices + token * rule.k;
  float scores[MAX_CHOICES];
  const double divisor = scores_of(rule, row, buffers.logits, experts, choices, scores);
  double dweights[MAX_CHOICES], pulled = 0.0, shared = 0.0;
  for (int i = 0; i < rule.k; ++i) {
    const double given = args.dweights[token * rule.k + i];
    dweights[i] = is_there(choices[i], experts) ? given * rule.scale : 0.0;
    if (rule.renormalize) pulled += dweights[i] * (scores[i] / divisor);
  }
  float* sums = buffers.other;  // of the scores' gradients, by expert
  std::fill_n(sums, experts, 0.0f);
  for (int i = 0; i < rule.k; ++i) {
    if (!is_there(choices[i], experts)) continue;
    const double dscore = (dweights[i] - pulled) / divisor;
    shared += dscore * scores[i];
    sums[choices[i]] += static_cast<float>(dscore);
  }
  const auto all = static_cast<float>(rule.score == Score::softmax ? shared : 0.0);
  for (int64_t i = 0; i < experts; ++i) {
    sums[i] = router::slope_of(rule.score, buffers.logits[i], row) * (sums[i] - all);
  }
  const int dtype = static_cast<int>(args.logits.dtype);
  auto* to = static_cast<uint8_t*>(args.dlogits) + token * experts * dtype_bytes(args.logits.dtype);
  loops.round(dtype, sums, experts);
  loops.store(dtype, sums, to, experts);
}

template <class Args, class PerToken>
Error for_tokens(const Args& args, int threads, PerToken per_token) {
  if (threads < 0) return invalid("threads is negative; give 1 or more");
  const Loops& loops = octavo_loops::loops_for(threads);
  const bool good = split_with<Buffers>(args.logits.tokens, args.logits.experts * 64, threads,
                                        [&](int64_t first, int64_t last, Buffers& buffers) {
                                          for (int64_t token = first; token < last; ++token)
                                            per_token(args, loops, token, buffers);
                                        });
  if (!good) return {ErrorCode::unsupported, "no memory for a thread's buffers (12 KB); free some"};
  return {};
}

}  // namespace

}  // namespace cpu

Error choose_cpu(const ChooseArgs& args, int threads) {
  if (const Error error = check_choose(args)) return error;
  const int64_t experts = args.logits.experts;
  if (const Error error = cpu::for_tokens(args, threads, cpu::choose_token)) return error;
  std::fill_n(args.counts, experts, int64_t{0});
  for (int64_t i = 0; i < args.logits.tokens * args.rule.k; ++i) {
    if (cpu::is_there(args.choices[i], experts)) ++args.counts[args.choices[i]];
  }
  return {};
}

Error choose_gradient_cpu(const ChooseGradientArgs& args, int threads) {
  if (const Error error = check_choose_gradient(args)) return error;
  return cpu::for_tokens(args, threads, cpu::gradient_of_token);
}

}  // namespace octavo
