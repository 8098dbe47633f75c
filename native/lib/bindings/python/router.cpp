// A router's choices and weights, and the gradient of its logits.
#include "octavo/router.h"

#include "arguments.h"
#include "bindings.h"

namespace octavo::bindings {

namespace {

RouterRule rule_of(int k, int score, int groups, int kept_groups, bool renormalize, float scale) {
  return {k, enum_of(score, Score::sqrtsoftplus, "score"), groups, kept_groups, renormalize, scale};
}

Logits logits_of(Address data, int dtype, int64_t tokens, int64_t experts, int64_t stride) {
  return {pointer<const void>(data), enum_of(dtype, DType::bf16, "dtype"), tokens, experts, stride};
}

void choose(bool cuda, const RouterRule& rule, const Logits& logits, Address bias, Address replay, Address choices,
            Address weights, Address counts, Address stream, int threads) {
  const ChooseArgs args = {logits,
                           rule,
                           pointer<const float>(bias),
                           pointer<const int64_t>(replay),
                           pointer<int64_t>(choices),
                           pointer<float>(weights),
                           pointer<int64_t>(counts)};
  launch(cuda, [&] { return choose_cpu(args, threads); }, [&] { return choose_cuda(args, cuda_stream(stream)); });
}

void choose_gradient(bool cuda, const RouterRule& rule, const Logits& logits, Address choices, Address dweights,
                     Address dlogits, Address stream, int threads) {
  const ChooseGradientArgs args = {logits, rule, pointer<const int64_t>(choices), pointer<const float>(dweights),
                                   pointer<void>(dlogits)};
  launch(
      cuda, [&] { return choose_gradient_cpu(args, threads); },
      [&] { return choose_gradient_cuda(args, cuda_stream(stream)); });
}

}  // namespace

void bind_router(nb::module_& m) {
  using namespace nb::literals;
  nb::class_<RouterRule>(m, "RouterRule", "How a router chooses: octavo_numerics.RouterRule, `score` by number.")
      .def(
          "__init__",
          [](RouterRule* rule, int k, int score, int groups, int kept_groups, bool renormalize, float scale) {
            new (rule) RouterRule(rule_of(k, score, groups, kept_groups, renormalize, scale));
          },
          nb::kw_only(), "k"_a, "score"_a, "groups"_a = 1, "kept_groups"_a = 1, "renormalize"_a = true,
          "scale"_a = 1.0f);
  nb::class_<Logits>(m, "Logits", "Addresses of logits [tokens, experts], rows `stride` elements apart.")
      .def(
          "__init__",
          [](Logits* logits, Address data, int dtype, int64_t tokens, int64_t experts, int64_t stride) {
            new (logits) Logits(logits_of(data, dtype, tokens, experts, stride));
          },
          nb::kw_only(), "data"_a, "dtype"_a, "tokens"_a, "experts"_a, "stride"_a);
  m.def("choose_experts", &choose, nb::kw_only(), "cuda"_a, "rule"_a, "logits"_a, "bias"_a, "replay"_a, "choices"_a,
        "weights"_a, "counts"_a, "stream"_a = 0, "threads"_a = 1,
        "The choices of each token, int64 [tokens, k], their fp32 weights, and int64 counts [experts].\n\n"
        "fp32 `bias` [experts] is added for choosing alone, int64 `replay` [tokens, k] are choices to take; 0: none.");
  m.def("choose_gradient", &choose_gradient, nb::kw_only(), "cuda"_a, "rule"_a, "logits"_a, "choices"_a, "dweights"_a,
        "dlogits"_a, "stream"_a = 0, "threads"_a = 1,
        "The gradient of the logits, [tokens, experts] in their dtype, from that of the weights.");
}

}  // namespace octavo::bindings
