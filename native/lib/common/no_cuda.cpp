// Replaces lib/cuda in a build without nvcc.
#include "octavo/adamw.h"
#include "octavo/delayed.h"
#include "octavo/dequantize.h"
#include "octavo/gemm.h"
#include "octavo/interleave.h"
#include "octavo/permute.h"
#include "octavo/plan.h"
#include "octavo/quantize.h"
#include "octavo/router.h"

namespace octavo {

namespace {

Error absent() {
  return unsupported(
      "this build has no CUDA kernels: nvcc was not found when octavo-native was built; install the CUDA toolkit and "
      "build again, in a clone of Octavo, with: pip install --force-reinstall --no-deps ./native");
}

}  // namespace

Error plan_cuda(const PlanArgs&, void*) { return absent(); }
size_t quantize_workspace_cuda(const QuantizeArgs&) { return 0; }
Error quantize_cuda(const QuantizeArgs&, void*) { return absent(); }
Error dequantize_cuda(const DequantizeArgs&, void*) { return absent(); }
Error convert_cuda(const ConvertArgs&, void*) { return absent(); }
Error swizzle_scales_cuda(const SwizzleArgs&, void*) { return absent(); }
Error pack_e2m1_cuda(const PackArgs&, void*) { return absent(); }
Error expand_mxfp4_cuda(const ExpandArgs&, void*) { return absent(); }
size_t gemm_workspace_cuda(const GemmArgs&) { return 0; }
Error gemm_cuda(const GemmArgs&, void*) { return absent(); }
Error record_cuda(const RecordArgs&, void*) { return absent(); }
Error update_cuda(const UpdateArgs&, void*) { return absent(); }
Error route_cuda(const RouteArgs&, void*) { return absent(); }
Error permute_cuda(const MoveArgs&, void*) { return absent(); }
Error combine_cuda(const MoveArgs&, void*) { return absent(); }
Error dot_cuda(const DotArgs&, void*) { return absent(); }
Error interleave_halves_cuda(const InterleaveArgs&, void*) { return absent(); }
Error choose_cuda(const ChooseArgs&, void*) { return absent(); }
Error choose_gradient_cuda(const ChooseGradientArgs&, void*) { return absent(); }
Error adamw_cuda(const AdamWArgs&, void*) { return absent(); }

}  // namespace octavo
