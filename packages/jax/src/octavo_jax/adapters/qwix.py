"""A qwix provider whose ragged_dot is computed by a recipe, written for qwix 0.1.8.

    import qwix
    from octavo_jax.adapters.qwix import RecipeProvider, RecipeRule

    provider = RecipeProvider([RecipeRule(module_path=".*experts.*", recipe=octavo.recipe("mxfp8"))])
    model = qwix.quantize_model(model, provider)

The model stays as it is: every `jax.lax.ragged_dot` in a matching module becomes ours, forward and backward. Rules of
qwix's own (`qwix.QtRule`) may be mixed with ours and do what they do under `qwix.QtProvider`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from jax import Array
from jax.typing import DTypeLike

from octavo.quantizer import DEFAULT_CHECKPOINT_NAME
from octavo_jax.adapters.call import RaggedDot, Seed
from octavo_jax.arrays.optional_packages import absent
from octavo_jax.arrays.recipes import RecipeLike
from octavo_jax.dispatch.backends import BackendNames
from octavo_jax.linear.dense import dense
from octavo_jax.linear.grouped import grouped_dense
from octavo_jax.linear.normalized_dense import layernorm_dense
from octavo_jax.linear.ragged import ragged_dot
from octavo_jax.mlp.mlp import grouped_mlp, layernorm_mlp
from octavo_jax.moe.block import moe_mlp
from octavo_jax.moe.block_report import explain as explain_block
from octavo_jax.moe.experts import routed_mlp
from octavo_jax.quantizers.functional import dequantize, quantize

try:
    import qwix  # type: ignore[import-not-found]
except ModuleNotFoundError as error:
    raise absent(error, "qwix", "octavo_jax.adapters.qwix") from error

_LAYERS = (grouped_dense, ragged_dot, dense, layernorm_dense, grouped_mlp, layernorm_mlp, routed_mlp, moe_mlp)
_OURS: tuple[Callable[..., Any], ...] = (quantize, dequantize, *_LAYERS, explain_block)
"""Public functions whose own products no provider may touch (MaxText#5114); explain traces a block's."""


@dataclass(frozen=True, kw_only=True)
class RecipeRule(qwix.QtRule):  # type: ignore[misc]
    """Which modules' ragged_dot is computed how; every other operation of them is left alone.

    module_path       a regular expression for a module's whole path, as in qwix
    recipe            a Recipe, or the name of one; None: high precision
    seed              of stochastic rounding, or a function that gives one for each product
    checkpoint_name   of the quantized operands
    backend           a name or a closed list of names
    """

    recipe: RecipeLike
    seed: Seed = None
    checkpoint_name: str | None = DEFAULT_CHECKPOINT_NAME
    backend: BackendNames = None

    def __post_init__(self) -> None:
        asked = {name: getattr(self, name) for name in ("weight_qtype", "act_qtype", "bwd_qtype", "tile_size")}
        set_fields = {name: value for name, value in asked.items() if value is not None}
        if set_fields:
            raise ValueError(
                f"RecipeRule has {', '.join(f'{name}={value!r}' for name, value in set_fields.items())}; its recipe "
                "says how operands are quantized, so leave them out or give qwix.QtRule"
            )


class RecipeProvider(qwix.QtProvider):  # type: ignore[misc]
    """qwix.QtProvider that knows `RecipeRule`."""

    def _init_rule(self, rule: qwix.QuantizationRule) -> qwix.QuantizationRule:
        return rule if isinstance(rule, RecipeRule) else super()._init_rule(rule)

    def ragged_dot(
        self,
        lhs: Array,
        rhs: Array,
        group_sizes: Array,
        precision: Any = None,
        preferred_element_type: DTypeLike | None = None,
        group_offset: Array | None = None,
        out_sharding: Any = None,
    ) -> Array:
        """`octavo_jax.ragged_dot` under a `RecipeRule`; ValueError, NoBackendError as there."""
        rule, _ = self._get_current_rule_and_op_id("ragged_dot", only_rule=True)
        if isinstance(rule, RecipeRule):
            ours = RaggedDot(rule.recipe, rule.seed, rule.checkpoint_name, rule.backend)
            return ours(lhs, rhs, group_sizes, precision, preferred_element_type, group_offset, out_sharding)
        theirs: Array = super().ragged_dot(lhs, rhs, group_sizes, precision, preferred_element_type, group_offset)
        return theirs

    def get_intercept_map(self) -> dict[str, Callable[..., Any]]:
        """qwix's own, and our public functions as themselves: inside of what it replaced qwix intercepts nothing."""
        return {**super().get_intercept_map(), **dict(map(_where_it_runs, _OURS))}


def _where_it_runs(function: Callable[..., Any]) -> tuple[str, Callable[..., Any]]:
    """A function by the path at which qwix finds its code, which it replaces for everybody who has imported it.

    It replaces no closure's, so of a function that takes old names of its arguments this is what the closure calls.
    """
    path = f"{function.__module__}.{function.__name__}"
    inner = getattr(function, "__wrapped__", None)
    return (path, function) if inner is None else (f"{path}.__wrapped__", inner)
