"""A MoE layer as other libraries compute it, on the operands of ours: torch's own grouped GEMM, and SonicMoE."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from torch import Tensor

from octavo_bench.harness.timing import Call
from octavo_bench.moe.benchmark import ADDED, SONIC
from octavo_bench.moe.torch import route
from octavo_bench.peers.grouped_mm import check_aligned, moe_layer
from octavo_bench.peers.loading import loaded_sonic_moe
from octavo_bench.training.moe import Layer, Operands
from octavo_bench.training.torch import gradients_call


def peer_calls(layer: Layer, kind: str) -> list[Call]:
    """Calls that return the gradients of all leaves; AbsentError where the library is not there."""
    return sonic_calls(layer) if kind == SONIC else own_calls(layer, kind)


def own_calls(layer: Layer, way: str) -> list[Call]:
    """torch's grouped GEMM in bf16 between index_select and what brings the rows back; gradients of all leaves."""
    check_aligned([layer.shape.rows // layer.shape.groups])

    def forward(operands: Operands) -> Tensor:
        index, weights = route(operands, layer.choices)
        return moe_layer(operands.x, operands.w1, operands.w2, index, weights, added=way == ADDED)

    return [gradients_call(partial(forward, one), one.leaves, one.dy) for one in layer.sets]


def sonic_calls(layer: Layer) -> list[Call]:
    """SonicMoE's layer behind the same router; the gradient of w1 is of `interleaved` rows, as its leaf is."""
    sonic, _ = loaded_sonic_moe()

    def forward(operands: Operands, w1: Tensor) -> Tensor:
        index, weights = route(operands, layer.choices)
        y: Tensor = sonic.layer(operands.x, index.int(), weights, w1, operands.w2)
        return y

    calls = []
    for one in layer.sets:
        w1 = sonic.interleaved(one.w1.detach()).requires_grad_()
        leaves = one.x, one.router, w1, one.w2
        calls.append(gradients_call(partial(forward, one, w1), leaves, one.dy))
    return calls


def in_our_order(kind: str, gradients: Sequence[Tensor]) -> list[Tensor]:
    """The gradients of a kind's call, w1's with all gates first."""
    if kind != SONIC:
        return list(gradients)
    from octavo_bench.peers.sonic_moe import separated

    x, router, w1, w2 = gradients
    return [x, router, separated(w1), w2]
