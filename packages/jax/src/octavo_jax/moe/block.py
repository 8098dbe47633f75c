"""The whole block: router, rows by expert, grouped MLP, and back."""

from __future__ import annotations

from typing import Any, Literal

import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

from octavo import Recipe
from octavo.quantizer import DEFAULT_CHECKPOINT_NAME
from octavo_jax.dispatch import Names
from octavo_jax.mlp import OutputNames, States, grouped_mlp
from octavo_jax.moe.permutation import combine, permute, row_weights
from octavo_jax.moe.routing import Routing, route, router_stats
from octavo_registry.cards import Activation

WeightsOn = Literal["output", "activation"]


def routed_mlp(
    x: Array,
    routing: Routing,
    wi: Array,
    wo: Array,
    *,
    activation: Activation = "swiglu",
    recipe: Recipe | None,
    weights_on: WeightsOn = "output",
    bi: Array | None = None,
    bo: Array | None = None,
    seed: int | Array | None = None,
    state: States | None = None,
    checkpoint_name: str | None = DEFAULT_CHECKPOINT_NAME,
    output_checkpoint_names: OutputNames = (None, None),
    preferred_element_type: DTypeLike | None = None,
    backend: Names = None,
) -> Any:
    """x [T, K] through the experts that `routing` names: permute, `octavo_jax.grouped_mlp`, combine.

    weights_on               "output" weighs what the experts return; "activation" what goes into wo, after which the
                             backward pass needs no output of an expert: neither its memory nor, under remat, its GEMM
    preferred_element_type   dtype of y, in which the experts' outputs are rounded once after the sum; None: x's

    The other arguments are those of `octavo_jax.grouped_mlp`. Returns y [T, N], and with a state (y, new state).
    """
    if x.ndim != 2:
        raise ValueError(f"x has shape {list(x.shape)}; it is [T, K], one row a token, with leading axes flattened")
    if weights_on not in ("output", "activation"):
        raise ValueError(f"weights_on is {weights_on!r}; it is 'output' or 'activation'")
    on_output = weights_on == "output"
    if bo is not None and not on_output:
        raise ValueError("bo was given and weights_on is 'activation', which would add it unweighted; use 'output'")
    result = grouped_mlp(
        permute(x, routing),
        wi,
        wo,
        routing.group_sizes,
        activation=activation,
        probs=None if on_output else row_weights(routing),
        recipe=recipe,
        bi=bi,
        bo=bo,
        seed=seed,
        state=state,
        checkpoint_name=checkpoint_name,
        output_checkpoint_names=output_checkpoint_names,
        backend=backend,
    )
    rows, *new_state = result if state is not None else (result,)
    y = combine(rows, routing, weighted=on_output, preferred_element_type=preferred_element_type or x.dtype)
    return (y, *new_state) if new_state else y


def moe_mlp(
    x: Array,
    router: Array,
    wi: Array,
    wo: Array,
    *,
    k: int,
    activation: Activation = "swiglu",
    recipe: Recipe | None,
    normalize: bool = True,
    weights_on: WeightsOn = "output",
    mask: Array | None = None,
    dtype: DTypeLike | None = None,
    bi: Array | None = None,
    bo: Array | None = None,
    seed: int | Array | None = None,
    state: States | None = None,
    checkpoint_name: str | None = DEFAULT_CHECKPOINT_NAME,
    output_checkpoint_names: OutputNames = (None, None),
    preferred_element_type: DTypeLike | None = None,
    backend: Names = None,
) -> Any:
    """A Mixture-of-Experts block: each token through its k most probable experts, weighted and summed.

    x           [..., K] tokens
    router      [K, E]; the product with x is taken in their common dtype and accumulated in float32
    wi          [E, K, C]; C = 2 F, the gate first, where the activation is gated, else F
    wo          [E, F, N]
    bi, bo      their biases [E, C] and [E, N], or None
    normalize   divide a token's k weights by their sum
    weights_on  as in `routed_mlp`
    mask        [...] bool, x's leading axes: False for tokens that go nowhere, such as padding. They cost no row of a
                GEMM, may hold anything, and come back as zeros
    dtype       of the rows, wi, wo and the biases in the experts; the router sees x as it is. None: as they are
    preferred_element_type   dtype of y; None: x's

    The other arguments are those of `octavo_jax.grouped_mlp`; `checkpoint_name` is the routing's, too.

    Nothing is dropped and no shape depends on the router: there are T * k rows, and the sizes stay on the device.

    Returns (y [..., N], `RouterStats`), and with a state (y, `RouterStats`, new state). Differentiable in x, router,
    wi, wo and the biases. Raises ValueError for arguments that do not fit, NoBackendError when nothing serves them.
    """
    if x.ndim == 0 or router.ndim != 2 or router.shape[0] != x.shape[-1]:
        raise ValueError(f"x has shape {list(x.shape)} and router {list(router.shape)}; they are [..., K] and [K, E]")
    if wi.ndim != 3 or wi.shape[0] != router.shape[1]:
        raise ValueError(
            f"router {list(router.shape)} has {router.shape[1]} experts and wi has shape {list(wi.shape)}; "
            f"give wi [{router.shape[1]}, K, C]"
        )
    batch = x.shape[:-1]
    if mask is not None:
        if mask.shape != batch:
            raise ValueError(f"mask has shape {list(mask.shape)} and x {list(x.shape)}; give mask {list(batch)}")
        mask = mask.reshape(-1)
    out_dtype = preferred_element_type or x.dtype
    tokens = x.reshape(-1, x.shape[-1])
    if mask is not None:
        tokens = jnp.where(mask[:, None], tokens, 0)  # the router's gradient multiplies each token by its zero
    logits = jnp.matmul(tokens, router, preferred_element_type=jnp.float32)
    routing = route(logits, k, normalize=normalize, mask=mask, checkpoint_name=checkpoint_name)
    if dtype is not None:
        tokens, wi, wo = (a.astype(dtype) for a in (tokens, wi, wo))
        bi, bo = (None if b is None else b.astype(dtype) for b in (bi, bo))
    result = routed_mlp(
        tokens,
        routing,
        wi,
        wo,
        activation=activation,
        recipe=recipe,
        weights_on=weights_on,
        bi=bi,
        bo=bo,
        seed=seed,
        state=state,
        checkpoint_name=checkpoint_name,
        output_checkpoint_names=output_checkpoint_names,
        preferred_element_type=out_dtype,
        backend=backend,
    )
    y, *new_state = result if state is not None else (result,)
    return (y.reshape(*batch, y.shape[-1]), router_stats(routing), *new_state)
