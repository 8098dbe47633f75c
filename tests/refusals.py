"""Calls that are refused, by name; `python tests/refusals.py > FILE` writes the sentences of the installed version."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import torch

import octavo
import octavo_jax
import octavo_registry
import octavo_torch

TORCH, JAX = "torch-reference", "jax-reference"
X, W = torch.ones(8, 16), torch.ones(2, 32, 16)
JX, JK = jnp.ones((8, 16)), jnp.ones((2, 16, 32))
SPEC = octavo.MXFP8().quantizer("x")


def _linear(**changed: Any) -> Callable[[], Any]:
    arguments = {"x": X, "weight": W, "group_sizes": [3, 4], "recipe": octavo.MXFP8(), "backend": TORCH, **changed}
    return lambda: octavo_torch.grouped_linear(**arguments)


def _mlp(**changed: Any) -> Callable[[], Any]:
    arguments = {"x": X, "w1": torch.ones(2, 64, 16), "w2": torch.ones(2, 16, 32), "group_sizes": [3, 4]}
    return lambda: octavo_torch.grouped_mlp(**{**arguments, "recipe": octavo.MXFP8(), "backend": TORCH, **changed})


def _quantize(**changed: Any) -> Callable[[], Any]:
    return lambda: octavo_torch.quantize(**{"x": X, "spec": SPEC, "group_sizes": [3, 4], "backend": TORCH, **changed})


def _dense(**changed: Any) -> Callable[[], Any]:
    arguments = {"x": JX, "kernel": JK, "group_sizes": [3, 4], "recipe": octavo.MXFP8(), "backend": JAX, **changed}
    return lambda: octavo_jax.grouped_dense(**arguments)


def _recipe(**fields: Any) -> Callable[[], Any]:
    return lambda: octavo.BlockScaling(**fields)


CASES: dict[str, Callable[[], Any]] = {
    "torch: too many rows": _linear(group_sizes=[5, 4]),
    "torch: a negative size": _linear(group_sizes=[5, -4]),
    "torch: another number of groups": _linear(group_sizes=[5, 1, 1]),
    "torch: x of another width": _linear(x=torch.ones(8, 15)),
    "torch: x of rank 0": _linear(x=torch.ones(())),
    "torch: x in float64": _linear(x=torch.ones(8, 16, dtype=torch.float64)),
    "torch: bias of another shape": _linear(bias=torch.ones(2, 31)),
    "torch: bias scales without a bias": _linear(bias_scales=torch.ones(8)),
    "torch: no seed": _linear(recipe=octavo.NVFP4(), x=torch.ones(8, 16, requires_grad=True)),
    "torch: no state": _linear(recipe=octavo.DelayedScaling()),
    "torch: a number as recipe": _linear(recipe=5),
    "torch: out of another shape": _linear(out=torch.ones(8, 31)),
    "torch: an unknown backend": _linear(backend="torch-referense"),
    "torch: mlp, an unknown activation": _mlp(activation="swigloo"),
    "torch: mlp, w2 of another width": _mlp(w2=torch.ones(2, 16, 31)),
    "torch: mlp, probs of another length": _mlp(probs=torch.ones(7)),
    "torch: quantize, sizes with matrices": _quantize(x=W),
    "torch: quantize, a scale that is not taken": _quantize(scale=torch.ones(2)),
    "torch: quantize, an unknown operand": _quantize(operand="y"),
    "torch: quantize, a group offset below zero": _quantize(group_offset=-1),
    "torch: permute, choices of another length": lambda: octavo_torch.permute(X, torch.zeros(7, 1).long(), 2),
    "torch: permute, choices that are not integers": lambda: octavo_torch.permute(X, torch.zeros(8, 1), 2),
    "jax: too many rows": _dense(group_sizes=[5, 4]),
    "jax: a negative size": _dense(group_sizes=[5, -4]),
    "jax: another number of groups": _dense(group_sizes=[5, 1, 1]),
    "jax: x of another width": _dense(x=jnp.ones((8, 15))),
    "jax: x of integers": _dense(x=jnp.ones((8, 16), jnp.int8)),
    "jax: bias of another shape": _dense(bias=jnp.ones((2, 31))),
    "jax: no seed": _dense(recipe=octavo.NVFP4()),
    "jax: no state": _dense(recipe=octavo.DelayedScaling()),
    "jax: an unknown backend": _dense(backend="jax-referense"),
    "core: an unknown field": _recipe(wgard=None),
    "core: an unknown format": _recipe(forward_format="e4m4"),
    "core: sizes past the rows": lambda: octavo.check_group_sizes([5, 4], 8),
    "core: an unknown recipe": lambda: octavo.recipe("mxpf8"),
    "registry: a preference for nobody": lambda: octavo_registry.prefer("no such backend").__enter__(),
}


def sentence(call: Callable[[], Any]) -> str:
    """The type and the text of what the call raises; AssertionError where it raises nothing."""
    try:
        call()
    except (ValueError, octavo.OctavoError) as error:
        return f"{type(error).__name__}: {error}"
    raise AssertionError("the call was not refused")


if __name__ == "__main__":
    print(json.dumps({name: sentence(call) for name, call in CASES.items()}, indent=1))
