// The enum values of types.h by name, and build information.
#include <initializer_list>
#include <utility>

#include "bindings.h"
#include "octavo/gemm.h"
#include "octavo/quantize.h"
#include "octavo/router.h"

namespace octavo::bindings {

namespace nb = nanobind;

namespace {

template <typename Enum>
nb::dict numbers(std::initializer_list<std::pair<const char*, Enum>> names) {
  nb::dict table;
  for (const auto& [name, value] : names) table[name] = static_cast<int>(value);
  return table;
}

nb::dict build_info() {
  nb::dict info;
  info["cuda"] = static_cast<bool>(OCTAVO_HAS_CUDA);
  info["nvcc"] = OCTAVO_HAS_CUDA ? nb::object(nb::str(OCTAVO_NVCC)) : nb::object(nb::none());
  info["archs"] = OCTAVO_HAS_CUDA ? nb::make_tuple(OCTAVO_ARCHS) : nb::make_tuple();
  info["compiler"] = OCTAVO_COMPILER;
  info["avx2"] = static_cast<bool>(OCTAVO_AVX2);
  return info;
}

}  // namespace

void bind_names(nb::module_& m) {
  m.attr("ABI_LEVEL") = ABI_LEVEL;
  m.attr("HAS_CUDA") = static_cast<bool>(OCTAVO_HAS_CUDA);
  m.attr("DTYPES") = numbers<DType>({{"float32", DType::f32}, {"float16", DType::f16}, {"bfloat16", DType::bf16}});
  m.attr("FORMATS") = numbers<Format>({{"e4m3", Format::e4m3}, {"e5m2", Format::e5m2}, {"e2m1", Format::e2m1}});
  m.attr("SCALINGS") = numbers<Scaling>({{"delayed", Scaling::delayed},
                                         {"current", Scaling::current},
                                         {"row", Scaling::row},
                                         {"block", Scaling::block},
                                         {"mxfp8", Scaling::mxfp8},
                                         {"nvfp4", Scaling::nvfp4}});
  m.attr("OPERANDS") = numbers<Operand>({{"x", Operand::x}, {"w", Operand::w}, {"dy", Operand::dy}});
  m.attr("DIRECTIONS") = numbers<Direction>({{"rowwise", Direction::rowwise}, {"columnwise", Direction::columnwise}});
  m.attr("LAYOUTS") =
      numbers<Layout>({{"plain", Layout::plain}, {"native", Layout::native}, {"values", Layout::values}});
  const std::initializer_list<std::pair<const char*, Activation>> activations = {
      {"silu", Activation::silu},
      {"gelu", Activation::gelu},
      {"gelu_tanh", Activation::gelu_tanh},
      {"relu2", Activation::relu2},
      {"swiglu", Activation::swiglu},
      {"geglu", Activation::geglu},
      {"geglu_tanh", Activation::geglu_tanh},
      {"clamped_swiglu", Activation::clamped_swiglu}};
  m.attr("ACTIVATIONS") = numbers<Activation>(activations);
  nb::list gated;
  for (const auto& [name, value] : activations)
    if (is_gated(value)) gated.append(name);
  m.attr("GATED") = nb::steal(PyFrozenSet_New(gated.ptr()));
  m.attr("SCORES") =
      numbers<Score>({{"softmax", Score::softmax}, {"sigmoid", Score::sigmoid}, {"sqrtsoftplus", Score::sqrtsoftplus}});
  m.attr("NORMS") = numbers<Norm>({{"rms", Norm::rms}, {"layer", Norm::layer}});
  m.attr("PROLOGUES") = numbers<PrologueKind>({{"none", PrologueKind::none},
                                               {"activation", PrologueKind::activation},
                                               {"activation_grad", PrologueKind::activation_grad},
                                               {"norm", PrologueKind::norm}});
  m.attr("GEMMS") = numbers<Gemm>({{"fprop", Gemm::fprop}, {"dgrad", Gemm::dgrad}, {"wgrad", Gemm::wgrad}});
  m.def("build_info", &build_info,
        "What this build is made of: cuda (bool), nvcc (version or None), archs (tuple), compiler, avx2 (bool).");
}

}  // namespace octavo::bindings
