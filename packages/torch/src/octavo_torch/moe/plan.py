"""A MoE layer resolved through the registry: what its forward runs, and what its backward computes again."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from octavo.quantizer import Direction, Operand
from octavo.recipe_base import READERS, Gemm
from octavo_registry.contract import Plan
from octavo_registry.dispatch.layer_plan import QuantizePlan
from octavo_torch.dispatch.layer import Layer, Planes
from octavo_torch.dispatch.prepared_sizes import shared_prepare
from octavo_torch.memo import Memo
from octavo_torch.mlp.plan import MlpPlan, plans_of, read_at_once_again
from octavo_torch.moe.forms import Form, WeightCodes
from octavo_torch.moe.kept import Kept
from octavo_torch.moe.tokens import gathers, gathers_codes, quantizer_of_tokens, takes_tokens
from octavo_torch.recording.calls import Kinds


class DyCodesOfTokens(NamedTuple):
    """The two quantizers of dy if dgrad gathers its rows from the codes of tokens.

    tokens    quantizes each token once, for dgrad
    columns   quantizes the columns of the rows, for wgrad; None if wgrad needs none
    """

    tokens: QuantizePlan
    columns: QuantizePlan | None


class MoePlan:
    """An MLP's plan as a MoE layer of one form runs it: what forward computes, and what backward computes again.

    forward    the MLP that forward runs. Of x, the activation and the weights it quantizes the planes that fprop reads
               and those that are kept. Backward's GEMMs and the quantizers of dy are in it, too
    backward   the MLP whose quantizers backward runs for the planes that are not kept
    hidden     the quantizer of fc1's result; None unless the form keeps that as codes

    Rows that are not written, because what reads them reads the tokens:

    x_of_tokens          x is quantized from its tokens
    x_codes_of_tokens    in addition, fprop gathers codes of x: the quantizer of its tokens, each once. None: it reads
                         rows
    x_gathered           x is not quantized, and fprop gathers its rows from the tokens
    wgrad_gathers        fc1's wgrad gathers rows of x from the tokens, so they are neither kept nor made again
    dy_of_tokens         dy is quantized from its tokens, and a GEMM that reads it unquantized gathers its rows from
                         them
    dy_codes_of_tokens   as x_codes_of_tokens, in dgrad: see DyCodesOfTokens

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
        "dy_codes_of_tokens",
        "dy_of_tokens",
        "forward",
        "hidden",
        "prepare",
        "recorded_calls",
        "recorder",
        "wgrad_gathers",
        "x_codes_of_tokens",
        "x_gathered",
        "x_of_tokens",
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
        fc1_again = self.backward.fc1
        reads_values = fc1_again.need_dw and fc1_again.quantize_x is None
        self.wgrad_gathers = reads_values and gathers(fc1_again, "x", "wgrad")
        keeps_x = keep_rows and fc1.need_dw and not fc1.quantized_wgrad and not self.wgrad_gathers
        self.x_of_tokens = takes_tokens(fc1, "x") and fc1.quantized_fprop and not keeps_x
        unquantized: list[Gemm] = [gemm for gemm in READERS["dy"] if not fc2.recipe.quantizes(gemm)]
        quantizes_tokens = fc2.quantize_dy is None or takes_tokens(fc2, "dy")
        self.dy_of_tokens = quantizes_tokens and gathers(fc2, "dy", *unquantized)
        gathers_x = self.x_of_tokens and not _computes(fc1, "x", "columnwise") and gathers_codes(fc1, "x", "fprop")
        self.x_codes_of_tokens = quantizer_of_tokens(fc1, "x") if gathers_x else None
        self.dy_codes_of_tokens = _dy_codes_of_tokens(fc2) if self.dy_of_tokens else None
        self.amax_only = _left_out(full.fc1, fc1), _left_out(full.fc2, fc2)
        kept_or_seen = keeps_x or "x" in self.amax_only[0]
        self.x_gathered = fc1.quantize_x is None and not kept_or_seen and gathers(fc1, "x", "fprop")
        others = [hidden, None if self.dy_codes_of_tokens is None else self.dy_codes_of_tokens.columns]
        prepared = [plan.prepare for plan in others if plan is not None]
        self.prepare = shared_prepare([self.forward.prepare, self.backward.prepare, *prepared])
        self.backends = frozenset(plan.backend for plan in self._plans())
        self.recorder = self.forward.recorder if len(self.backends) == 1 else None
        self.recorded_calls: Kinds[Kept] = Kinds()

    def _plans(self) -> Iterator[Plan]:
        yield from plans_of(self.forward)
        yield from plans_of(self.backward)
        others = (self.hidden, self.x_codes_of_tokens, *(self.dy_codes_of_tokens or ()))
        yield from (plan for plan in others if plan is not None)


def _left_out(full: Layer, narrowed: Layer) -> list[Operand]:
    """The operands that `full` quantizes and `narrowed` does not."""
    return [operand for operand in full.quantizers if operand not in narrowed.quantizers]


def _computes(layer: Layer, operand: Operand, direction: Direction) -> bool:
    return direction in layer.quantizers[operand].request.quantizer.directions


def _dy_codes_of_tokens(fc2: Layer) -> DyCodesOfTokens | None:
    if not gathers_codes(fc2, "dy", "dgrad"):
        return None
    columns = fc2.with_planes({"dy": (False, True)}).quantizers.get("dy")
    return DyCodesOfTokens(quantizer_of_tokens(fc2, "dy"), columns)


def _narrowed(full: MlpPlan, planes: dict[Operand, Planes], at_once: Mapping[Operand, Planes]) -> MlpPlan:
    fc1, fc2 = full.fc1.with_planes(planes), full.fc2.with_planes(planes)
    return MlpPlan(full.recipe, full.activation, fc1, fc2, at_once)


_plans: Memo[MoePlan] = Memo()


def moe_plan_for(full: MlpPlan, form: Form, weight_codes: WeightCodes, hidden: QuantizePlan | None) -> MoePlan:
    """The plan of a form of the MLP `full`, remembered by its identity."""
    key = (id(full), form, weight_codes, id(hidden))
    return _plans.get(key, lambda: MoePlan(full, form, weight_codes, hidden), full)
