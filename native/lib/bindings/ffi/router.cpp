// octavo_choose, octavo_choose_gradient: a router (octavo/router.h). octavo_route: its choices, sorted by expert.
//
// Integers are int64, in words: s32[2 n], because JAX has no 64-bit integers unless the user turns them on.
//
// choose            logits [T, E]; bias f32[E], replay s32[2 T k] where given
//                   -> choices s32[2 T k], weights f32[T, k], counts s32[2 E]
// choose_gradient   logits [T, E], choices s32[2 T k], dweights f32[T, k] -> dlogits like logits
// route             index s32[2 N] -> group_sizes s32[2 G], order s32[2 N], position s32[2 N], routed pred[N];
//                   workspace u8 of any size, without which one launch does it
#include "octavo/router.h"

#include "handler.h"
#include "octavo/permute.h"
#include "workspace.h"

namespace octavo {

struct RouterAttributes {
  std::string_view operands;
  std::string_view results;
  int64_t k;
  int64_t score;
  int64_t groups;
  int64_t kept_groups;
  bool renormalize;
  float scale;
  int64_t threads;
};

struct RouteAttributes {
  std::string_view operands;
  std::string_view results;
  int64_t groups;
};

}  // namespace octavo

XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(
    octavo::RouterAttributes, ::xla::ffi::StructMember<std::string_view>("operands"),
    ::xla::ffi::StructMember<std::string_view>("results"), ::xla::ffi::StructMember<int64_t>("k"),
    ::xla::ffi::StructMember<int64_t>("score"), ::xla::ffi::StructMember<int64_t>("groups"),
    ::xla::ffi::StructMember<int64_t>("kept_groups"), ::xla::ffi::StructMember<bool>("renormalize"),
    ::xla::ffi::StructMember<float>("scale"), ::xla::ffi::StructMember<int64_t>("threads"));
XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(octavo::RouteAttributes, ::xla::ffi::StructMember<std::string_view>("operands"),
                                      ::xla::ffi::StructMember<std::string_view>("results"),
                                      ::xla::ffi::StructMember<int64_t>("groups"));

namespace octavo {
namespace {

constexpr const char* CHOOSE = "octavo_choose";
constexpr const char* GRADIENT = "octavo_choose_gradient";
constexpr const char* ROUTE = "octavo_route";

RouterRule read_rule(const RouterAttributes& given, Buffers& operands) {
  const int64_t numbers[] = {given.k, given.groups, given.kept_groups};
  for (const int64_t number : numbers) {
    if (number < 1 || number > MAX_GROUPS) {
      operands.refuse("attributes k, groups and kept_groups are " + std::to_string(given.k) + ", " +
                      std::to_string(given.groups) + " and " + std::to_string(given.kept_groups) +
                      "; each is 1 to 65536");
      break;
    }
  }
  return {static_cast<int32_t>(given.k),
          enum_from<Score>(given.score, Score::sqrtsoftplus, "score", operands),
          static_cast<int32_t>(given.groups),
          static_cast<int32_t>(given.kept_groups),
          given.renormalize,
          given.scale};
}

// Without tokens where their shape says nothing; `type` is theirs.
Logits read_logits(Buffers& operands, ffi::DataType& type) {
  Logits logits;
  operands.need("logits");
  const ffi::AnyBuffer* given = operands.take("logits");
  if (given == nullptr) return logits;
  type = given->element_type();
  const auto dims = given->dimensions();
  if (!dtype_of(type, logits.dtype) || dims.size() != 2) {
    operands.refuse("operand logits is " + text(*given) + " and must be f32, f16 or bf16 of shape [T, E]");
    return logits;
  }
  logits.data = Buffers::address(*given);
  logits.tokens = dims[0];
  logits.experts = logits.stride = dims[1];
  return logits;
}

ffi::Error choose(const Launch& launch, ffi::RemainingArgs given_operands, ffi::RemainingRets given_results,
                  const RouterAttributes& given) {
  Buffers operands(CHOOSE, "operand"), results(CHOOSE, "result");
  operands.read(given.operands, given_operands);
  results.read(given.results, given_results);
  ChooseArgs args;
  args.rule = read_rule(given, operands);
  ffi::DataType type = ffi::DataType::INVALID;
  args.logits = read_logits(operands, type);
  const int64_t tokens = args.logits.tokens, experts = args.logits.experts, k = args.rule.k;
  args.bias = operands.take<const float>("bias", ffi::F32, {experts});
  args.replay = operands.take<const int64_t>("replay", ffi::S32, {2 * tokens * k});
  for (const char* needed : {"choices", "weights", "counts"}) results.need(needed);
  args.choices = results.take<int64_t>("choices", ffi::S32, {2 * tokens * k});
  args.weights = results.take<float>("weights", ffi::F32, {tokens, k});
  args.counts = results.take<int64_t>("counts", ffi::S32, {2 * experts});
  if (ffi::Error error = operands.finish(); error.failure()) return error;
  if (ffi::Error error = results.finish(); error.failure()) return error;
  return as_ffi(launch.cuda() ? choose_cuda(args, launch.stream) : choose_cpu(args, thread_count(given.threads)),
                CHOOSE);
}

ffi::Error choose_gradient(const Launch& launch, ffi::RemainingArgs given_operands, ffi::RemainingRets given_results,
                           const RouterAttributes& given) {
  Buffers operands(GRADIENT, "operand"), results(GRADIENT, "result");
  operands.read(given.operands, given_operands);
  results.read(given.results, given_results);
  ChooseGradientArgs args;
  args.rule = read_rule(given, operands);
  ffi::DataType type = ffi::DataType::INVALID;
  args.logits = read_logits(operands, type);
  const int64_t tokens = args.logits.tokens, k = args.rule.k;
  for (const char* needed : {"choices", "dweights"}) operands.need(needed);
  args.choices = operands.take<const int64_t>("choices", ffi::S32, {2 * tokens * k});
  args.dweights = operands.take<const float>("dweights", ffi::F32, {tokens, k});
  results.need("dlogits");
  args.dlogits = results.take("dlogits", type, {tokens, args.logits.experts});
  if (ffi::Error error = operands.finish(); error.failure()) return error;
  if (ffi::Error error = results.finish(); error.failure()) return error;
  return as_ffi(launch.cuda() ? choose_gradient_cuda(args, launch.stream)
                              : choose_gradient_cpu(args, thread_count(given.threads)),
                GRADIENT);
}

ffi::Error route(const Launch& launch, ffi::RemainingArgs given_operands, ffi::RemainingRets given_results,
                 const RouteAttributes& given) {
  Buffers operands(ROUTE, "operand"), results(ROUTE, "result");
  operands.read(given.operands, given_operands);
  results.read(given.results, given_results);
  RouteArgs args;
  args.groups = given.groups;
  if (args.groups < 1 || args.groups > MAX_GROUPS) {
    operands.refuse("groups is " + std::to_string(args.groups) + "; it takes 1 to 65536");
  }
  operands.need("index");
  const ffi::AnyBuffer* index = operands.take("index");
  if (index != nullptr) {
    const auto dims = index->dimensions();
    if (index->element_type() != ffi::S32 || dims.size() != 1 || dims[0] % 2 != 0) {
      operands.refuse("operand index is " + text(*index) + " and must be s32[2 N], N choices of int64");
    } else {
      args.choices = dims[0] / 2;
      args.index = static_cast<const int64_t*>(Buffers::address(*index));
    }
  }
  if (ffi::Error error = operands.finish(); error.failure()) return error;
  for (const char* needed : {"group_sizes", "order", "position", "routed"}) results.need(needed);
  args.group_sizes = results.take<int64_t>("group_sizes", ffi::S32, {2 * args.groups});
  args.order = results.take<int64_t>("order", ffi::S32, {2 * args.choices});
  args.position = results.take<int64_t>("position", ffi::S32, {2 * args.choices});
  args.routed = results.take<uint8_t>("routed", ffi::PRED, {args.choices});
  Workspace workspace;
  workspace.read(results);
  if (ffi::Error error = results.finish(); error.failure()) return error;
  const int64_t needed = route_workspace(args.choices, args.groups);
  if (needed > 0 && static_cast<size_t>(needed) <= workspace.bytes()) {
    args.counts = static_cast<int32_t*>(workspace.memory());
  }
  return as_ffi(launch.cuda() ? route_cuda(args, launch.stream) : route_cpu(args), ROUTE);
}

}  // namespace

std::vector<Target> router_targets() {
  return {target<RouterAttributes, choose>(CHOOSE), target<RouterAttributes, choose_gradient>(GRADIENT),
          target<RouteAttributes, route>(ROUTE)};
}

}  // namespace octavo
