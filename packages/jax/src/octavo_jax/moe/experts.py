"""The grouped MLP between permutation and combination."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from jax import Array
from jax.typing import DTypeLike

from octavo.quantizer import DEFAULT_CHECKPOINT_NAME
from octavo_jax.arrays.checks import check_arrays
from octavo_jax.arrays.dtypes import element_type
from octavo_jax.arrays.recipes import RecipeLike, as_recipe
from octavo_jax.dispatch.backends import BackendNames
from octavo_jax.dispatch.room import Room
from octavo_jax.functions.activations import check_activation
from octavo_jax.linear.arguments import as_array
from octavo_jax.mlp.autograd import MlpArrays
from octavo_jax.mlp.call import MlpOptions, resolve_call
from octavo_jax.mlp.mlp import OutputNames, States, grouped_mlp
from octavo_jax.moe.arrangement import Routing, check_routing
from octavo_jax.moe.layer.autograd import MoeArrays, octavo_moe
from octavo_jax.moe.layer.forms import Form, WeightCodes, WeightsOn, check_form, check_weight_codes, check_weights_on
from octavo_jax.moe.layer.plan import moe_plan_of
from octavo_jax.moe.layer.residuals import RowOrder
from octavo_jax.moe.permutation import check_tokens, combine, permute, row_weights
from octavo_jax.quantizers.derivatives import call_reverse_mode_only
from octavo_jax.sharding.axes import MeshAxes, roles_in_force
from octavo_jax.sharding.placement import Placement, mesh_of
from octavo_registry.contract.cards import Activation


def routed_mlp(
    x: Array,
    routing: Routing,
    wi: Array,
    wo: Array,
    *,
    activation: Activation = "swiglu",
    recipe: RecipeLike,
    weights_on: WeightsOn = "activation",
    bi: Array | None = None,
    bo: Array | None = None,
    seed: int | Array | None = None,
    state: States | None = None,
    checkpoint_name: str | None = DEFAULT_CHECKPOINT_NAME,
    output_checkpoint_names: OutputNames = (None, None),
    preferred_element_type: DTypeLike | None = None,
    sharding: MeshAxes | None = None,
    form: Form = "standard",
    weight_codes: WeightCodes = "keep",
    backend: BackendNames = None,
    room: Room | None = None,
) -> Any:
    """x [T, K] through the experts that `routing` names: permute, `octavo_jax.grouped_mlp`, combine.

    weights_on               "output" weighs what the experts return; "activation" what goes into wo, and bo
                             apart, after which the backward pass needs no output of an expert: neither its memory nor,
                             under remat, its GEMM
    form                     what is kept for the backward pass. "standard": x, fc1's result of each choice and, with
                             the weights on the output, the experts' results. "keep_all": operands of the kernels'
                             gradients, too, so that the backward pass makes none again. "recompute": x alone, and with
                             weight_codes="keep" also wi's codes for fprop. "lean": as "standard", fc1's result as E4M3
                             codes with a scale for every 128 of a row; gradients' bits are then not those of the
                             others, see octavo_numerics.keep_rows
    weight_codes             of the kernels, the codes that the backward pass reads: "keep" them, or "remake" them there
    preferred_element_type   dtype of y, in which the experts' outputs are rounded once after the sum; None: x's

    The other arguments are those of `octavo_jax.grouped_mlp`. Returns y [T, N], and with a state (y, new state).
    """
    check_routing(routing)
    check_arrays(x=x, wi=wi, wo=wo)
    x, wi, wo = as_array("x", x), as_array("wi", wi), as_array("wo", wo)
    check_experts(x, weights_on)
    check_tokens(x, routing)
    form, weight_codes = check_form(form), check_weight_codes(weight_codes)
    sharding = roles_in_force(sharding)
    options = MlpOptions(
        activation=check_activation(activation),
        recipe=as_recipe(recipe),
        seed=seed,
        state=state,
        group_offset=0,
        checkpoint_name=checkpoint_name,
        output_checkpoint_names=output_checkpoint_names,
        preferred_element_type=None,
        sharding=sharding,
        backend=backend,
        room=room,
    )
    out_dtype = element_type(preferred_element_type, x.dtype)
    mlp_arrays = MlpArrays(x=x, gamma=None, beta=None, wi=wi, wo=wo, bi=bi, bo=bo, probs=None)
    if needs_composition(sharding, x, wo):
        check_form_of_composition(
            form, weight_codes, "rows that a mesh cuts outside of jax.shard_map, or experts along tp,"
        )
        return _run_composed(x, routing, mlp_arrays, weights_on, out_dtype, options)
    call = resolve_call(mlp_arrays, routing.group_sizes, options, len(routing.order))
    plan = moe_plan_of(call.mlp, form, weight_codes, weights_on, out_dtype)
    a = call.arrays
    arrays = MoeArrays(a.x, routing.weights, a.wi, a.wo, a.bi, a.bo)
    row_order = RowOrder(routing.order, routing.position)
    y, new_state = call_reverse_mode_only("routed_mlp", octavo_moe, plan, arrays, row_order, call.states, call.context)
    return y if state is None else (y, new_state)


def _run_composed(
    x: Array, routing: Routing, a: MlpArrays, weights_on: WeightsOn, out_dtype: DTypeLike, options: MlpOptions
) -> Any:
    """`routed_mlp` as permute, grouped_mlp and combine, with the same bits; a mesh may shard each in its own way."""
    on_output = weights_on == "output"
    probs = None if on_output else row_weights(routing)
    result = grouped_mlp(
        permute(x, routing, backend=options.backend),
        a.wi,
        a.wo,
        routing.group_sizes,
        bi=a.bi,
        bo=a.bo,
        bo_scales=None if a.bo is None else probs,
        probs=probs,
        **options._asdict(),
    )
    rows, *new_state = result if options.state is not None else (result,)
    y = combine(rows, routing, weighted=on_output, preferred_element_type=out_dtype, backend=options.backend)
    return (y, *new_state) if new_state else y


def needs_composition(sharding: MeshAxes | None, x: Array, wo: Array) -> bool:
    """Whether rows are permuted, multiplied and combined by separate functions: if a mesh cuts rows of this call, or
    the experts' results are summed over shards first."""
    if sharding is None or not sharding.every:
        return False
    placement = Placement(sharding, mesh_of(x, wo), ())
    return placement.route != "manual" or bool(placement.shard_count(sharding.names("tp")) > 1)


def check_form_of_composition(form: Form, weight_codes: WeightCodes, what: str) -> None:
    """ValueError for forms that only the one function from tokens to tokens has; `what` is composed of others."""
    if form in ("lean", "recompute") or weight_codes == "remake":
        raise ValueError(
            f"form is {form!r} and weight_codes {weight_codes!r}; {what} are kept as octavo_jax.grouped_mlp keeps "
            "them, so leave both out, or use jax.checkpoint"
        )


def check_experts(x: Array, weights_on: WeightsOn) -> None:
    """ValueError unless x is [T, K], and for a place of the weights that is none."""
    if x.ndim != 2:
        raise ValueError(f"x has shape {list(x.shape)}; it is [T, K], one row per token, with leading axes flattened")
    check_weights_on(weights_on)


@dataclass(frozen=True)
class LocalExperts:
    """The experts of one device, and how rows go through them.

    wi, wo, bi, bo                   [G, K, C], [G, F, N], [G, C] and [G, N]
    weights_on, form, weight_codes   as in `routed_mlp`
    out_dtype                        of y
    options                          of both layers; fc2's result has no dtype of its own
    """

    wi: Array
    wo: Array
    bi: Array | None
    bo: Array | None
    weights_on: WeightsOn
    form: Form
    weight_codes: WeightCodes
    out_dtype: DTypeLike
    options: MlpOptions

    @property
    def number(self) -> int:
        """G."""
        return int(self.wi.shape[0])

    def routed(self, x: Array, routing: Routing) -> tuple[Array, States | None]:
        """`routed_mlp`: y [T, N] of tokens, and the new state or None."""
        options = self.options
        result = routed_mlp(
            x,
            routing,
            self.wi,
            self.wo,
            activation=options.activation,
            recipe=options.recipe,
            weights_on=self.weights_on,
            bi=self.bi,
            bo=self.bo,
            seed=options.seed,
            state=options.state,
            checkpoint_name=options.checkpoint_name,
            output_checkpoint_names=options.output_checkpoint_names,
            preferred_element_type=self.out_dtype,
            sharding=options.sharding,
            form=self.form,
            weight_codes=self.weight_codes,
            backend=options.backend,
            room=options.room,
        )
        return self._with_state(result)

    def grouped(self, rows: Array, group_sizes: Array, probs: Array | None) -> tuple[Array, States | None]:
        """`octavo_jax.grouped_mlp` of rows that are sorted by expert, and the new state or None."""
        check_form_of_composition(self.form, self.weight_codes, "rows of a ragged exchange")
        result = grouped_mlp(
            rows,
            self.wi,
            self.wo,
            group_sizes,
            probs=probs,
            bi=self.bi,
            bo=self.bo,
            bo_scales=None if self.bo is None else probs,
            **self.options._asdict(),
        )
        return self._with_state(result)

    def _with_state(self, result: Any) -> tuple[Array, States | None]:
        return (result, None) if self.options.state is None else result
