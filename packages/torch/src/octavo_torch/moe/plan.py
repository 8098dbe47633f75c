"""A MoE layer resolved through the registry: what its forward runs, and what its backward computes again."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Literal

from octavo.quantizer import Operand
from octavo_registry.contract import Plan
from octavo_registry.dispatch.layer_plan import QuantizePlan
from octavo_torch.dispatch.layer import Layer
from octavo_torch.dispatch.layer_spec import Planes
from octavo_torch.dispatch.prepared_sizes import shared_prepare
from octavo_torch.memo import Memo
from octavo_torch.mlp.plan import MlpPlan, plans_of, read_at_once_again
from octavo_torch.moe.forms import Form, WeightCodes
from octavo_torch.moe.kept import Kept
from octavo_torch.moe.tokens import Read, gathers, gathers_codes, quantizer_of_tokens, reads_of_dy, takes_tokens
from octavo_torch.recording.calls import Kinds


class MoePlan:
    """An MLP's plan as a MoE layer of one form runs it: what forward computes, and what backward computes again.

    forward    the MLP that forward runs. Of x, the activation and the weights it quantizes the planes that fprop reads
               and those that are kept. Backward's GEMMs and the quantizers of dy are in it, too
    backward   the MLP whose quantizers backward runs for the planes that are not kept
    hidden     the quantizer of fc1's result; None unless the form keeps that as codes

    What GEMMs read of the rows that choices make of x and of dy, see Read:

    x_in_fprop, dy_in_dgrad, dy_in_wgrad   rows of dy are written for both of its GEMMs or for none
    x_in_wgrad   "kept": what forward has read, or the rows in high precision
    x_token_quantizer, dy_token_quantizer   quantize each token once; None where nothing reads codes of tokens
    dy_rows      fc2, as it quantizes dy for the GEMMs that read codes of its rows

    amax_only  for each layer, the operands whose amax forward records without quantizing them
    prepare    prepares group sizes for everything here; None: they are taken as they are
    backends   the names of those that serve everything here
    recorder   writes down the launches of its passes; None where backends are several, or the one has none, or a pass
               does more than launch: it draws seeds, or computes an activation by torch's operations
    recorded_calls   the passes of such calls that are written down, by what their launches depend on
    """

    __slots__ = (
        "amax_only",
        "backends",
        "backward",
        "dy_in_dgrad",
        "dy_in_wgrad",
        "dy_rows",
        "dy_token_quantizer",
        "forward",
        "hidden",
        "prepare",
        "recorded_calls",
        "recorder",
        "x_in_fprop",
        "x_in_wgrad",
        "x_token_quantizer",
    )

    def __init__(self, full: MlpPlan, form: Form, weight_codes: WeightCodes, hidden: QuantizePlan | None) -> None:
        keep_rows, keep_weights = form == "keep_all", weight_codes == "keep"
        # a backward that runs fc1 again reads the plane of w1 that forward has read
        keeps_for_fprop = form == "recompute" and keep_weights
        at_once = {**full.at_once, "w": (not keeps_for_fprop, False)}
        self.forward = _narrowed(full, {"x": (True, keep_rows), "w": (True, keep_weights)}, at_once)
        again: dict[Operand, Planes] = {"x": (False, not keep_rows), "w": (False, not keep_weights)}
        self.backward = _narrowed(full, again, read_at_once_again(full.at_once))
        self.hidden = hidden
        fc1, fc2 = self.forward.fc1, self.forward.fc2
        self.amax_only = _left_out(full.fc1, fc1), _left_out(full.fc2, fc2)
        self.x_in_wgrad = _x_in_wgrad(self.backward.fc1, keep_rows)
        keeps_x = self.x_in_wgrad == "kept" and fc1.need_dw and not fc1.quantized_wgrad
        self.x_in_fprop = _x_in_fprop(fc1, keeps_x, "x" in self.amax_only[0])
        self.x_token_quantizer = quantizer_of_tokens(fc1, "x") if self.x_in_fprop == "codes of tokens" else None
        self.dy_in_dgrad, self.dy_in_wgrad = reads_of_dy(fc2)
        gathers_dy = self.dy_in_dgrad == "codes of tokens"
        self.dy_token_quantizer = quantizer_of_tokens(fc2, "dy") if gathers_dy else None
        self.dy_rows = fc2.with_planes({"dy": (False, True)}) if gathers_dy else fc2
        others = [plan for plan in (hidden, self.dy_rows.quantizers.get("dy")) if plan is not None]
        self.prepare = shared_prepare([self.forward.prepare, self.backward.prepare, *(plan.prepare for plan in others)])
        self.backends = frozenset(plan.backend for plan in self._plans())
        self.recorder = self.forward.recorder if len(self.backends) == 1 else None
        self.recorded_calls: Kinds[Kept] = Kinds()

    def _plans(self) -> Iterator[Plan]:
        yield from plans_of(self.forward)
        yield from plans_of(self.backward)
        of_rows = self.dy_rows.quantizers.get("dy")
        others = (self.hidden, self.x_token_quantizer, self.dy_token_quantizer, of_rows)
        yield from (plan for plan in others if plan is not None)


def _left_out(full: Layer, narrowed: Layer) -> list[Operand]:
    """The operands that `full` quantizes and `narrowed` does not."""
    return [operand for operand in full.quantizers if operand not in narrowed.quantizers]


def _x_in_fprop(fc1: Layer, keeps_rows: bool, records_amax: bool) -> Read:
    """keeps_rows, records_amax   forward reads the rows in high precision beside fprop: to keep them, or their amax"""
    if fc1.quantize_x is None:
        return "tokens" if gathers(fc1, "x", "fprop") and not keeps_rows and not records_amax else "rows"
    if keeps_rows or not (fc1.quantized_fprop and takes_tokens(fc1, "x")):
        return "rows"
    columns_too = "columnwise" in fc1.quantizers["x"].request.quantizer.directions
    return "codes of tokens" if gathers_codes(fc1, "x", "fprop") and not columns_too else "codes of rows"


def _x_in_wgrad(fc1_again: Layer, keeps: bool) -> Read | Literal["kept"]:
    if fc1_again.need_dw and fc1_again.quantize_x is None and gathers(fc1_again, "x", "wgrad"):
        return "tokens"
    if keeps:
        return "kept"
    return "codes of rows" if takes_tokens(fc1_again, "x") else "rows"


def _narrowed(full: MlpPlan, planes: dict[Operand, Planes], at_once: Mapping[Operand, Planes]) -> MlpPlan:
    fc1, fc2 = full.fc1.with_planes(planes), full.fc2.with_planes(planes)
    return MlpPlan(full.recipe, full.activation, fc1, fc2, at_once)


_plans: Memo[MoePlan] = Memo()


def moe_plan_for(full: MlpPlan, form: Form, weight_codes: WeightCodes, hidden: QuantizePlan | None) -> MoePlan:
    """The plan of a form of the MLP `full`, remembered by its identity."""
    key = (id(full), form, weight_codes, id(hidden))
    return _plans.get(key, lambda: MoePlan(full, form, weight_codes, hidden), full)
