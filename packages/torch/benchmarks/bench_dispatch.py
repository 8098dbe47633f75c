"""What Octavo itself costs a call: everything but the backend, which does nothing here.

Run: `pytest packages/torch/benchmarks/bench_dispatch.py --benchmark-only`. The gate is 2 microseconds of ours a call.
Forward without gradients, so that torch.autograd.Function's own cost stays out.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

import octavo_registry
from octavo import MXFP8, HighPrecision, Recipe
from octavo_registry.contract import OPERATIONS
from octavo_registry.contract.cards import BackendCard, Capability, Op
from octavo_registry.contract.hookspecs import hookimpl
from octavo_registry.contract.request import Request
from octavo_torch import GroupedLinear, grouped_linear

_OPS: frozenset[Op] = frozenset({"quantize", "fprop", "dgrad", "wgrad"})


class NoOp:
    """A plugin whose backend answers every call with one prepared result."""

    result = torch.zeros(8, 16)

    @hookimpl
    def octavo_backends(self) -> Any:
        """A card that admits everything the benchmark asks."""
        kinds = frozenset({"high_precision", "mxfp8"})
        return (
            BackendCard(
                name="noop",
                api_level=5,
                capabilities=(Capability(ops=_OPS, recipes=kinds, framework="torch", device="cpu"),),
            ),
        )

    @hookimpl
    def octavo_load(self, name: str) -> Any:
        """This object is the backend."""
        return self if name == "noop" else None

    def refuses(self, request: Request) -> None:
        """Nothing."""

    def bind(self, request: Request) -> Any:
        """A function that returns at once."""
        result = self.result

        def gemm(x: Any, w: Any, sizes: Any, *, bias: Any = None, bias_scales: Any = None, out: Any = None) -> Any:
            return result

        def quantize(
            x: Any, sizes: Any, *, seed: Any = None, operand: Any = None, group_offset: Any = 0, scale: Any = None
        ) -> Any:
            return result

        return OPERATIONS[request.op].bound(quantize if request.op == "quantize" else gemm)


@pytest.fixture(scope="module", autouse=True)
def noop() -> Iterator[None]:
    """The no-op backend, for this module."""
    octavo_registry.register(NoOp(), "noop")
    yield
    octavo_registry.unregister("noop")


RECIPES = {"high_precision": HighPrecision(), "mxfp8": MXFP8()}


@pytest.mark.parametrize("name", RECIPES)
def test_grouped_linear(benchmark: Any, name: str) -> None:
    """The function, sizes in host memory and checked each call."""
    recipe: Recipe = RECIPES[name]
    x, w, sizes = torch.zeros(8, 32), torch.zeros(4, 16, 32), torch.tensor([2, 2, 2, 2])

    def call() -> None:
        for _ in range(1000):
            grouped_linear(x, w, sizes, recipe=recipe, backend="noop")

    with torch.no_grad():
        benchmark.pedantic(call, rounds=20, warmup_rounds=2)
    benchmark.extra_info["ns a call"] = round(benchmark.stats.stats.min * 1e6)


@pytest.mark.parametrize("name", RECIPES)
def test_module_forward(benchmark: Any, name: str) -> None:
    """The module's forward, without torch.nn.Module.__call__."""
    layer = GroupedLinear(4, 32, 16, recipe=RECIPES[name], backend="noop")
    x, sizes = torch.zeros(8, 32), torch.tensor([2, 2, 2, 2])

    def call() -> None:
        for _ in range(1000):
            layer.forward(x, sizes)

    with torch.no_grad():
        benchmark.pedantic(call, rounds=20, warmup_rounds=2)
    benchmark.extra_info["ns a call"] = round(benchmark.stats.stats.min * 1e6)


def test_floor(benchmark: Any) -> None:
    """What the call reads in any case: two shapes, two dtypes, the sizes as a list."""
    x, w, sizes = torch.zeros(8, 32), torch.zeros(4, 16, 32), torch.tensor([2, 2, 2, 2])

    def call() -> None:
        for _ in range(1000):
            _ = x.shape, w.shape, x.dtype, w.dtype, x.is_cpu, w.is_cpu, sizes.tolist(), torch.is_grad_enabled()

    benchmark.pedantic(call, rounds=20, warmup_rounds=2)
    benchmark.extra_info["ns a call"] = round(benchmark.stats.stats.min * 1e6)
