"""The options of a MoE module, of linen and of nnx, that its call and its `explain` give to the block alike."""

from __future__ import annotations

from typing import Any

from octavo_jax.moe.router.rule import RULE

_NAMES = (*RULE, "activation", "weights_on", "exchange", "form", "weight_codes", "dtype")


def block_options(module: object) -> dict[str, Any]:
    """Keywords of `octavo_jax.moe.moe_mlp` and `octavo_jax.moe.explain`, from the attributes of these names."""
    return {name: getattr(module, name) for name in _NAMES}
