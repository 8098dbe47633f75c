"""WholeLayer: a grouped linear layer whose forward is one native call, and whose backward is another."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from octavo.quantizer import Operand
from octavo.recipe_base import Gemm
from octavo_native.layouts import LAYOUTS_OF_DIRECTION
from octavo_registry.contract import GemmRequest, Plan, QuantizeRequest
from octavo_torch.plugin_api import DTYPES, DelayedState, check_not_captured, seed_tensor, status_word
from octavo_torch_native.arrays.launch import PIECE, aligned, run, workspace
from octavo_torch_native.gemm.product import multiplier_of, product_of, product_text
from octavo_torch_native.linear.whole_passes import Parts, Passes
from octavo_torch_native.quantizers.kernel import kernel_of
from octavo_torch_native.quantizers.operators import ROW_START
from octavo_torch_native.quantizers.work import Work, text_of

_INT64, _UINT8 = torch.int64, torch.uint8
_MOST_PASSES = 1024

Rest = tuple[Passes, Tensor, DelayedState | None, int, int]
"""Of one call: the recorded passes of its number of rows, its plan, state, history slots (0: no record) and offset."""


def whole_layer(
    gemms: Mapping[Gemm, Plan[GemmRequest, Any]], quantizers: Mapping[Operand, Plan[QuantizeRequest, Any]]
) -> WholeLayer | None:
    """The layer of these plans; None where it converts operands between its launches."""
    if any(plan.request.other_dtype not in (None, plan.request.in_dtype) for plan in gemms.values()):
        return None
    for plan in quantizers.values():
        spec = plan.request.quantizer
        for (direction, (_, native)), layout in zip(LAYOUTS_OF_DIRECTION.items(), plan.request.layouts, strict=True):
            if direction in spec.directions and layout != native:
                return None
    return WholeLayer(gemms, quantizers)


class WholeLayer:
    """The whole-layer call of this package's plans: its launches are recorded once per number of rows."""

    def __init__(
        self, gemms: Mapping[Gemm, Plan[GemmRequest, Any]], quantizers: Mapping[Operand, Plan[QuantizeRequest, Any]]
    ) -> None:
        request = gemms["fprop"].request
        assert request.n is not None  # a layer's request says all sides
        assert request.k is not None
        assert request.groups is not None
        self._cuda = request.device == "cuda"
        self._sides = request.n, request.k, request.groups
        self._y_dtype = DTYPES[request.out_dtype]
        self._dtypes = {gemm: DTYPES[plan.request.out_dtype] for gemm, plan in gemms.items()}
        works = {
            operand: Work(plan.request.quantizer, operand, plan.request.layouts) for operand, plan in quantizers.items()
        }
        self._stochastic = frozenset(operand for operand, work in works.items() if work.quantizer.stochastic)
        delayed = {
            name: replace(work, amax=True) for name, work in works.items() if work.quantizer.scaling == "delayed"
        }
        products = {gemm: multiplier_of(product_text(product_of(plan.request))) for gemm, plan in gemms.items()}
        self._parts = Parts(
            {operand: kernel_of(text_of(work)) for operand, work in works.items()},
            {operand: kernel_of(text_of(work)) for operand, work in delayed.items()},
            products,
            self._sides,
            (DTYPES[request.in_dtype], self._y_dtype),
        )
        self.keeps_x = "wgrad" in products and not products["wgrad"].quantized
        self.keeps_w = "dgrad" in products and not products["dgrad"].quantized
        self._passes: dict[int, Passes] = {}

    def takes(self, x: Tensor, w: Tensor, bias: Tensor | None, state: DelayedState | None) -> bool:
        """See octavo_registry.contract.layer.WholeLayer: contiguous arrays that kernels load in whole pieces."""
        return (
            x.shape[0] > 0
            and x.is_contiguous()
            and w.is_contiguous()
            and not (x.data_ptr() | w.data_ptr()) % PIECE
            and (bias is None or aligned(bias))
            and (state is None or (state.history.is_contiguous() and state.scale.is_contiguous()))
        )

    def forward(
        self,
        x: Tensor,
        w: Tensor,
        sizes: Tensor,
        bias: Tensor | None,
        seed: Tensor | int | None,
        state: DelayedState | None,
        record: bool,
        group_offset: int,
    ) -> tuple[Tensor, Tensor | None, Rest]:
        """See octavo_registry.contract.layer.WholeLayer."""
        rows, device = x.shape[0], x.device
        flagged = not sizes.is_cpu
        if self._cuda and not flagged:
            check_not_captured("group_sizes", x)
            sizes = sizes.to(device, non_blocking=True)
        if not sizes.is_contiguous():
            sizes = sizes.contiguous()
        passes = self._passes.get(rows) or self._new_passes(rows)
        slots = state.history.shape[1] if state is not None and record else 0
        offset = group_offset if self._stochastic else 0
        made = passes.forward(sizes.dtype is _INT64, flagged, None if bias is None else bias.dtype, slots, offset)
        plan = torch.empty(passes.plan_words, dtype=_INT64, device=device)
        kept = torch.empty(passes.kept, dtype=_UINT8, device=device) if passes.kept else None
        y = torch.empty((rows, self._sides[0]), dtype=self._y_dtype, device=device)
        memory, scratch = workspace(made.bytes, x)
        drawn = seed_tensor(seed, device) if "x" in self._stochastic or "w" in self._stochastic else None
        arrays = [
            *_of_both(x, w, plan, kept, scratch, scratch + made.workspace_at, drawn, state),
            sizes.data_ptr(),
            status_word(device).data_ptr() if flagged else 0,
            0 if bias is None else bias.data_ptr(),
            y.data_ptr(),
        ]
        run(made.sequence, arrays, x)
        del memory
        return y, kept, (passes, plan, state, slots, offset)

    def backward(
        self,
        dy: Tensor,
        x: Tensor | None,
        w: Tensor | None,
        kept: Tensor | None,
        rest: Rest,
        wanted: tuple[bool, bool],
        seed: Tensor | int | None,
    ) -> tuple[Tensor | None, Tensor | None]:
        """See octavo_registry.contract.layer.WholeLayer."""
        if not aligned(dy):
            dy = dy.clone(memory_format=torch.contiguous_format)
        device, (n, k, groups) = dy.device, self._sides
        need_dx, need_dw = wanted
        passes, plan, state, slots, offset = rest
        made = passes.backward(need_dx, need_dw, slots, offset)
        dx = torch.empty((dy.shape[0], k), dtype=self._dtypes["dgrad"], device=device) if need_dx else None
        dw = torch.empty((groups, n, k), dtype=self._dtypes["wgrad"], device=device) if need_dw else None
        memory, scratch = workspace(made.bytes, dy)
        drawn = seed_tensor(seed, device) if "dy" in self._stochastic else None
        arrays = [
            *_of_both(x, w, plan, kept, scratch, scratch + made.workspace_at, drawn, state),
            dy.data_ptr(),
            0 if dx is None else dx.data_ptr(),
            0 if dw is None else dw.data_ptr(),
        ]
        run(made.sequence, arrays, dy)
        del memory
        return dx, dw

    def sizes(self, rest: Rest) -> Tensor:
        """See octavo_registry.contract.layer.WholeLayer."""
        starts = rest[1][ROW_START : ROW_START + self._sides[2] + 1]
        return starts[1:] - starts[:-1]

    def _new_passes(self, rows: int) -> Passes:
        if len(self._passes) >= _MOST_PASSES:
            self._passes.clear()
        passes = self._passes[rows] = Passes(self._parts, rows, self._cuda)
        return passes


def _of_both(
    x: Tensor | None,
    w: Tensor | None,
    plan: Tensor,
    kept: Tensor | None,
    scratch: int,
    workspace_at: int,
    drawn: Tensor | None,
    state: DelayedState | None,
) -> tuple[int, ...]:
    """Addresses of the arrays of both passes, in the order of their numbers in whole_passes; 0: there is none."""
    return (
        0 if x is None else x.data_ptr(),
        0 if w is None else w.data_ptr(),
        plan.data_ptr(),
        0 if kept is None else kept.data_ptr(),
        scratch,
        workspace_at,
        0 if drawn is None else drawn.data_ptr(),
        0 if state is None else state.scale.data_ptr(),
        0 if state is None else state.history.data_ptr(),
    )
