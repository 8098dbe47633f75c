"""What dispatch costs: the token that a layer compares in each forward, and a plan that is in the cache.

Budgets: 150 ns for the token, and 2 microseconds of ours in a whole forward (architecture.md, The hot path).
"""

from __future__ import annotations

from typing import Any

import pytest

import octavo
from octavo_registry import Capability, Registry, Request, prefer, state_token
from octavo_registry.contract import AnyBound, BoundFprop
from octavo_registry.contract.cards import BackendCard

CARD = BackendCard(
    name="bench",
    api_level=3,
    capabilities=(
        Capability(
            ops=frozenset({"quantize", "fprop", "dgrad", "wgrad"}),
            recipes=frozenset({"mxfp8"}),
            framework="torch",
            device="cpu",
        ),
    ),
)
REQUEST = Request("fprop", "torch", "cpu", "bfloat16", "bfloat16", recipe=octavo.MXFP8(), k=7168, n=2048, groups=32)


class _Backend:
    def refuses(self, request: Request) -> None:
        return None

    def bind(self, request: Request) -> AnyBound:
        return BoundFprop(_run)


def _run(*arguments: Any, **keywords: Any) -> None:
    return None


class _Plugin:
    def octavo_backends(self) -> list[BackendCard]:
        return [CARD]

    def octavo_load(self, name: str) -> _Backend:
        return _Backend()


@pytest.fixture
def registry() -> Registry:
    return Registry.from_plugins({"bench": _Plugin()})


def test_state_token(benchmark: Any) -> None:
    benchmark(state_token)


def test_state_token_under_a_preference(benchmark: Any) -> None:
    with prefer("bench"):
        benchmark(state_token)


def test_layer_guard_and_run(benchmark: Any, registry: Registry) -> None:
    """What a front end's layer does: read the token, compare, run the bound function."""

    class Layer:
        def __init__(self) -> None:
            self.token = state_token()
            self.run = registry.plan(REQUEST).run

        def forward(self, x: object, w: object, sizes: object) -> object:
            if self.token is not state_token():
                raise AssertionError("the plan is stale")
            return self.run(x, w, sizes)

    benchmark(Layer().forward, None, None, None)


def test_cached_plan(benchmark: Any, registry: Registry) -> None:
    registry.plan(REQUEST)
    benchmark(registry.plan, REQUEST)


def test_cached_layer_plan(benchmark: Any, registry: Registry) -> None:
    registry.plan_layer(REQUEST)
    benchmark(registry.plan_layer, REQUEST)


def test_first_plan(benchmark: Any) -> None:
    """Load, filter, bind and cache, for a registry that is known but has planned nothing."""

    def fresh() -> tuple[tuple[Registry], dict[str, Any]]:
        made = Registry.from_plugins({"bench": _Plugin()})
        made.backends()
        return (made,), {}

    benchmark.pedantic(lambda made: made.plan(REQUEST), setup=fresh, rounds=200)
