"""explain: what a MoE block runs, which rows are quantized from the tokens, and how these reach other devices."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import jax
from jax import Array, lax
from jax.typing import DTypeLike

from octavo import DelayedScaling
from octavo.quantizer import Operand
from octavo.recipe_base import Gemm
from octavo.router import Score
from octavo_jax.arrays.checks import check_arrays
from octavo_jax.arrays.dtypes import DTYPES
from octavo_jax.arrays.recipes import RecipeLike, as_recipe
from octavo_jax.dispatch.backends import BackendNames
from octavo_jax.dispatch.device import device_of
from octavo_jax.dispatch.fused import describe_fusion, describe_values
from octavo_jax.dispatch.layer import Layer
from octavo_jax.dispatch.room import Room
from octavo_jax.mlp.autograd import MlpArrays
from octavo_jax.mlp.call import resolve_call
from octavo_jax.mlp.plan import Mlp
from octavo_jax.moe.arrangement import Routing
from octavo_jax.moe.block import block_of, check_block_arguments, run_block
from octavo_jax.moe.exchange import DEFAULT_EXCHANGE, Exchange, Way
from octavo_jax.moe.expert_parallel import WITHOUT_RAGGED_ALL_TO_ALL, chosen_way
from octavo_jax.moe.experts import LocalExperts, needs_composition
from octavo_jax.moe.layer.forms import Form, WeightCodes, WeightsOn
from octavo_jax.moe.layer.plan import MoePlan, moe_plan_of
from octavo_jax.moe.layer.tokens import dy_sources, gathers, gathers_codes, quantizes_tokens
from octavo_jax.moe.local_block import BlockArrays, MoeBlock
from octavo_jax.moe.row_functions import DeviceAndBackends, router_fields
from octavo_jax.scaling.delayed_state import init_delayed
from octavo_jax.sharding.axes import MeshAxes
from octavo_registry import LayerPlan, Plan, QuantizePlan
from octavo_registry.contract.cards import Activated, Activation
from octavo_registry.contract.plan import table


@dataclass(frozen=True)
class MoeReport:
    """What a MoE block runs on each device. Printable: a line for each operation.

    fc1, fc2   the registry's plans; every `Plan` of `plans` has each backend's verdict in `decisions`
    between    pairs: the activation, its gradient, and who fuses it with a quantizer, or why nobody does
    tokens     pairs: what x and dy are read for, and whether rows of them are permuted first and why
    exchange   "gather" or "ragged" and why, where mesh axes spread the experts; "" where none do
    """

    fc1: LayerPlan
    fc2: LayerPlan
    between: tuple[tuple[str, str], ...]
    tokens: tuple[tuple[str, str], ...]
    exchange: str

    def __str__(self) -> str:
        lines = ["router, route, permute and combine: JAX's operations, in float32 where they add"]
        lines += ["fc1", *_indented(self.fc1), *(f"{name}: {how}" for name, how in self.between)]
        lines += ["fc2", *_indented(self.fc2), "tokens", table(self.tokens)]
        return "\n".join([*lines, f"exchange: {self.exchange}"] if self.exchange else lines)


def explain(
    x: Array,
    router: Array,
    wi: Array,
    wo: Array,
    *,
    k: int,
    activation: Activation = "swiglu",
    recipe: RecipeLike,
    score: Score = "softmax",
    groups: int = 1,
    kept_groups: int = 1,
    renormalize: bool = True,
    scale: float = 1.0,
    weights_on: WeightsOn = "activation",
    dtype: DTypeLike | None = None,
    bi: Array | None = None,
    bo: Array | None = None,
    preferred_element_type: DTypeLike | None = None,
    sharding: MeshAxes | None = None,
    exchange: Exchange = DEFAULT_EXCHANGE,
    form: Form = "standard",
    weight_codes: WeightCodes = "keep",
    backend: BackendNames = None,
    room: Room | None = None,
) -> MoeReport:
    """What `octavo_jax.moe.moe_mlp` of these arguments would run, forward and backward; it is traced, not computed.

    Works where that call would: on arrays, traced or not, under `jax.set_mesh`, inside `jax.shard_map`. Raises its
    errors.
    """
    check_arrays(x=x, router=router, wi=wi, wo=wo)
    known = as_recipe(recipe)
    state = None
    if isinstance(known, DelayedScaling):
        state = init_delayed(known, wi.shape[0]), init_delayed(known, wi.shape[0])
    seed = 0 if known is not None and known.stochastic else None
    given = BlockArrays(x=x, mask=None, router=router, wi=wi, wo=wo, bi=bi, bo=bo, seed=seed, state=state)
    arrays, sharding = check_block_arguments(given, dtype, sharding, exchange)
    block = block_of(
        _ReportingBlock,
        arrays,
        recipe=known,
        preferred_element_type=preferred_element_type,
        backend=backend,
        form=form,
        weight_codes=weight_codes,
        k=k,
        score=score,
        groups=groups,
        kept_groups=kept_groups,
        renormalize=renormalize,
        scale=scale,
        activation=activation,
        weights_on=weights_on,
        dtype=dtype,
        checkpoint_name=None,
        output_checkpoint_names=(None, None),
        room=room,
        sharding=sharding,
        exchange=exchange,
    )
    jax.eval_shape(lambda: run_block(block, arrays))
    return block.reports[-1]


@dataclass(frozen=True)
class _ReportingBlock(MoeBlock):
    """A block that reports what each device runs, while it is traced."""

    reports: list[MoeReport] = field(default_factory=list)

    def local_experts(self, a: BlockArrays) -> LocalExperts:
        return _ReportingExperts(**vars(super().local_experts(a)), block=self)

    def describe_exchange(self, x: Array) -> str:
        """The way, and why it is that one; "" where the experts are not spread. Inside a manual region."""
        axes = () if self.sharding is None else self.sharding.names("ep")
        if not axes:
            return ""
        devices, platform = lax.axis_size(axes), device_of(x).kind
        way = chosen_way(self.exchange, self.rule.k, devices, platform)
        if self.exchange.way is not None:
            why = f'Exchange(way="{way}") asks for it'
        elif platform in WITHOUT_RAGGED_ALL_TO_ALL:
            why = f"tokens are on {platform}, whose XLA has no ragged_all_to_all"
        else:
            why = f"a token has {self.rule.k} choices, and {list(axes)} has {devices} devices"
        return f"{way}, {_WAYS[way]}: {why}"


_WAYS: dict[Way, str] = {
    "gather": "every token to every device and one partial sum back",
    "ragged": "each choice to its expert's device and its row back",
}


@dataclass(frozen=True)
class _ReportingExperts(LocalExperts):
    block: _ReportingBlock

    def routed(self, x: Array, routing: Routing) -> Any:
        whole = "a mesh cuts them, or sums stand behind the experts"
        why = whole if needs_composition(self.options.sharding, x, self.wo) else ""
        self._report(x, routing.group_sizes, len(routing.order), why)
        return super().routed(x, routing)

    def grouped(self, rows: Array, group_sizes: Array, probs: Array | None) -> Any:
        self._report(rows, group_sizes, len(rows), "a ragged exchange sends them")
        return super().grouped(rows, group_sizes, probs)

    def _report(self, x: Array, group_sizes: Array, rows: int, why_rows: str) -> None:
        """why_rows: rows of x and dy are permuted, whatever reads them, for this reason; "": where they need to be."""
        arrays = MlpArrays(x, None, None, self.wi, self.wo, self.bi, self.bo, None)
        call = resolve_call(arrays, group_sizes, self.options, rows)
        plan = moe_plan_of(call.mlp, self.form, self.weight_codes, self.weights_on, self.out_dtype).for_training()
        of_rows = [("x and dy", f"rows are permuted first: {why_rows}")] if why_rows else [*_tokens(plan)]
        tokens = (*self._routed(x), *of_rows, *_moved(plan))
        fc1, fc2 = plan.mlp.fc1.plan, plan.mlp.fc2.plan
        between = tuple(_between(plan.mlp))
        self.block.reports.append(MoeReport(fc1, fc2, between, tokens, self.block.describe_exchange(x)))

    def _routed(self, x: Array) -> Iterator[tuple[str, str]]:
        axes = () if self.block.sharding is None else self.block.sharding.names("ep")
        experts = self.number * (lax.axis_size(axes) if axes else 1)
        where = DeviceAndBackends.of(x, self.block.backend)
        router = where.plan("choose_experts", "float32", experts, **router_fields(self.block.rule))
        yield "experts", f"{_who(router)} chooses"
        yield "choices", f"{_who(where.plan('route', 'float32', experts))} sorts them"


def _who(plan: Plan | None) -> str:
    return "XLA" if plan is None else plan.backend


def _moved(plan: MoePlan) -> Iterator[tuple[str, str]]:
    """Who sums rows by token, and multiplies dy by the weights of choices, as octavo_jax.moe.permutation has it."""
    fc2, dtype = plan.mlp.fc2, DTYPES[plan.mlp.fc2.y_dtype]
    where = DeviceAndBackends(fc2.request.device, fc2.options.backend)
    summed = where.plan("combine_rows", dtype) if plan.out_dtype == fc2.y_dtype else None
    yield "y and dx", f"{_who(summed)} sums rows by token"
    if plan.weights_on == "output":
        yield "dy times weights", f"{_who(where.plan('permute_rows', dtype))} writes its rows"


def _between(mlp: Mlp) -> Iterator[tuple[str, str]]:
    fc1, fc2, backend = mlp.fc1.plan, mlp.fc2.plan, mlp.fc1.options.backend
    parts: tuple[tuple[Activated, str, LayerPlan, QuantizePlan | None], ...] = (
        ("act_quantize", mlp.activation, fc2, fc2.quantize_x),
        ("dact_quantize", f"{mlp.activation}'s gradient", fc1, fc1.quantize_dy),
    )
    for op, name, layer, quantizer in parts:
        if quantizer is None:
            yield name, describe_values(layer, op, mlp.activation, backend)
        else:
            yield f"{name} + quantize", describe_fusion(quantizer, op, mlp.activation, backend)


def _tokens(plan: MoePlan) -> Iterator[tuple[str, str]]:
    """What of the tokens is read in place, as octavo_jax.moe.layer.autograd has it."""
    keeps_all, forward, again = plan.form == "keep_all", plan.forward_mlp.fc1, plan.backward_mlp.fc1
    of_forward: tuple[Gemm, ...] = ("fprop", "wgrad") if keeps_all else ("fprop",)
    if gathers_codes(forward, "x", "fprop"):
        yield "x in fprop", _gathered_codes(forward, "x", "fprop")
    elif gathers(forward, "x", "fprop"):
        yield "x in fprop", _gathered(forward, "fprop")
    else:
        yield "x in fprop", _read(forward, "x", of_forward)
    if gathers(again, "x", "wgrad"):
        yield "x in wgrad", _gathered(again, "wgrad")
    elif keeps_all:
        yield "x in wgrad", 'kept from forward: form is "keep_all"'
    else:
        yield "x in wgrad", _read(again, "x", ("wgrad",))
    yield "dy", _dy(plan)


def _dy(plan: MoePlan) -> str:
    fc2 = plan.mlp.fc2
    if plan.weights_on == "output":
        return 'rows are permuted first: weights_on is "output", so the choices\' weights multiply them'
    sources = dy_sources(fc2)
    if set(sources.values()) == {"tokens"}:
        return _gathered(fc2, "dgrad")
    said = []
    for gemm, source in sources.items():
        if source == "tokens":
            said.append(f"{_backend(fc2, gemm)} reads the tokens in {gemm}")
        elif source == "codes of tokens":
            said.append(_gathered_codes(fc2, "dy", gemm))
    rows = tuple(gemm for gemm, source in sources.items() if source == "rows")
    if rows:
        how = _read(fc2, "dy", rows)
        said.append(f"for {rows[0]} {how}" if said else how)
    return "; ".join(said)


def _gathered(layer: Layer, gemm: Gemm) -> str:
    return f"{_backend(layer, gemm)} reads the tokens in its product"


def _gathered_codes(layer: Layer, operand: Operand, gemm: Gemm) -> str:
    once = layer.quantizer_of_tokens(operand)
    return f"{once.backend} quantizes each token once, and {_backend(layer, gemm)} reads its codes in {gemm}"


def _backend(layer: Layer, gemm: Gemm) -> str:
    plan = dict(layer.plan.gemms)[gemm]
    assert plan is not None  # of a product that is computed
    return plan.backend


def _read(layer: Layer, operand: Operand, gemms: tuple[Gemm, ...]) -> str:
    quantizer = layer.quantizer(operand)
    if quantizes_tokens(layer, operand, gemms):
        assert quantizer is not None
        return f"{quantizer.backend} quantizes the tokens"
    wide = [gemm for gemm in gemms if not layer.plan.recipe.quantizes(gemm)]
    if wide or quantizer is None:
        why = f"{' and '.join(wide or gemms)} read{'' if len(wide or gemms) > 1 else 's'} them in high precision"
    elif quantizer.bound.of_tokens is None:
        why = f"{quantizer.backend}'s quantizer takes no tokens"
    else:
        why = "a mesh cuts them"
    return f"rows are permuted first: {why}"


def _indented(plan: LayerPlan) -> list[str]:
    return [f"  {line}" for line in str(plan).splitlines()]
