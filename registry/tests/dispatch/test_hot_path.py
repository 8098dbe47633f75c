"""The hot path: what a layer does in each forward, once its plan is bound."""

from __future__ import annotations

import sys
import timeit
from contextvars import ContextVar
from types import FrameType, SimpleNamespace
from typing import Any

import pytest

from octavo_registry import prefer, state_token

FOREIGN = ("pydantic", "pluggy", "inspect", "os", "importlib", "octavo.")
TOKEN_RATIO = 2.0
"""Time of one `state_token` in that of one ContextVar lookup in a function of its own; 0.7 was measured."""


class Layer:
    """What a front end does: read the token before planning, keep both, compare with `is`."""

    def __init__(self, registry: Any, request: Any) -> None:
        self.registry = registry
        self.request = request
        self.token: object = None
        self.plans = 0

    def forward(self) -> Any:
        token = state_token()
        if self.token is not token:
            self.run = self.registry.plan(self.request).run
            self.token = token
            self.plans += 1
        return self.run()


def test_a_thousand_forwards_enter_no_foreign_frame(fakes: Any) -> None:
    """architecture.md, The hot path: no pluggy, no pydantic, no environment, no inspect; two calls a forward."""
    layer = Layer(fakes.registry(fakes.plugin("a")), fakes.request())
    layer.forward()
    modules: list[str] = []

    def profile(frame: FrameType, event: str, argument: object) -> None:
        if event == "call":
            modules.append(str(frame.f_globals.get("__name__")))

    sys.setprofile(profile)
    try:
        for _ in range(1000):
            layer.forward()
    finally:
        sys.setprofile(None)
    assert len(modules) == 3000  # forward, state_token, run
    assert [name for name in modules if name.startswith(FOREIGN)] == []


def test_a_layer_plans_again_only_when_it_must(fakes: Any) -> None:
    """Another preference and another set of plugins re-plan once each; a block entered again finds its plan kept."""
    registry = fakes.registry(fakes.plugin("a"), fakes.plugin("b"))
    layer = Layer(registry, fakes.request())
    for _ in range(3):
        layer.forward()
    assert layer.plans == 1
    with prefer("b"):
        layer.forward()
        layer.forward()
    assert layer.plans == 2
    registry.register(fakes.plugin("c"), "late")
    layer.forward()
    layer.forward()
    assert layer.plans == 3


@pytest.mark.parametrize("names", [(), ("a",)])
def test_the_token_is_cheap(names: tuple[str, ...]) -> None:
    """It costs what it says: about one ContextVar lookup. The best of many short runs that take turns, because other
    processes share the machine."""
    variable: ContextVar[Any] = ContextVar("lookup")
    variable.set(SimpleNamespace(token=object()))
    lookup = variable.get

    def floor() -> Any:
        return lookup().token

    def fits() -> bool:
        best = {state_token: float("inf"), floor: float("inf")}
        for _ in range(400):
            for function, seconds in best.items():
                best[function] = min(seconds, timeit.timeit(function, number=500))
            if best[state_token] < TOKEN_RATIO * best[floor]:
                return True
        return False

    if names:
        with prefer(*names):
            assert fits()
    else:
        assert fits()
