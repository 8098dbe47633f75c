"""RecordedLayer: a grouped linear layer whose forward is one native call, and whose backward is another."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from octavo.quantizer import Operand
from octavo.recipe_base import Gemm
from octavo_native.layouts import LAYOUTS_OF_DIRECTION, VALUES
from octavo_registry.contract import GemmRequest, Plan, QuantizeRequest
from octavo_torch.plugin_api import DTYPES, Bounded, DelayedState, check_not_captured, seed_tensor, status_word
from octavo_torch_native.arrays.launch import PIECE, address, in_pieces, run, workspace
from octavo_torch_native.arrays.operators import ROW_START
from octavo_torch_native.gemm.launches import gemm_launch_of
from octavo_torch_native.gemm.spec import gemm_spec, gemm_text
from octavo_torch_native.linear.recording import LayerKernels, LayerRecording
from octavo_torch_native.linear.values import PlaneName, planes_of_values, reading_values
from octavo_torch_native.quantizers.launches import launch_of
from octavo_torch_native.quantizers.spec import LaunchSpec, spec_text

_INT64, _UINT8 = torch.int64, torch.uint8


class Rest(NamedTuple):
    """What a backward needs of its forward besides tensors of the caller.

    recording   for the call's number of rows
    words       of its GroupIndex
    state       the state's scale and history as the forward had them: a caller may have put others there since
    slots       of the history in which the amax is recorded; 0: it is not recorded
    """

    recording: LayerRecording
    words: Tensor
    state: tuple[Tensor, Tensor] | None
    slots: int
    group_offset: int


def whole_layer(
    gemms: Mapping[Gemm, Plan[GemmRequest, Any]], quantizers: Mapping[Operand, Plan[QuantizeRequest, Any]]
) -> RecordedLayer | None:
    """The layer of these plans; None where operands would have to be converted between its launches."""
    if any(plan.request.other_dtype not in (None, plan.request.in_dtype) for plan in gemms.values()):
        return None
    for plan in quantizers.values():
        spec = plan.request.quantizer
        for (direction, (_, native)), layout in zip(LAYOUTS_OF_DIRECTION.items(), plan.request.layouts, strict=True):
            if direction in spec.directions and layout != native:
                return None
    return RecordedLayer(gemms, quantizers)


class RecordedLayer:
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
        valued = planes_of_values(quantizers)
        specs = {
            operand: LaunchSpec(plan.request.quantizer, operand, _layouts(operand, plan.request.layouts, valued))
            for operand, plan in quantizers.items()
        }
        self._stochastic = frozenset(operand for operand, spec in specs.items() if spec.quantizer.stochastic)
        measuring = {
            operand: replace(spec, amax=True) for operand, spec in specs.items() if spec.quantizer.scaling == "delayed"
        }
        launches = {
            gemm: gemm_launch_of(gemm_text(reading_values(gemm, gemm_spec(plan.request), valued)))
            for gemm, plan in gemms.items()
        }
        self._kernels = LayerKernels(
            {operand: launch_of(spec_text(spec)) for operand, spec in specs.items()},
            {operand: launch_of(spec_text(spec)) for operand, spec in measuring.items()},
            launches,
            self._sides,
            (DTYPES[request.in_dtype], self._y_dtype),
        )
        self.keeps_x = "wgrad" in launches and not launches["wgrad"].quantized
        self.keeps_w = "dgrad" in launches and not launches["dgrad"].quantized
        self._recordings: Bounded[int, LayerRecording] = Bounded()

    def takes(self, x: Tensor, w: Tensor, bias: Tensor | None, state: DelayedState | None) -> bool:
        """See octavo_registry.contract.layer.WholeLayer: contiguous arrays that kernels load in whole pieces."""
        # 0: memory that was freed, which composed layers refuse
        of_x, of_w, of_bias = x.data_ptr(), w.data_ptr(), PIECE if bias is None else bias.data_ptr()
        return (
            x.shape[0] > 0
            and x.is_contiguous()
            and w.is_contiguous()
            and of_x != 0
            and of_w != 0
            and of_bias != 0
            and not (of_x | of_w | of_bias) % PIECE
            and (bias is None or bias.is_contiguous())
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
        recording = self._recordings.get(rows) or self._new_recording(rows)
        kept = None if state is None else (state.scale, state.history)
        slots = 0 if kept is None or not record else kept[1].shape[1]
        offset = group_offset if self._stochastic else 0
        bias_dtype = None if bias is None else bias.dtype
        recorded = recording.forward(sizes.dtype is _INT64, flagged, bias_dtype, slots, offset)
        words = torch.empty(recording.plan_words, dtype=_INT64, device=device)
        columns = torch.empty(recording.column_bytes, dtype=_UINT8, device=device) if recording.column_bytes else None
        y = torch.empty((rows, self._sides[0]), dtype=self._y_dtype, device=device)
        memory, scratch = workspace(recorded.bytes, x)
        random = seed_tensor(seed, device) if "x" in self._stochastic or "w" in self._stochastic else None
        # in the order of their numbers in recording.py; 0: there is none
        arrays = [
            x.data_ptr(),
            w.data_ptr(),
            words.data_ptr(),
            0 if columns is None else columns.data_ptr(),
            scratch,
            scratch + recorded.workspace_at,
            0 if random is None else random.data_ptr(),
            *_state_addresses(kept),
            sizes.data_ptr(),
            status_word(device).data_ptr() if flagged else 0,
            0 if bias is None else bias.data_ptr(),
            y.data_ptr(),
        ]
        run(recorded.sequence, arrays, x)
        del memory
        return y, columns, Rest(recording, words, kept, slots, offset)

    def backward(
        self,
        dy: Tensor,
        x: Tensor | None,
        w: Tensor | None,
        columns: Tensor | None,
        rest: Rest,
        wanted: tuple[bool, bool],
        seed: Tensor | int | None,
    ) -> tuple[Tensor | None, Tensor | None]:
        """See octavo_registry.contract.layer.WholeLayer."""
        # a parameter's .data may lie otherwise than in forward
        dy, x, w = in_pieces(dy), None if x is None else in_pieces(x), None if w is None else in_pieces(w)
        device, (n, k, groups) = dy.device, self._sides
        need_dx, need_dw = wanted
        recording, words, state, slots, offset = rest
        recorded = recording.backward(need_dx, need_dw, slots, offset)
        dx = torch.empty((dy.shape[0], k), dtype=self._dtypes["dgrad"], device=device) if need_dx else None
        dw = torch.empty((groups, n, k), dtype=self._dtypes["wgrad"], device=device) if need_dw else None
        memory, scratch = workspace(recorded.bytes, dy)
        random = seed_tensor(seed, device) if "dy" in self._stochastic else None
        # in the order of their numbers in recording.py; 0: there is none
        arrays = [
            address(x),
            address(w),
            words.data_ptr(),
            0 if columns is None else columns.data_ptr(),
            scratch,
            scratch + recorded.workspace_at,
            0 if random is None else random.data_ptr(),
            *_state_addresses(state),
            address(dy),
            0 if dx is None else dx.data_ptr(),
            0 if dw is None else dw.data_ptr(),
        ]
        run(recorded.sequence, arrays, dy)
        del memory
        return dx, dw

    def sizes(self, rest: Rest) -> Tensor:
        """See octavo_registry.contract.layer.WholeLayer."""
        starts = rest.words[ROW_START : ROW_START + self._sides[2] + 1]
        return starts[1:] - starts[:-1]

    def _new_recording(self, rows: int) -> LayerRecording:
        recording = self._recordings[rows] = LayerRecording(self._kernels, rows, self._cuda)
        return recording


def _layouts(operand: Operand, layouts: tuple[str, str], valued: frozenset[PlaneName]) -> tuple[str, str]:
    """The layouts of the quantizer's plan, or of values for the planes of which the layer reads values."""
    row, column = (
        VALUES if (operand, direction) in valued else layout
        for direction, layout in zip(LAYOUTS_OF_DIRECTION, layouts, strict=True)
    )
    return row, column


def _state_addresses(state: tuple[Tensor, Tensor] | None) -> tuple[int, int]:
    """The addresses of the encode scales and of the history; 0 without a state."""
    return (0, 0) if state is None else (address(state[0]), address(state[1]))
