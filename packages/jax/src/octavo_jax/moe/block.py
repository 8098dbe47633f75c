"""The whole block: router, rows by expert, grouped MLP, and back."""

from __future__ import annotations

from typing import Any, TypeVar

import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

from octavo.quantizer import DEFAULT_CHECKPOINT_NAME
from octavo.renamed import renamed_arguments
from octavo.router import RouterRule, Score
from octavo_jax.arrays.checks import check_arrays, check_fixed_axes
from octavo_jax.arrays.dtypes import dtype_name, element_type
from octavo_jax.arrays.recipes import RecipeLike, as_recipe
from octavo_jax.arrays.sizes import as_int32
from octavo_jax.dispatch.backends import BackendNames, hashable
from octavo_jax.dispatch.room import Room
from octavo_jax.linear.arguments import as_array
from octavo_jax.mlp.mlp import OutputNames, States
from octavo_jax.moe.exchange import DEFAULT_EXCHANGE, Exchange
from octavo_jax.moe.layer.forms import Form, WeightCodes, WeightsOn, check_form, check_weight_codes
from octavo_jax.moe.local_block import BlockArrays, BlockResult, MoeBlock
from octavo_jax.moe.router.checks import check_bias
from octavo_jax.moe.router.rule import RULE, checked_rule
from octavo_jax.moe.sharded_block import manual_expert_shards, run_over_mesh
from octavo_jax.sharding.axes import MeshAxes, roles_in_force
from octavo_jax.sharding.conflicts import check_has_roles
from octavo_registry.contract.cards import Activation

Block = TypeVar("Block", bound=MoeBlock)


@renamed_arguments(normalize="renormalize")
def moe_mlp(
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
    choice_bias: Array | None = None,
    replay: Array | None = None,
    weights_on: WeightsOn = "activation",
    mask: Array | None = None,
    dtype: DTypeLike | None = None,
    bi: Array | None = None,
    bo: Array | None = None,
    seed: int | Array | None = None,
    state: States | None = None,
    checkpoint_name: str | None = DEFAULT_CHECKPOINT_NAME,
    output_checkpoint_names: OutputNames = (None, None),
    preferred_element_type: DTypeLike | None = None,
    sharding: MeshAxes | None = None,
    exchange: Exchange = DEFAULT_EXCHANGE,
    form: Form = "standard",
    weight_codes: WeightCodes = "keep",
    backend: BackendNames = None,
    room: Room | None = None,
) -> Any:
    """A Mixture-of-Experts block: each token through the k experts that its router scores highest, weighted and summed.

    x           [..., K] tokens, bf16, fp16 or fp32, as are all other arrays but masks and integers
    router      [K, E]; the product with x is taken in their common dtype and accumulated in float32. Float32 is not
                multiplied as TF32 unless `jax.default_matmul_precision` asks for it
    wi          [E, K, C]; C = 2 F, the gate first, where the activation is gated, else F
    wo          [E, F, N]
    bi, bo      their biases [E, C] and [E, N], or None
    score, groups, kept_groups, renormalize, scale   how the router chooses, as in `octavo_jax.choose_experts`
    choice_bias [E], added to the scores for choosing alone: raise it for experts with few rows, which the statistics
                have. Weights are without it, and it has no gradient
    replay      integers [..., k], x's leading axes: choices that were made before, in place of the router's. A choice
                outside of 0 to E - 1 goes to no expert
    weights_on, form, weight_codes   as in `routed_mlp`. Every form gives y the same bits, and every form but "lean"
                the gradients, too. The exceptions: XLA sums the gradients of the biases, the choices' weights and the
                router, in an order that differs from program to program; and if a recipe leaves fprop in high precision
                and quantizes wgrad, a kernel computes y's activation in "keep_all" and XLA in other forms. Last bits
                may differ there
    mask        [...] bool, x's leading axes: False for tokens that are dropped, such as padding. They add no row to a
                GEMM, may hold anything, and come back as zeros
    dtype       of the rows, wi, wo and the biases in the experts; the router sees x as it is. None: as they are
    preferred_element_type   dtype of y; None: x's

    The other arguments are those of `octavo_jax.grouped_mlp`; `checkpoint_name` is the routing's, too.

    Nothing is dropped and no shape depends on the router: there are T * k rows, and the sizes stay on the device.

    Returns (y [..., N], `RouterStats`), and with a state (y, `RouterStats`, new state). Differentiable in x, router,
    wi, wo and the biases. Raises ValueError for arguments that do not fit, NoBackendError when nothing serves them.
    """
    given = BlockArrays(
        x=x, mask=mask, router=router, wi=wi, wo=wo, bi=bi, bo=bo, seed=seed, state=state,
        choice_bias=choice_bias, replay=replay,
    )  # fmt: skip
    arrays, sharding = check_block_arguments(given, dtype, sharding, exchange)
    block = block_of(
        MoeBlock,
        arrays,
        recipe=recipe,
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
        checkpoint_name=checkpoint_name,
        output_checkpoint_names=output_checkpoint_names,
        room=room,
        sharding=sharding,
        exchange=exchange,
    )
    result = run_block(block, _with_int32_replay(arrays, block.rule))
    return (result.y, result.stats) if state is None else tuple(result)


def block_of(
    kind: type[Block],
    arrays: BlockArrays,
    *,
    recipe: RecipeLike,
    preferred_element_type: DTypeLike | None,
    backend: BackendNames,
    form: Form,
    weight_codes: WeightCodes,
    **others: Any,
) -> Block:
    """A block of class `kind` with `moe_mlp`'s static arguments; ValueError for those that do not fit."""
    rule = {name: others.pop(name) for name in RULE}
    return kind(
        rule=checked_rule(arrays.router.shape[1], **rule),
        recipe=as_recipe(recipe),
        out_dtype=element_type(preferred_element_type, arrays.x.dtype),
        backend=hashable(backend),
        form=check_form(form),
        weight_codes=check_weight_codes(weight_codes),
        **others,
    )


def run_block(block: MoeBlock, arrays: BlockArrays) -> BlockResult:
    """The block over the mesh, if there is one, or of these arrays as they are."""
    on_mesh = block.sharding is not None and block.sharding.every
    return run_over_mesh(block, arrays) if on_mesh else block.run(arrays)


def check_block_arguments(
    a: BlockArrays, dtype: DTypeLike | None, sharding: MeshAxes | None, exchange: Exchange
) -> tuple[BlockArrays, MeshAxes | None]:
    """`moe_mlp`'s arrays as JAX's, and the axes in force; ValueError for arguments that do not fit."""
    mask = a.mask
    optional = {name: getattr(a, name) for name in ("mask", "choice_bias", "replay")}
    present = {name: array for name, array in optional.items() if array is not None}
    check_arrays(x=a.x, router=a.router, wi=a.wi, wo=a.wo, **present)
    x, router, wi, wo = (as_array(name, getattr(a, name)) for name in ("x", "router", "wi", "wo"))
    check_fixed_axes("x", x.shape)
    check_fixed_axes("router", router.shape)
    bi, bo = None if a.bi is None else as_array("bi", a.bi), None if a.bo is None else as_array("bo", a.bo)
    choice_bias = None if a.choice_bias is None else as_array("choice_bias", a.choice_bias)
    if not isinstance(exchange, Exchange):
        raise ValueError(f"exchange is a {type(exchange).__name__}; give an octavo_jax.moe.Exchange")
    if dtype is not None:
        dtype_name(dtype, "dtype")
    of_floats = {"x": x, "router": router, "wi": wi, "wo": wo, "bi": bi, "bo": bo}
    for name, array in of_floats.items():
        if array is not None:
            dtype_name(array.dtype, name)
    if x.ndim == 0 or router.ndim != 2 or 0 in router.shape or router.shape[0] != x.shape[-1]:
        raise ValueError(
            f"x has shape {list(x.shape)} and router {list(router.shape)}; they are [..., K] and [K, E], with K and E "
            "of one or more"
        )
    sharding = roles_in_force(sharding)
    check_has_roles("moe_mlp", sharding, x=x, router=router, wi=wi, wo=wo, bi=bi, bo=bo)
    experts = router.shape[1] // manual_expert_shards(sharding)
    if wi.ndim != 3 or wi.shape[0] != experts:
        raise ValueError(
            f"router {list(router.shape)} has {router.shape[1]} experts and wi has shape {list(wi.shape)}; "
            f"give wi [{experts}, K, C]"
        )
    if mask is not None:
        mask = as_array("mask", mask)
        if mask.shape != x.shape[:-1] or mask.dtype != jnp.bool_:
            raise ValueError(
                f"mask has shape {list(mask.shape)} and dtype {mask.dtype}, and x {list(x.shape)}; give bool "
                f"{list(x.shape[:-1])}, False for tokens that are left out"
            )
    return a._replace(x=x, mask=mask, router=router, wi=wi, wo=wo, bi=bi, bo=bo, choice_bias=choice_bias), sharding


def _with_int32_replay(a: BlockArrays, rule: RouterRule) -> BlockArrays:
    """`a` with `replay` in int32; ValueError unless that and `choice_bias` fit the tokens and experts."""
    check_bias("choice_bias", a.choice_bias, a.router.shape[1])
    if a.replay is None:
        return a
    wanted = (*a.x.shape[:-1], rule.k)
    if a.replay.shape != wanted or not jnp.issubdtype(a.replay.dtype, jnp.integer):
        raise ValueError(
            f"replay has shape {list(a.replay.shape)} and dtype {a.replay.dtype}; give integers {list(wanted)}, the "
            "expert of each choice"
        )
    return a._replace(replay=as_int32(a.replay))
