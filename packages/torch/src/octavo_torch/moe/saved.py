"""What the forward of a MoE layer keeps for its backward, in each form."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Protocol

from torch import Tensor

from octavo_torch.arrays.grouped_tensor import PLANES_OF, GroupedTensor, Matrix
from octavo_torch.autograd.gradients import Context
from octavo_torch.autograd.saved import Saved, SavedByName, without_sizes
from octavo_torch.moe.call import MoeCall, MoeOperands
from octavo_torch.moe.forms import RowCodes
from octavo_torch.moe.forward import MoeForward
from octavo_torch.moe.kept import Kept
from octavo_torch.recording.calls import RecordedCalls
from octavo_torch.scaling.seeds import DrawnSeed


class _Saving:
    """Tensors for autograd to save, and where each operand is among them."""

    def __init__(self) -> None:
        self.tensors: list[Tensor | None] = []
        self.by_name: SavedByName = {}

    def add(
        self, name: str, value: Matrix | None, own: bool = False, planes: tuple[str, ...] = PLANES_OF["columnwise"]
    ) -> None:
        """Keeps `value` under this name; nothing if it is None.

        own, planes   see Saved
        """
        if value is not None:
            self.by_name[name] = Saved(without_sizes(value), self.tensors, own, planes)


class MoeContext(Context, Protocol):
    """autograd's ctx of a MoE layer.

    kept     what forward has left beside the tensors that autograd saves
    freed    whether a backward that has not ended has freed what it has read
    dtypes   of the operands; x's is also the dtype of its rows
    recorded   the passes of such calls, if the forward was written down; None: the backward is composed
    """

    call: MoeCall
    kept: Kept
    recorded: RecordedCalls[Kept] | None
    freed: bool


def scales_to_keep(call: MoeCall) -> list[Tensor | None]:
    """Delayed scaling's scales of fc1 and of fc2, with which backward makes operands again: copies, because a step may
    end, which computes others, before backward. None where it makes none, and for other recipes."""
    again = call.form != "keep_all" or call.weight_codes != "keep"
    return [each.state.scale.clone() if again and each.state is not None else None for each in (call.fc1, call.fc2)]


def kept_by(
    call: MoeCall, choices: Tensor, operands: MoeOperands, result: MoeForward, scales: Sequence[Tensor | None]
) -> tuple[list[Tensor | None], Kept]:
    """The tensors for autograd to save, and what else backward reads, of all gradients that may be asked for; `scales`
    are those of `scales_to_keep`."""
    saved = _saved_by(call, choices, operands, result, scales)
    seeds: list[DrawnSeed] = [None if isinstance(seed, Tensor) else seed for seed in result.seeds]
    return saved.tensors, Kept(saved.by_name, seeds, result.h.reader if isinstance(result.h, RowCodes) else None)


def _saved_by(
    call: MoeCall, choices: Tensor, operands: MoeOperands, result: MoeForward, scales: Sequence[Tensor | None]
) -> _Saving:
    fc1, fc2, saved = call.plan.fc1, call.plan.fc2, _Saving()
    call.forget_sizes()
    reads_h = fc2.need_dx or fc2.need_dw
    if call.form == "keep_all":
        for name, value in (*result.places._asdict().items(), ("sizes", result.sizes)):
            saved.add(name, value)
        if fc1.need_dw:
            gathers = call.moe.x_in_wgrad == "tokens"
            saved.add("x", result.tokens if gathers else result.x, own=not gathers)
        if fc2.need_dw and fc2.quantized_wgrad:
            saved.add("a", result.a, own=True)
    else:
        saved.add("choices", choices)
        if fc1.need_dw or (reads_h and call.form == "recompute"):
            saved.add("x", result.tokens)
    if reads_h or operands.bias2 is not None:
        saved.add("weights", operands.weights)
        saved.add("bias2", operands.bias2)
    h = result.h if reads_h else None
    if isinstance(h, RowCodes):
        saved.add("h", h.codes)
        saved.add("h_scales", h.scales)
    else:
        saved.add("h", h)
    if reads_h and call.form == "recompute":
        saved.add("bias1", operands.bias1)
    _keep_weight("w1", call, operands.w1, result.w1, saved)
    _keep_weight("w2", call, operands.w2, result.w2, saved)
    if call.form == "keep_all" and call.weight_codes == "keep":
        return saved
    for number, (seed, scale) in enumerate(zip(result.seeds, scales, strict=True)):
        saved.add(f"seed{number}", seed if isinstance(seed, Tensor) else None)
        saved.add(f"scale{number}", scale)
    return saved


def _keep_weight(name: Literal["w1", "w2"], call: MoeCall, weight: Tensor, read: Matrix, saved: _Saving) -> None:
    """Keeps the weight or its codes, as dgrad reads them; for w1 also as fprop does, if backward runs that again."""
    layer, codes = (call.plan.fc1, call.fc1.w_codes) if name == "w1" else (call.plan.fc2, call.fc2.w_codes)
    multiplies = name == "w1" and call.form == "recompute" and (call.plan.fc2.need_dx or call.plan.fc2.need_dw)
    of_fprop, of_dgrad = layer.w_planes
    reads_codes = of_fprop if multiplies and layer.quantized_fprop else ()
    reads_codes += of_dgrad if layer.need_dx and layer.quantized_dgrad else ()
    reads_weight = (multiplies and not layer.quantized_fprop) or (layer.need_dx and not layer.quantized_dgrad)
    keeps_codes = isinstance(read, GroupedTensor) and (codes is not None or call.weight_codes == "keep")
    if reads_codes and keeps_codes:
        saved.add(f"{name}_codes", read, codes is None, reads_codes)
    if reads_weight or (reads_codes and not keeps_codes):
        saved.add(name, weight)
