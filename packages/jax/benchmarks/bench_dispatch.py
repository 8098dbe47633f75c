"""What a call costs around the backend, which does nothing here.

Run: `pytest packages/jax/benchmarks/bench_dispatch.py --benchmark-only`. An eager call pays for checks, the plan that
is kept and JAX's own dispatch of one compiled function; a call that the user jitted runs no line of ours. The two
`jax` rows are the floor: a compiled identity of as many arguments.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import octavo_jax
import octavo_registry
from octavo import HighPrecision
from octavo_jax.dispatch.layer import LayerOptions, layer_for
from octavo_registry.contract import OPERATIONS
from octavo_registry.contract.cards import BackendCard, Capability, Op
from octavo_registry.contract.hookspecs import hookimpl
from octavo_registry.contract.request import Request

M, K, N, G = 8, 32, 16, 4
RECIPE = HighPrecision()


class NoOp:
    """A plugin whose backend returns zeros."""

    @hookimpl
    def octavo_backends(self) -> tuple[BackendCard, ...]:
        """A card that admits everything the benchmark asks."""
        gemms: frozenset[Op] = frozenset({"fprop", "dgrad", "wgrad"})
        row = Capability(ops=gemms, recipes=frozenset({"high_precision"}), framework="jax", device="cpu")
        return (BackendCard(name="noop", api_level=5, capabilities=(row,)),)

    @hookimpl
    def octavo_load(self, name: str) -> NoOp | None:
        """This object is the backend."""
        return self if name == "noop" else None

    def refuses(self, request: Request) -> None:
        """Nothing."""

    def bind(self, request: Request) -> Any:
        """A function that ignores its arguments' values."""
        return OPERATIONS[request.op].bound(lambda x, w, group_sizes, **_: jnp.zeros((x.shape[0], w.shape[1]), x.dtype))


@pytest.fixture(scope="module", autouse=True)
def noop() -> Iterator[None]:
    """The no-op backend, for this module."""
    octavo_registry.register(NoOp(), "noop")
    yield
    octavo_registry.unregister("noop")


def _measure(benchmark: Any, call: Any) -> None:
    def thousand() -> None:
        for _ in range(1000):
            call()

    call()
    benchmark.pedantic(thousand, rounds=20, warmup_rounds=2)
    benchmark.extra_info["ns a call"] = round(benchmark.stats.stats.min * 1e6)


def _arguments() -> tuple[Any, ...]:
    return jnp.zeros((M, K)), jnp.zeros((G, K, N)), jnp.array([2, 2, 2, 2])


def test_eager_grouped_dense(benchmark: Any) -> None:
    """Sizes on the device."""
    x, kernel, sizes = _arguments()
    _measure(benchmark, lambda: octavo_jax.grouped_dense(x, kernel, sizes, recipe=RECIPE, backend="noop"))


def test_eager_with_host_sizes(benchmark: Any) -> None:
    """Sizes in a list, checked and transferred each call."""
    x, kernel, _ = _arguments()
    _measure(benchmark, lambda: octavo_jax.grouped_dense(x, kernel, [2, 2, 2, 2], recipe=RECIPE, backend="noop"))


def test_cached_jit_call(benchmark: Any) -> None:
    """Inside the user's own jit."""
    run = jax.jit(lambda x, kernel, sizes: octavo_jax.grouped_dense(x, kernel, sizes, recipe=RECIPE, backend="noop"))
    arguments = _arguments()
    _measure(benchmark, lambda: run(*arguments))


def test_jax_identity_of_three_arguments(benchmark: Any) -> None:
    """JAX's own cost of a compiled call."""
    run = jax.jit(lambda x, kernel, sizes: jnp.zeros((M, N)))
    arguments = _arguments()
    _measure(benchmark, lambda: run(*arguments))


def test_finding_the_kept_plan(benchmark: Any) -> None:
    """The part of an eager call that the registry's contract bounds."""
    x, kernel, _ = _arguments()
    _measure(
        benchmark,
        lambda: layer_for(LayerOptions.of(RECIPE, backend="noop"), x, kernel),
    )
