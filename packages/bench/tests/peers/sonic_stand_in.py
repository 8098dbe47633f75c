"""Stand-ins for the packages of SonicMoE, which need a GPU: the layer in fp32 with torch, and its tuners.

Each function refuses operands that are not as the library's layer passes them on, so that an adapter that hands over
another order or another layout fails here. Nothing here says that the library itself accepts the adapter's call.
"""

from __future__ import annotations

import importlib.util
from enum import Enum
from itertools import product
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import silu
from torch.utils._triton import has_triton_package


class ActivationType(Enum):
    """The one that is used."""

    SWIGLU = "swiglu"


def metadata(choices: Tensor, experts: int, frequency: Tensor, offsets: Tensor, *orders: Tensor) -> None:
    """Rows by expert: where each begins, the token of each, its place among the choices, and the inverse."""
    gather, scatter, back = orders
    assert {one.dtype for one in (choices, frequency, offsets, *orders)} == {torch.int32}
    assert [len(one) for one in (frequency, offsets, *orders)] == [experts, experts + 1, *[choices.numel()] * 3]
    flat = choices.reshape(-1).long()
    order = torch.argsort(flat, stable=True)
    frequency.copy_(torch.bincount(flat, minlength=experts))
    offsets.zero_()[1:] = frequency.cumsum(0)
    gather.copy_(order // choices.shape[1])
    scatter.copy_(order)
    back[order] = torch.arange(len(order), dtype=torch.int32)


class _Differentiable:
    """`apply` of an autograd function: torch differentiates what the stand-in computes."""

    def __init__(self, function: Any) -> None:
        self.apply = function


def _matrices(w: Tensor) -> Tensor:
    """[E, rows, cols] of weights that lie so, and are given as [rows, cols, E]."""
    matrices = w.permute(2, 0, 1)
    assert matrices.is_contiguous(), "experts are outermost in memory"
    return matrices


def _by_expert(rows: Tensor, matrices: Tensor, offsets: Tensor) -> Tensor:
    parts = torch.split(rows, torch.diff(offsets).tolist())
    return torch.cat([part.float() @ one.float().T for part, one in zip(parts, matrices, strict=True)])


def up(
    x: Tensor, w1: Tensor, b1: None, offsets: Tensor, rows: int, k: int, gather: Tensor, scatter: Tensor,
    back: Tensor, of_token: None, variable: bool, activation: ActivationType, inference: bool, concatenated: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """silu(gate) * up of rows whose results are gate, up, gate, up, and what a backward keeps."""
    assert b1 is None
    assert of_token is None
    assert activation is ActivationType.SWIGLU
    assert (variable, inference, concatenated) == (False, False, False)
    assert rows == k * len(x) == len(gather) == len(scatter) == len(back)
    h = _by_expert(x[gather.long()], _matrices(w1), offsets)
    return (silu(h[:, ::2]) * h[:, 1::2]).to(x.dtype), h.to(x.dtype)


def down(
    a: Tensor, h: Tensor, w2: Tensor, b2: None, weights: Tensor, offsets: Tensor, tokens: int, k: int,
    gather: Tensor, scatter: Tensor, back: Tensor, of_token: None, variable: bool, activation: ActivationType,
) -> Tensor:  # fmt: skip
    """The weighted sum of each token's rows."""
    assert b2 is None
    assert of_token is None
    assert activation is ActivationType.SWIGLU
    assert not variable
    assert weights.dtype is torch.float32
    assert weights.shape == (tokens, k)
    y = _by_expert(a, _matrices(w2), offsets)
    y = y * weights.reshape(-1)[scatter.long()][:, None]
    return y[back.long()].view(tokens, k, -1).sum(1).to(a.dtype)


def sonic_modules() -> dict[str, ModuleType]:
    """What `octavo_bench.peers.sonic_moe` imports, by name; triton too, where it is not installed."""
    modules: dict[str, Any] = {
        name: ModuleType(name)
        for name in (
            *("quack", "quack.autotuner", "quack.gemm_interface", "sonicmoe", "sonicmoe.enums", "sonicmoe.functional"),
            *("sonicmoe.functional.reduction_over_k_gather", "sonicmoe.functional.triton_kernels"),
        )
    }
    modules["quack"].autotuner = modules["quack.autotuner"]
    modules["quack"].gemm_interface = modules["quack.gemm_interface"]
    modules["quack.autotuner"]._gpu_warmup = None
    for name in ("gemm_tuned", "gemm_gated_tuned", "gemm_dgated_tuned"):
        setattr(modules["quack.gemm_interface"], name, SimpleNamespace(configs=_configs(), _do_bench=None))
    modules["quack.gemm_interface"].GemmConfig = SimpleNamespace
    modules["sonicmoe.enums"].ActivationType = ActivationType
    modules["sonicmoe.functional"]._UpProjection = _Differentiable(up)
    modules["sonicmoe.functional"]._DownProjection = _Differentiable(down)
    sums = SimpleNamespace(configs=[None] * 100, _do_bench=None)
    modules["sonicmoe.functional.reduction_over_k_gather"].token_gather_sum_kernel = sums
    modules["sonicmoe.functional.triton_kernels"].TC_topk_router_metadata_triton = metadata
    if importlib.util.find_spec("triton") is None:
        has_triton_package()  # torch asks once in a process, and must not find the stand-in
        modules["triton"] = ModuleType("triton")
        modules["triton"].testing = SimpleNamespace(do_bench=lambda *_arguments, **_options: 0.0)
        modules["triton"].Config = lambda values, **options: SimpleNamespace(kwargs=values, **options)
    return modules


def _configs() -> list[Any]:
    """Every combination: tiles, clusters, warp groups that take turns, swapped sides, two generations."""
    sides = product((64, 128, 192, 256), (128, 192, 256), (True, False), (1, 2), (True, False), (9, 10))
    return [
        SimpleNamespace(
            kwargs={
                "config": SimpleNamespace(
                    tile_m=m, tile_n=n, pingpong=turns, cluster_m=cluster, cluster_n=1, swap_ab=swap,
                    device_capacity=generation,
                )
            }
        )
        for m, n, turns, cluster, swap, generation in sides
    ]  # fmt: skip
