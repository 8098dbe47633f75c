"""bytes_kept: what a MoE layer keeps from its forward pass to its backward pass, before anything has run."""

from __future__ import annotations

import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from octavo import DelayedScaling
from octavo.renamed import renamed_fields
from octavo_jax.arrays.checks import check_count
from octavo_jax.arrays.dtypes import dtype_name
from octavo_jax.arrays.recipes import RecipeLike, as_recipe
from octavo_jax.dispatch.backends import BackendNames
from octavo_jax.functions.activations import check_activation
from octavo_jax.mlp.autograd import MlpArrays, States
from octavo_jax.mlp.call import MlpOptions, resolve_call
from octavo_jax.moe.layer.autograd import MoeArrays, moe_with_residuals
from octavo_jax.moe.layer.forms import Form, WeightCodes, WeightsOn, check_form, check_weight_codes, check_weights_on
from octavo_jax.moe.layer.plan import moe_plan_of
from octavo_jax.moe.layer.residuals import MoeResiduals, RowOrder
from octavo_jax.scaling.delayed_state import init_delayed
from octavo_registry.contract.cards import GATED, Activation

_GROUPING = ("row_order", "context", "codes")
"""Fields of what is kept that a name leaves out."""


@renamed_fields(choices="k")
@dataclass(frozen=True)
class MoeShape:
    """The sizes of a MoE layer.

    tokens, k                                      T, and the choices of each token
    experts                                        E
    in_features, hidden_features, out_features     K, F and N; None for in_features
    """

    tokens: int
    k: int
    experts: int
    in_features: int
    hidden_features: int
    out_features: int | None = None

    @property
    def choices(self) -> int:
        """k, by its old name."""
        return self.k

    def check(self) -> None:
        """ValueError for a size that is none."""
        for name, value in vars(self).items():
            if name != "out_features" or value is not None:
                check_count(name, value)


@dataclass(frozen=True)
class KeptBytes:
    """Bytes of each array that a MoE layer keeps for its backward pass; parameters are not among them.

    arrays    by name: x, weights, order and position, which the caller gave and may hold as well; h, fc1's result, or
              its codes and scales; results, the experts'; codes of the kernels (wi.columnwise ...); delayed scaling's
              states; in "keep_all" x1 and x2, the operands of the kernels' gradients
    tokens    T
    """

    arrays: dict[str, int]
    tokens: int

    @property
    def total(self) -> int:
        """All of them."""
        return sum(self.arrays.values())

    @property
    def weight_codes(self) -> int:
        """The codes of the kernels alone, which do not depend on the number of tokens."""
        return sum(size for name, size in self.arrays.items() if name.startswith(("wi.", "wo.")))

    @property
    def per_token(self) -> float:
        """What is kept of a token: all but the codes of the kernels."""
        return (self.total - self.weight_codes) / self.tokens


def bytes_kept(
    recipe: RecipeLike,
    shape: MoeShape,
    form: Form = "standard",
    *,
    weight_codes: WeightCodes = "keep",
    weights_on: WeightsOn = "activation",
    activation: Activation = "swiglu",
    dtype: DTypeLike = jnp.bfloat16,
    backend: BackendNames = None,
) -> KeptBytes:
    """What `octavo_jax.moe.routed_mlp` with these arguments keeps for its backward pass, on JAX's default device.

    dtype   of x and the kernels

    These are the residuals that JAX is given. XLA keeps them from one program to the next; where both passes are one
    program, it may keep less. `jax.checkpoint` around the layer decides anew. Nothing is computed or allocated. Raises
    ValueError for arguments that do not fit, NoBackendError where no installed backend serves the recipe.
    """
    recipe = as_recipe(recipe)
    if not isinstance(shape, MoeShape):
        raise ValueError(f"shape is a {type(shape).__name__}; give an octavo_jax.MoeShape")
    shape.check()
    dtype_name(dtype, "dtype")
    form, weight_codes = check_form(form), check_weight_codes(weight_codes)
    weights_on = check_weights_on(weights_on)
    name = check_activation(activation)
    tokens, k, experts = shape.tokens, shape.k, shape.experts
    width, hidden, rows = shape.in_features, shape.hidden_features, tokens * k

    sizes: dict[str, int] = {}

    def trace() -> None:
        states: States | None = None
        if isinstance(recipe, DelayedScaling):
            states = init_delayed(recipe, experts), init_delayed(recipe, experts)
        seed = None if recipe is None or not recipe.stochastic else jnp.zeros(2, jnp.uint32)
        options = MlpOptions(name, recipe, seed, states, 0, None, (None, None), None, None, backend, None)
        wi = jnp.zeros((experts, width, hidden * (2 if name in GATED else 1)), dtype)
        wo = jnp.zeros((experts, hidden, shape.out_features or width), dtype)
        given = MlpArrays(jnp.zeros((tokens, width), dtype), None, None, wi, wo, None, None, None)
        call = resolve_call(given, jnp.zeros(experts, jnp.int32), options, rows)
        plan = moe_plan_of(call.mlp, form, weight_codes, weights_on, jnp.dtype(dtype))
        arrays = MoeArrays(call.arrays.x, jnp.zeros((tokens, k), jnp.float32), wi, wo, None, None)
        row_order = RowOrder(jnp.zeros(rows, jnp.int32), jnp.zeros((tokens, k), jnp.int32))
        sizes.update(_sizes(moe_with_residuals(plan, arrays, row_order, call.states, call.context)[1]))

    jax.eval_shape(trace)
    return KeptBytes(sizes, tokens)


def _sizes(kept: MoeResiduals) -> dict[str, int]:
    """By name; codes that two planes share are one array."""
    found: dict[str, int] = {}
    seen: set[int] = set()
    for path, leaf in jax.tree_util.tree_leaves_with_path(kept):
        parts = jax.tree_util.keystr(path, simple=True, separator=".").split(".")
        name = ".".join(part for part in parts if part not in _GROUPING)
        # parameters, and a number of the host's
        if name.endswith(".array") or name == "group_offset" or id(leaf) in seen:
            continue
        seen.add(id(leaf))
        found[name] = math.prod(leaf.shape) * leaf.dtype.itemsize
    return found
