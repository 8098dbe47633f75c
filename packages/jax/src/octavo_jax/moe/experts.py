"""The grouped MLP between permutation and combination."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from jax import Array
from jax.typing import DTypeLike

from octavo.quantizer import DEFAULT_CHECKPOINT_NAME
from octavo_jax.arrays.recipes import RecipeLike
from octavo_jax.dispatch.backends import BackendNames
from octavo_jax.mlp.mlp import OutputNames, States, grouped_mlp
from octavo_jax.moe.arrangement import Routing
from octavo_jax.moe.permutation import combine, permute, row_weights
from octavo_jax.sharding.axes import MeshAxes
from octavo_registry.contract.cards import Activation

WeightsOn = Literal["output", "activation"]


def routed_mlp(
    x: Array,
    routing: Routing,
    wi: Array,
    wo: Array,
    *,
    activation: Activation = "swiglu",
    recipe: RecipeLike,
    weights_on: WeightsOn = "output",
    bi: Array | None = None,
    bo: Array | None = None,
    seed: int | Array | None = None,
    state: States | None = None,
    checkpoint_name: str | None = DEFAULT_CHECKPOINT_NAME,
    output_checkpoint_names: OutputNames = (None, None),
    preferred_element_type: DTypeLike | None = None,
    sharding: MeshAxes | None = None,
    backend: BackendNames = None,
) -> Any:
    """x [T, K] through the experts that `routing` names: permute, `octavo_jax.grouped_mlp`, combine.

    weights_on               "output" weighs what the experts return; "activation" what goes into wo, after which the
                             backward pass needs no output of an expert: neither its memory nor, under remat, its GEMM
    preferred_element_type   dtype of y, in which the experts' outputs are rounded once after the sum; None: x's

    The other arguments are those of `octavo_jax.grouped_mlp`. Returns y [T, N], and with a state (y, new state).
    """
    check_experts(x, weights_on, bo)
    on_output = weights_on == "output"
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
        sharding=sharding,
        backend=backend,
    )
    rows, *new_state = result if state is not None else (result,)
    y = combine(rows, routing, weighted=on_output, preferred_element_type=preferred_element_type or x.dtype)
    return (y, *new_state) if new_state else y


def check_experts(x: Array, weights_on: WeightsOn, bo: Array | None) -> None:
    """ValueError unless x is [T, K] and the weights can be applied where the caller wants them."""
    if x.ndim != 2:
        raise ValueError(f"x has shape {list(x.shape)}; it is [T, K], one row per token, with leading axes flattened")
    if weights_on not in ("output", "activation"):
        raise ValueError(f"weights_on is {weights_on!r}; it is 'output' or 'activation'")
    if bo is not None and weights_on != "output":
        raise ValueError("bo was given and weights_on is 'activation', which would add it unweighted; use 'output'")


@dataclass(frozen=True)
class LocalExperts:
    """The experts of one device, and how rows go through them.

    wi, wo       [G, K, C] and [G, F, N]
    weights_on   as in `routed_mlp`
    out_dtype    of y
    options      the other keywords of `octavo_jax.grouped_mlp`
    """

    wi: Array
    wo: Array
    weights_on: WeightsOn
    out_dtype: DTypeLike
    options: Mapping[str, Any]

    @property
    def number(self) -> int:
        """G."""
        return int(self.wi.shape[0])

    def routed(self, x: Array, routing: Routing) -> tuple[Array, States | None]:
        """`routed_mlp`: y [T, N] of tokens, and the new state or None."""
        result = routed_mlp(
            x,
            routing,
            self.wi,
            self.wo,
            weights_on=self.weights_on,
            preferred_element_type=self.out_dtype,
            **self.options,
        )
        return self._with_state(result)

    def grouped(self, rows: Array, group_sizes: Array, probs: Array | None) -> tuple[Array, States | None]:
        """`octavo_jax.grouped_mlp` of rows that are sorted by expert, and the new state or None."""
        return self._with_state(grouped_mlp(rows, self.wi, self.wo, group_sizes, probs=probs, **self.options))

    def _with_state(self, result: Any) -> tuple[Array, States | None]:
        return (result, None) if self.options["state"] is None else result
