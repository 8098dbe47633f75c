"""Group sizes that a backend prepares: once a call, for every operation, by nobody else's operations.

docs/guide/backends.md, "The backend"; `octavo_registry.contract.Bound.prepare`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import octavo_registry
from octavo import PRESETS, Recipe
from octavo_registry import BackendCard, Bound, Request
from octavo_torch import DelayedState, grouped_linear
from octavo_torch.plugin import CARD
from octavo_torch.reference.backend import ReferenceBackend

SIZES = [33, 0, 1, 20]
M, K, N, G = 60, 64, 48, len(SIZES)


@dataclass
class Ready:
    """What the backend below takes in the sizes' place, and takes alone."""

    group_sizes: Tensor
    owner: Preparing


class Preparing(ReferenceBackend):
    """The reference, whose ragged operations refuse sizes that were not prepared."""

    def __init__(self) -> None:
        self.prepared = self.used = 0

    def prepare(self, group_sizes: Tensor, rows: int, like: Tensor) -> Ready:
        assert rows == like.shape[0]
        self.prepared += 1
        return Ready(group_sizes.to(like.device, torch.int64, copy=True), self)

    def bind(self, request: Request) -> Bound:
        """Everything but matrices reads sizes."""
        bound = super().bind(request)
        if request.op == "dequantize" or request.stacked:
            return bound

        def opened(sizes: Ready) -> Tensor:
            assert sizes.owner is self
            self.used += 1
            return sizes.group_sizes

        def run(*operands: Any, **rest: Any) -> Any:
            return bound.run(*(opened(value) if isinstance(value, Ready) else value for value in operands), **rest)

        return replace(bound, run=run, prepare=self.prepare)


class Plugin:
    """One backend of this process, for the operations that are given."""

    def __init__(self, name: str, backend: ReferenceBackend, ops: frozenset[str]) -> None:
        self.name, self.backend, self.ops = name, backend, ops

    def octavo_backends(self) -> list[BackendCard]:
        rows = [row for row in CARD.capabilities if row.device == "cpu"]
        kept = tuple(row.model_copy(update={"ops": row.ops & self.ops}) for row in rows if row.ops & self.ops)
        return [CARD.model_copy(update={"name": self.name, "priority": -1000, "capabilities": kept})]

    def octavo_load(self, name: str) -> ReferenceBackend | None:
        return self.backend if name == self.name else None


GEMMS, QUANTIZERS = frozenset({"fprop", "dgrad", "wgrad"}), frozenset({"quantize", "dequantize"})
Make = Callable[..., Preparing]


@pytest.fixture
def preparing() -> Iterator[Make]:
    """preparing(name, ops): a backend that prepares, registered for one test."""
    made: list[str] = []

    def make(name: str = "preparing", ops: frozenset[str] = GEMMS | QUANTIZERS) -> Preparing:
        backend = Preparing()
        octavo_registry.register(Plugin(name, backend, ops), f"test-{name}")
        made.append(f"test-{name}")
        return backend

    yield make
    for name in made:
        octavo_registry.unregister(name)


@dataclass
class Step:
    """The inputs of one training step, and the step."""

    recipe: Recipe
    x: Tensor
    w: Tensor
    dy: Tensor
    bias: Tensor

    def __call__(
        self, backend: Any, sizes: Any = SIZES, before: Callable[[], Any] = lambda: None, again: bool = False
    ) -> list[Tensor]:
        """y and the gradients of x, w and bias; `before` runs before backward; `again`: forward is run once more."""
        leaves = [value.clone().requires_grad_() for value in (self.x, self.w, self.bias)]
        state = DelayedState.create(self.recipe, G) if self.recipe.stateful else None  # type: ignore[arg-type]

        def forward(x: Tensor, w: Tensor, bias: Tensor) -> Tensor:
            return grouped_linear(x, w, sizes, recipe=self.recipe, bias=bias, seed=3, state=state, backend=backend)

        y = checkpoint(forward, *leaves, use_reentrant=False) if again else forward(*leaves)
        before()
        return [y.detach(), *torch.autograd.grad(y, leaves, self.dy)]


def draw(name: str) -> Step:
    return Step(PRESETS[name], torch.randn(M, K), torch.randn(G, N, K), torch.randn(M, N), torch.randn(G, N))


def same(made: list[Tensor], expected: list[Tensor]) -> None:
    assert all(torch.equal(a, b) for a, b in zip(made, expected, strict=True))


@pytest.mark.parametrize("name", PRESETS)
def test_once_a_step(name: str, preparing: Make, rng: np.random.Generator) -> None:
    """One preparation for the quantizers of x and dy, three GEMMs, amax histories and the bias gradient."""
    backend, step = preparing(), draw(name)
    made = step("preparing")
    assert backend.prepared == 1
    recipe = step.recipe
    quantized = [recipe.quantizes(gemm) for gemm in ("fprop", "dgrad", "wgrad")]
    assert backend.used == 3 + quantized[0] + (quantized[1] or quantized[2])
    same(made, step("torch-reference"))
    step("preparing")
    assert backend.prepared == 2


def test_once_more_where_forward_runs_once_more(preparing: Make, rng: np.random.Generator) -> None:
    """Activation checkpointing prepares again, and changes no bit."""
    backend, step = preparing(), draw("mxfp8")
    expected = step("torch-reference")
    same(step("preparing", again=True), expected)
    assert backend.prepared == 2


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_backward_has_the_sizes_of_forward(dtype: torch.dtype, preparing: Make, rng: np.random.Generator) -> None:
    """Sizes that the caller overwrites before backward, as a router's buffer is: gradients are those of forward.

    Where no backend prepares, autograd refuses to read a tensor of sizes that was changed.
    """
    preparing()
    step, sizes = draw("mxfp8"), torch.tensor(SIZES, dtype=dtype)
    expected = step("preparing")
    same(step("preparing", sizes, lambda: sizes.copy_(torch.tensor([1, 2, 3, 4]))), expected)


@pytest.mark.parametrize("parts", ["quantizers", "GEMMs", "two"])
def test_not_where_backends_are_mixed(parts: str, preparing: Make, rng: np.random.Generator) -> None:
    """Sizes prepared by one backend are nothing to another: a layer of two takes them as they are."""
    names: list[str] = []
    if parts != "GEMMs":
        preparing("quantizes", QUANTIZERS)
        names.append("quantizes")
    if parts != "quantizers":
        preparing("multiplies", GEMMS)
        names.append("multiplies")
    step = draw("mxfp8")
    served = octavo_registry.plan_layer(
        Request(
            op="fprop", framework="torch", device="cpu", in_dtype="float32", out_dtype="float32", recipe=step.recipe
        ),
        backend=(*names, "torch-reference"),
    )
    assert len({part.backend for part in served.plans}) == 2
    made = step((*names, "torch-reference"))
    backends = [octavo_registry.plan(part.request, backend=part.backend).prepare for part in served.plans]
    assert any(prepare is not None for prepare in backends)
    assert all(prepare.__self__.prepared == 0 for prepare in backends if prepare is not None)  # type: ignore[attr-defined]
    same(made, step("torch-reference"))


def test_bad_sizes_are_told_before(preparing: Make) -> None:
    """The front end's own sentence; nothing is prepared."""
    backend = preparing()
    with pytest.raises(ValueError, match="sum to 70"):
        draw("bf16")("preparing", [70, 0, 0, 0])
    assert backend.prepared == 0
