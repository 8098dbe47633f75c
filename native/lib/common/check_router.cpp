// Argument checks of a router, shared by both devices. Pointers are compared and never dereferenced.
#include <cmath>

#include "check.h"
#include "octavo/router.h"

namespace octavo {

namespace {

Error check_rule(const RouterRule& rule, int64_t experts) {
  if (!named(rule.score, Score::sqrtsoftplus)) return invalid("score is not a valid Score; give a number from 0 to 2");
  if (rule.groups < 1 || rule.kept_groups < 1 || rule.kept_groups > rule.groups || experts % rule.groups != 0) {
    return invalid("groups does not divide experts, or kept_groups is not from 1 to groups; give numbers that do");
  }
  if (rule.groups > 1 && rule.kept_groups < rule.groups && rule.groups > MAX_CHOICES) {
    return unsupported("groups is past 32, the most that a warp holds; compose the router of other operations");
  }
  if (rule.k < 1 || rule.k > experts / rule.groups * rule.kept_groups) {
    return invalid("k is less than 1 or past the experts of the kept groups; give a number of choices that exists");
  }
  if (rule.k > MAX_CHOICES) {
    return unsupported("k is past 32, the most that a warp holds; compose the router of other operations");
  }
  if (!std::isfinite(rule.scale)) return invalid("scale is not finite in fp32; give a number that is");
  return {};
}

Error check_logits(const Logits& logits) {
  if (!named(logits.dtype, DType::bf16)) return invalid("dtype is not a valid DType; give f32, f16 or bf16 (0 to 2)");
  if (logits.tokens < 0) return invalid("tokens is negative; give the number of tokens, 0 or more");
  if (logits.tokens > MAX_ROWS / MAX_CHOICES) return invalid("tokens is past 2^25; split the call");
  if (logits.experts < 1) return invalid("experts is less than 1; give the number of experts");
  if (logits.experts > MAX_EXPERTS) {
    return unsupported("experts is past 1024, the most that a warp holds; compose the router of other operations");
  }
  if (logits.stride < logits.experts || logits.stride > MAX_STRIDE) {
    return invalid("stride is less than experts or past 2^32; give the elements from one row of logits to the next");
  }
  if (logits.tokens == 0) return {};
  if (logits.data == nullptr || !aligned(logits.data, dtype_bytes(logits.dtype))) {
    return invalid("logits is null or not aligned to its elements; give the address of [tokens, experts]");
  }
  return {};
}

Error check_integers(const int64_t* choices, const float* weights, int64_t tokens) {
  if (tokens == 0) return {};
  if (choices == nullptr || !aligned(choices, 8)) {
    return invalid("choices is null or not aligned to 8 bytes; it is int64 [tokens, k]");
  }
  if (weights == nullptr || !aligned(weights, 4)) {
    return invalid("weights, or their gradient, is null or not aligned to 4 bytes; it is fp32 [tokens, k]");
  }
  return {};
}

}  // namespace

Error check_choose(const ChooseArgs& args) {
  if (const Error error = check_logits(args.logits)) return error;
  if (const Error error = check_rule(args.rule, args.logits.experts)) return error;
  if (args.counts == nullptr || !aligned(args.counts, 8)) {
    return invalid("counts is null or not aligned to 8 bytes; it is int64 [experts]");
  }
  if (!aligned(args.bias, 4)) return invalid("bias is not aligned to 4 bytes; it is fp32 [experts]");
  if (!aligned(args.replay, 8)) return invalid("replay is not aligned to 8 bytes; it is int64 [tokens, k]");
  return check_integers(args.choices, args.weights, args.logits.tokens);
}

Error check_choose_gradient(const ChooseGradientArgs& args) {
  if (const Error error = check_logits(args.logits)) return error;
  if (const Error error = check_rule(args.rule, args.logits.experts)) return error;
  if (args.logits.tokens > 0 && (args.dlogits == nullptr || !aligned(args.dlogits, dtype_bytes(args.logits.dtype)))) {
    return invalid("dlogits is null or not aligned to its elements; it is [tokens, experts] like the logits");
  }
  return check_integers(args.choices, args.dweights, args.logits.tokens);
}

}  // namespace octavo
