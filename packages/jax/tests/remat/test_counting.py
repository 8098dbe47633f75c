"""count_runs: a program's runs of quantizers and GEMMs, from its jaxpr."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest

import octavo
import octavo_jax
from octavo_jax.counting import Runs, count_runs

M, K, G = 32, 32, 2
X, KERNEL = jnp.ones((M, K)), jnp.ones((G, K, K))


def _layer(x: Any, kernel: Any) -> Any:
    return octavo_jax.grouped_dense(x, kernel, [20, 10], recipe=octavo.CurrentScaling(), backend="jax-reference")


def _scan(x: Any, kernel: Any) -> Any:
    return jax.lax.scan(lambda x, _: (_layer(x, kernel), None), x, None, length=5)[0]


def _while(x: Any, kernel: Any) -> Any:
    return jax.lax.while_loop(lambda x: jnp.sum(x) < 9, lambda x: _layer(x, kernel), x)


def _cond(x: Any, kernel: Any) -> Any:
    return jax.lax.cond(jnp.sum(x) > 0, lambda: x, lambda: _layer(_layer(x, kernel), kernel))


def _unused(x: Any, kernel: Any) -> Any:
    _layer(x, kernel)
    return _layer(x, kernel)


# A loop's kernel is the same each time around, so tracing hoists nothing: it is quantized anew.
PROGRAMS: dict[str, tuple[Any, tuple[int, int, int, int], int]] = {
    "once": (_layer, (2, 1, 0, 0), 0),
    "training": (jax.grad(lambda x, kernel: jnp.sum(_layer(x, kernel) ** 2), (0, 1)), (3, 1, 1, 1), 0),
    "scan": (_scan, (10, 5, 0, 0), 0),
    "fori_loop": (lambda x, kernel: jax.lax.fori_loop(0, 4, lambda _, x: _layer(x, kernel), x), (8, 4, 0, 0), 0),
    "scan in scan": (
        lambda x, kernel: jax.lax.scan(lambda x, _: (_scan(x, kernel), None), x, None, 3)[0],
        (30, 15, 0, 0),
        0,
    ),
    "while_loop": (_while, (2, 1, 0, 0), 3),
    "scan of while_loop": (
        lambda x, kernel: jax.lax.scan(lambda x, _: (_while(x, kernel), None), x, None, 4)[0],
        (8, 4, 0, 0),
        12,
    ),
    "cond": (_cond, (4, 2, 0, 0), 0),
    "nobody reads it": (_unused, (2, 1, 0, 0), 0),
    "jitted": (jax.jit(_layer), (2, 1, 0, 0), 0),
}


@pytest.mark.parametrize("program", PROGRAMS)
def test_runs_are_weighted_by_loops(program: str) -> None:
    """Loops of known length multiply, a while_loop counts once and says so, a branch counts as the costlier one."""
    function, counts, in_while = PROGRAMS[program]
    runs = count_runs(function, X, KERNEL)
    assert (runs.quantize, runs.fprop, runs.dgrad, runs.wgrad, runs.in_while) == (*counts, in_while)
    assert sum(runs.by_name.values()) == sum(counts)


def test_a_batched_layer_is_one_run() -> None:
    """vmap batches a call; keyword arguments reach the function."""
    runs = count_runs(jax.vmap(_layer, in_axes=(0, None)), jnp.ones((3, M, K)), KERNEL)
    assert runs.quantize == 2
    spec = octavo.MXFP8().quantizer("x")
    assert spec is not None
    runs = count_runs(octavo_jax.quantize, X, spec=spec, backend="jax-reference")
    assert runs == Runs(1, 0, 0, 0, {"octavo_quantize_mxfp8": 1})
