"""The custom calls of routers and of rows that move with their choices; integers are int64 in words, as in
native/lib/bindings/ffi."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array

import octavo_native
from octavo_jax_native.arrays.planes import result_array
from octavo_jax_native.arrays.words import as_int32
from octavo_jax_native.ffi import targets
from octavo_jax_native.ffi.custom_call import CPU_THREADS, Results, call, workspace_result
from octavo_registry.contract import RouterRule


def _called(target: str, results: Results, operands: Mapping[str, Array], attributes: dict[str, Any]) -> list[Array]:
    names = {"operands": ",".join(operands), "results": ",".join(results)}
    return call(target, results, operands, attributes | names)


def _of_rule(rule: RouterRule) -> dict[str, Any]:
    return {
        "k": rule.k,
        "score": octavo_native.SCORES[rule.score],
        "groups": rule.groups,
        "kept_groups": rule.kept_groups,
        "renormalize": rule.renormalize,
        "scale": np.float32(rule.scale),
        "threads": CPU_THREADS,
    }


def choose(operands: Mapping[str, Array], rule: RouterRule) -> tuple[Array, Array, Array]:
    """Choices int32 [T, k], weights [T, k] and counts int32 [E] of logits [T, E], of a bias and words of a replay."""
    tokens, experts = operands["logits"].shape
    results = {
        "choices": result_array((2 * tokens * rule.k,), jnp.int32),
        "weights": result_array((tokens, rule.k), jnp.float32),
        "counts": result_array((2 * experts,), jnp.int32),
    }
    choices, weights, counts = _called(targets.CHOOSE, results, operands, _of_rule(rule))
    return as_int32(choices).reshape(tokens, rule.k), weights, as_int32(counts)


def choose_gradient(operands: Mapping[str, Array], rule: RouterRule) -> Array:
    """dlogits of logits, words of choices and dweights."""
    logits = operands["logits"]
    results = {"dlogits": result_array(logits.shape, logits.dtype)}
    return _called(targets.CHOOSE_GRADIENT, results, operands, _of_rule(rule))[0]


def route(words: Array, choices: int, groups: int) -> list[Array]:
    """Sizes int32 [G], order and position int32 [N], and routed bool [N], of words of N choices."""
    results = {
        "group_sizes": result_array((2 * groups,), jnp.int32),
        "order": result_array((2 * choices,), jnp.int32),
        "position": result_array((2 * choices,), jnp.int32),
        "routed": result_array((choices,), jnp.bool_),
    }
    needed = octavo_native.route_workspace(choices, groups) if octavo_native.HAS_CUDA else 0
    results |= workspace_result(needed)
    made = _called(targets.ROUTE, results, {"index": words}, {"groups": groups})
    return [*map(as_int32, made[:3]), made[3]]


def row_call(target: str, operands: Mapping[str, Array], choices: int, shape: tuple[int, ...], dtype: Any) -> Array:
    """The one result of a call that moves or multiplies rows of tokens with so many choices each."""
    results = {"out": result_array(shape, dtype)}
    return _called(target, results, operands, {"each": choices, "threads": CPU_THREADS})[0]
