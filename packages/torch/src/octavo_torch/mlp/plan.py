"""A grouped MLP resolved through the registry: its two layers, what stands between them, and what of it is fused."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from torch import Tensor

from octavo import Recipe
from octavo.quantizer import Operand
from octavo_registry.contract import Plan
from octavo_registry.contract.cards import Activation
from octavo_registry.contract.recording import MakeRecorder
from octavo_torch.arrays.checks import check_recipe
from octavo_torch.arrays.dtypes import DTYPE_NAMES
from octavo_torch.arrays.weight_order import order_of
from octavo_torch.autograd.saved import SavedByName
from octavo_torch.compiler.graphs import wants_graph
from octavo_torch.dispatch.layer import Layer
from octavo_torch.dispatch.layer_spec import Planes
from octavo_torch.dispatch.layers import layer_for
from octavo_torch.dispatch.prepared_sizes import shared_prepare
from octavo_torch.dispatch.recipes import with_output_dtype
from octavo_torch.memo import Memo
from octavo_torch.quantizers.fused import Fused, activation_quantizer, gradient_quantizer
from octavo_torch.recording.calls import Kinds


@dataclass(frozen=True)
class RequiredGradients:
    """Which gradients a call of an MLP computes.

    da          of the activation, by fc2's dgrad: those of x, w1, bias1 and probs are computed from it
    postponed   those of weights are postponed, and what they read is kept until then
    """

    x: bool = False
    w1: bool = False
    w2: bool = False
    da: bool = False
    postponed: bool = False


def read_at_once(*, postponed: bool) -> dict[Operand, Planes]:
    """Which planes are read in the pass that quantizes them: `Layer.reading_at_once`. Of x and of the weights those for
    fprop; the others are kept for backward."""
    return {"x": (True, False), "w": (True, False), "dy": (True, not postponed)}


def read_at_once_again(first: Mapping[Operand, Planes]) -> dict[Operand, Planes]:
    """`read_at_once` of a backward that quantizes x, the activation and the weights again: the planes for gradients.

    first   that of the whole layer. A postponed weight gradient reads columns of x later, as it does those of dy
    """
    _, of_wgrad = first["dy"]
    return {**first, "x": (False, of_wgrad), "w": (False, True)}


class MlpPlan:
    """What one call of a grouped MLP runs, for one dtype, device, pair of weight shapes and set of gradients.

    Printable: one line per operation.

    fc1, fc2    the two layers. fc1's result has x's dtype, whatever the recipe's output_dtype
    act, dact   the quantizers around the activation: fused with it, or composed
    prepare     prepares group sizes for everything here; None: they are taken as they are
    recorder    writes down the launches of a pass; None where backends are several, or the one has none, or a pass does
                more than launch: it draws seeds, or computes an activation by torch's operations
    recorded_calls   the passes of calls that are written down
    at_once     the planes that are read in the pass that quantizes them, of both layers
    """

    __slots__ = (
        "_interleaved",
        "_leaving",
        "act",
        "activation",
        "at_once",
        "dact",
        "fc1",
        "fc2",
        "prepare",
        "recipe",
        "recorded_calls",
        "recorder",
    )

    def __init__(
        self,
        recipe: Recipe,
        activation: Activation,
        fc1: Layer,
        fc2: Layer,
        at_once: Mapping[Operand, Planes],
    ) -> None:
        self.recipe, self.activation, self.at_once = recipe, activation, at_once
        self.fc1, self.fc2 = fc1, fc2 = fc1.reading_at_once(at_once), fc2.reading_at_once(at_once)
        self.act = activation_quantizer(fc2, activation)
        self.dact = gradient_quantizer(fc1, activation)
        fused = [part.plan.prepare for part in (self.act, self.dact) if part.plan]
        self.prepare = shared_prepare([fc1.prepare, fc2.prepare, *fused])
        self._leaving: dict[int, MlpPlan] = {}
        self._interleaved: dict[int, MlpPlan] = {}
        self.recorder = self._recorder()
        self.recorded_calls: Kinds[SavedByName] = Kinds()

    def _recorder(self) -> MakeRecorder[Tensor] | None:
        fc1, fc2 = self.fc1, self.fc2
        alone = len({plan.backend for plan in plans_of(self)}) == 1
        if not alone or fc1.needs_seed or fc2.needs_seed or any(part.plan is None for part in self.fused.values()):
            return None
        return fc1.plan.fprop.bound.recorder

    def leaving(self, multiprocessors: int) -> MlpPlan:
        """A copy whose GEMMs leave so many multiprocessors free, see Room; self on a CPU, and for 0."""
        fc1, fc2 = self.fc1.leaving(multiprocessors), self.fc2.leaving(multiprocessors)
        if fc1 is self.fc1 and fc2 is self.fc2:
            return self
        plan = self._leaving.get(multiprocessors)
        if plan is None:
            plan = self._leaving[multiprocessors] = self._of(fc1, fc2)
        return plan

    def interleaved(self, block: int) -> MlpPlan:
        """This plan for a w1 whose gate and up rows alternate in blocks of `block` rows, see Layer; self for 0."""
        if not block:
            return self
        plan = self._interleaved.get(block)
        if plan is None:
            fc1 = self.fc1.interleaved(block)
            plan = self._interleaved[block] = self._of(fc1, self.fc2)
        return plan

    def _of(self, fc1: Layer, fc2: Layer) -> MlpPlan:
        """This plan with these layers in the place of its own."""
        return MlpPlan(self.recipe, self.activation, fc1, fc2, self.at_once)

    @property
    def fused(self) -> dict[str, Fused]:
        """What stands between the two layers, by name: "activation", and where it is computed "gradient"."""
        between = {"activation": self.act}
        return between | {"gradient": self.dact} if self.fc1.need_dx or self.fc1.need_dw else between

    def __str__(self) -> str:
        lines = ["fc1", *_indented(self.fc1.plan), f"{self.activation}{_quantize(self.act)}: {self.act}"]
        if "gradient" in self.fused:
            lines.append(f"{self.activation}'s gradient + bias gradient{_quantize(self.dact)}: {self.dact}")
        return "\n".join([*lines, "fc2", *_indented(self.fc2.plan)])


def plans_of(plan: MlpPlan) -> Iterator[Plan]:
    """The registry's plans of everything that the MLP runs."""
    for layer in (plan.fc1, plan.fc2):
        yield from layer.needed.values()
        yield from layer.quantizers.values()
    yield from (part.plan for part in (plan.act, plan.dact) if part.plan is not None)


def _quantize(part: Fused) -> str:
    return " + quantize" if part.codes else ""


def _indented(plan: object) -> list[str]:
    return [f"  {line}" for line in str(plan).splitlines()]


_plans: Memo[MlpPlan] = Memo()


def mlp_plan_for(
    recipe: Recipe,
    activation: Activation,
    x: Tensor,
    w1: Tensor,
    w2: Tensor,
    at_host: bool,
    needed: RequiredGradients,
    backend: str | tuple[str, ...] | None,
) -> MlpPlan:
    """The plan for operands that fit together, remembered by the recipe's identity: a recipe does not change."""
    graph_safe = wants_graph(x)
    shapes = *map(int, w1.shape), *map(int, w2.shape), order_of(w1), order_of(w2)  # see layer_for
    key = (
        id(recipe), activation, x.dtype, x.device, shapes, at_host, needed.x, needed.w1, needed.w2,
        needed.da, needed.postponed, backend, graph_safe,
    )  # fmt: skip

    def resolve() -> MlpPlan:
        check_recipe(recipe)
        # the activation reads fc1's result in x's dtype
        inner = recipe if recipe.output_dtype in (None, DTYPE_NAMES[x.dtype]) else with_output_dtype(recipe, None)
        fc1 = layer_for(inner, x, w1, at_host, needed.x, needed.w1, backend, graph_safe)
        fc2 = layer_for(recipe, x, w2, at_host, needed.da, needed.w2, backend, graph_safe)
        return MlpPlan(recipe, activation, fc1, fc2, read_at_once(postponed=needed.postponed))

    return _plans.get(key, resolve, recipe)
