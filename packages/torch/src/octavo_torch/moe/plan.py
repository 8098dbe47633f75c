"""A MoE layer resolved through the registry: what its forward runs, and what its backward computes again."""

from __future__ import annotations

from typing import NamedTuple

from octavo.quantizer import Direction, Operand
from octavo_registry.dispatch.layer_plan import QuantizePlan
from octavo_torch.dispatch.layer import Layer
from octavo_torch.dispatch.prepared_sizes import shared_prepare
from octavo_torch.memo import Memo
from octavo_torch.mlp.plan import MlpPlan
from octavo_torch.moe.forms import Form, WeightCodes

Planes = tuple[bool, bool]
"""Whether an operand's row data and its column data are computed."""


class DyOnce(NamedTuple):
    """The two quantizers of a dy whose tokens dgrad gathers: of tokens, and of rows for wgrad, where that is needed."""

    tokens: QuantizePlan
    columns: QuantizePlan | None


class MoePlan:
    """The two halves of an MLP's plan, for one form.

    forward    what forward runs; the GEMMs and the gradients' quantizers of backward are in it, too. Of x, the
               activation and the weights it computes the planes that fprop reads, and those that are kept
    backward   the quantizers of the other planes
    hidden     what quantizes fc1's result, where it is kept as codes
    x_of_tokens, dy_of_tokens   forward quantizes x, and backward dy, where the tokens stand: no GEMM reads their rows
    x_once     of these, what quantizes each token of x once, whose codes the product gathers; None: codes are of rows
    dy_once    likewise of dy, for dgrad, and what quantizes its columns for wgrad
    x_gathered, dy_gathered     forward's GEMM reads x, and backward's dy, where the tokens stand: nothing is quantized
    wgrad_gathers  fc1's wgrad reads x where the tokens stand: no rows of it are kept, or made again
    recorded   of each layer the operands whose amax forward records although it does not quantize them
    prepare    makes of group sizes what everything here takes in their place; None: sizes as they are
    """

    __slots__ = (
        "backward",
        "dy_gathered",
        "dy_of_tokens",
        "dy_once",
        "forward",
        "hidden",
        "prepare",
        "recorded",
        "wgrad_gathers",
        "x_gathered",
        "x_of_tokens",
        "x_once",
    )

    def __init__(self, full: MlpPlan, form: Form, weight_codes: WeightCodes, hidden: QuantizePlan | None) -> None:
        keep_rows, keep_weights = form == "keep_all", weight_codes == "keep"
        self.forward = _narrowed(full, {"x": (True, keep_rows), "w": (True, keep_weights)})
        self.backward = _narrowed(full, {"x": (False, not keep_rows), "w": (False, not keep_weights)})
        self.hidden = hidden
        fc1, fc2 = self.forward.fc1, self.forward.fc2
        again = self.backward.fc1
        self.wgrad_gathers = again.need_dw and again.quantize_x is None and again.gathers("x", "wgrad")
        keeps_x = keep_rows and fc1.need_dw and not fc1.quantized_wgrad and not self.wgrad_gathers
        self.x_of_tokens = fc1.takes_tokens("x") and fc1.quantized_fprop and not keeps_x
        self.dy_of_tokens = fc2.takes_tokens("dy")
        once = self.x_of_tokens and not _computes(fc1, "x", "columnwise") and fc1.gathers_codes("x", "fprop")
        self.x_once = fc1.quantizer_of_tokens("x") if once else None
        self.dy_once = _dy_once(fc2) if self.dy_of_tokens else None
        pairs = (full.fc1, self.forward.fc1), (full.fc2, self.forward.fc2)
        self.recorded: tuple[list[Operand], list[Operand]] = tuple(  # type: ignore[assignment]
            [name for name in ("x", "w") if name in whole.quantizers and name not in part.quantizers]
            for whole, part in pairs
        )
        kept_or_seen = keeps_x or "x" in self.recorded[0]
        self.x_gathered = fc1.quantize_x is None and not kept_or_seen and fc1.gathers("x", "fprop")
        self.dy_gathered = fc2.quantize_dy is None and fc2.gathers("dy", "dgrad", "wgrad")
        others = [hidden, None if self.dy_once is None else self.dy_once.columns]
        prepared = [plan.prepare for plan in others if plan is not None]
        self.prepare = shared_prepare([self.forward.prepare, self.backward.prepare, *prepared])


def _computes(layer: Layer, operand: Operand, direction: Direction) -> bool:
    return direction in layer.quantizers[operand].request.quantizer.directions


def _dy_once(fc2: Layer) -> DyOnce | None:
    if not fc2.gathers_codes("dy", "dgrad"):
        return None
    columns = fc2.with_planes({"dy": (False, True)}).quantizers.get("dy")
    return DyOnce(fc2.quantizer_of_tokens("dy"), columns)


def _narrowed(full: MlpPlan, planes: dict[Operand, Planes]) -> MlpPlan:
    return MlpPlan(full.recipe, full.activation, full.fc1.with_planes(planes), full.fc2.with_planes(planes))


_plans: Memo[MoePlan] = Memo()


def moe_plan_for(full: MlpPlan, form: Form, weight_codes: WeightCodes, hidden: QuantizePlan | None) -> MoePlan:
    """The plan of a form of the MLP `full`, remembered by its identity."""
    key = (id(full), form, weight_codes, id(hidden))
    return _plans.get(key, lambda: MoePlan(full, form, weight_codes, hidden), full)
