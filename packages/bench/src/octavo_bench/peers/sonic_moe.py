"""SonicMoE's layer behind its router: sonic-moe, quack-kernels and nvidia-cutlass-dsl, without which it is no module.

What is timed begins with the choices, as `octavo_torch.moe_mlp` does: the functions are those that SonicMoE's public
layer calls after its router, in its order. `loaded_sonic_moe` imports this file where the packages are.
"""

from __future__ import annotations

from functools import partial

import quack.autotuner
import quack.gemm_interface as gemms
import torch
import triton
from sonicmoe.enums import ActivationType
from sonicmoe.functional import _DownProjection, _UpProjection
from sonicmoe.functional.reduction_over_k_gather import token_gather_sum_kernel
from sonicmoe.functional.triton_kernels import TC_topk_router_metadata_triton
from torch import Tensor

TILES = {
    (128, 128, True), (128, 192, True), (192, 128, True), (256, 128, False), (256, 192, False), (128, 256, False),
}  # fmt: skip
"""Rows, columns and whether two warp groups take turns: what each GEMM is tuned over, in clusters of two tiles."""

SUMS = ((512, 4, 4), (1024, 1, 4), (1024, 4, 8), (2048, 1, 8))
"""Columns, rows and warps of a block of the kernel that sums a token's rows."""


def tune_over_few() -> str:
    """Leaves the autotuners these configurations, of hundreds that take hours to compile; says which."""
    for gemm in (gemms.gemm_tuned, gemms.gemm_gated_tuned, gemms.gemm_dgated_tuned):
        gemm.configs = [each for each in gemm.configs if _offered(each.kwargs["config"])]
        gemm._do_bench = partial(triton.testing.do_bench, warmup=5, rep=15)
    quack.autotuner._gpu_warmup = lambda: None
    token_gather_sum_kernel.configs = [
        triton.Config({"BLOCK_H": columns, "BLOCK_K": rows}, num_warps=warps, num_stages=4)
        for columns, rows, warps in SUMS
    ]
    token_gather_sum_kernel._do_bench = partial(triton.testing.do_bench, warmup=5, rep=15)
    return f"GEMMs tuned over {sorted(TILES)} in clusters 2 x 1, sums over {SUMS}"


def _offered(config: gemms.GemmConfig) -> bool:
    tile = config.tile_m, config.tile_n, config.pingpong
    plain = not config.swap_ab and (config.cluster_m, config.cluster_n) == (2, 1)
    return config.device_capacity == 9 and plain and tile in TILES


def interleaved(w1: Tensor) -> Tensor:
    """[E, 2 F, K] whose rows are gate, up, gate, up ..., of one with all gates first: SonicMoE's own order."""
    experts, rows, k = w1.shape
    return w1.reshape(experts, 2, rows // 2, k).transpose(1, 2).reshape(experts, rows, k)


def separated(w1: Tensor) -> Tensor:
    """The inverse of `interleaved`: all gates first."""
    experts, rows, k = w1.shape
    return w1.reshape(experts, rows // 2, 2, k).transpose(1, 2).reshape(experts, rows, k)


def layer(x: Tensor, choices: Tensor, weights: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
    """y [T, K] of x [T, K], choices int32 [T, k], weights fp32 [T, k], w1 [E, 2 F, K] `interleaved`, w2 [E, K, F]."""
    (tokens, k), experts = choices.shape, w2.shape[0]
    rows = tokens * k
    gather, scatter, back, frequency = (
        torch.empty(size, dtype=torch.int32, device=x.device) for size in (rows, rows, rows, experts)
    )
    offsets = torch.empty(experts + 1, dtype=torch.int32, device=x.device)
    TC_topk_router_metadata_triton(choices, experts, frequency, offsets, gather, scatter, back)
    of_rows = (gather, scatter, back, None, False)
    a, h = _UpProjection.apply(
        x, w1.permute(1, 2, 0), None, offsets, rows, k, *of_rows, ActivationType.SWIGLU, False, False
    )
    y: Tensor = _DownProjection.apply(
        a, h, w2.permute(1, 2, 0), None, weights, offsets, tokens, k, *of_rows, ActivationType.SWIGLU
    )
    return y
