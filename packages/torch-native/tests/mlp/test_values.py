"""MLPs and MoE layers whose quantizers write the values that emulated products multiply, against those of codes.

The CPU's kernels multiply what codes stand for, so a layer there asks for codes; here it is made to ask for values,
which its kernels write and read, too. MXFP8 has the same bits then. NVFP4 has not, because the CPU's values of codes
are rounded with the second level inside.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from emulated_recipes import CASES, RECIPES
from torch import Tensor

import octavo_native.values
import octavo_registry
from octavo import MXFP8, BlockScaling, Recipe
from octavo.quantizer import Direction
from octavo_native.layouts import VALUES
from octavo_registry.contract import (
    AnyBound,
    AnyRequest,
    Backend,
    BackendCard,
    BoundActQuantize,
    BoundDactQuantize,
    BoundQuantize,
    hookimpl,
)
from octavo_torch import DelayedWgrad, GroupedTensor, grouped_mlp, moe_mlp
from octavo_torch_native.backend import NativeBackend
from octavo_torch_native.gemm import gemm
from octavo_torch_native.plugin import CARD

T, C, G, K, F = 61, 3, 5, 160, 112
SIZES = [33, 0, 20, 5, 3]
SEED = 7
CODES, READS_VALUES = "codes-alone", "values-read"
Step = Callable[..., list[Tensor]]


class _Asked(NativeBackend):
    """The kernels, with planes in the place of codes or without."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self._name = name

    def bind(self, request: AnyRequest) -> AnyBound:
        bound = super().bind(request)
        quantizes = isinstance(bound, BoundQuantize | BoundActQuantize | BoundDactQuantize)
        return replace(bound, multiplied=None) if quantizes and self._name == CODES else bound


class _Plugin:
    @hookimpl
    def octavo_backends(self) -> tuple[BackendCard, ...]:
        return tuple(CARD.model_copy(update={"name": name, "priority": -300}) for name in (CODES, READS_VALUES))

    @hookimpl
    def octavo_load(self, name: str) -> Backend | None:
        return _Asked(name) if name in (CODES, READS_VALUES) else None


@pytest.fixture(autouse=True)
def _backends(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Both of them, of a device whose kernels multiply values."""
    monkeypatch.setattr(octavo_native.values, "multiplies_values", lambda device: True)
    octavo_registry.register(_Plugin(), "values-and-codes")
    yield
    octavo_registry.unregister("values-and-codes")


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The layouts of the planes that GEMMs of composed passes have read, in their order."""
    seen: list[str] = []
    real = gemm.plane_of

    def noted(q: GroupedTensor, direction: Direction) -> Any:
        seen.append(getattr(q.spec, f"{direction}_layout"))
        return real(q, direction)

    monkeypatch.setattr(gemm, "plane_of", noted)
    return seen


def mlp_step(rng: np.random.Generator, device: str) -> Step:
    """y and all gradients of a grouped MLP, of operands that are the same in each call, with a tail of NaN."""
    rows = torch.from_numpy(rng.standard_normal((2, T + 9, K), np.float32)).bfloat16().to(device)
    rows[:, sum(SIZES) :] = torch.nan
    w1, w2 = weights(rng, device)
    leaves = [rows[0].clone().requires_grad_(), w1, w2]

    def step(recipe: Recipe, backend: str, **options: Any) -> list[Tensor]:
        y = grouped_mlp(
            *leaves, torch.tensor(SIZES, device=device), recipe=recipe, seed=SEED, backend=backend, **options
        )
        return [y.detach(), *torch.autograd.grad(y, leaves, rows[1])]

    return step


def moe_step(rng: np.random.Generator, device: str) -> Step:
    """The same of a MoE layer; some choices go nowhere, and an expert has none."""
    x, dy = torch.from_numpy(rng.standard_normal((2, T, K), np.float32)).bfloat16().to(device)
    choices = torch.from_numpy(rng.choice([0, 2, 3, 4, -1], (T, C))).to(device)
    probs = torch.from_numpy(rng.random((T, C), np.float32)).to(device).requires_grad_()
    leaves = [x.clone().requires_grad_(), *weights(rng, device)]

    def step(recipe: Recipe, backend: str, **options: Any) -> list[Tensor]:
        x, w1, w2 = leaves
        y = moe_mlp(x, choices, probs, w1, w2, recipe=recipe, seed=SEED, backend=backend, **options)
        return [y.detach(), *torch.autograd.grad(y, [*leaves, probs], dy)]

    return step


def weights(rng: np.random.Generator, device: str) -> tuple[Tensor, Tensor]:
    w1, w2 = (
        torch.from_numpy(rng.standard_normal(shape, np.float32) / 8).bfloat16().to(device).requires_grad_()
        for shape in ((G, 2 * F, K), (G, K, F))
    )
    return w1, w2


def assert_bits(ours: list[Tensor], theirs: list[Tensor], what: object) -> None:
    for number, (one, other) in enumerate(zip(ours, theirs, strict=True)):
        assert torch.equal(one.view(torch.uint8), other.view(torch.uint8)), (what, number)


@pytest.mark.parametrize(("name", "device"), CASES)
def test_an_mlp_has_the_bits_of_codes(name: str, device: str, rng: np.random.Generator) -> None:
    """y and all gradients, of calls that are composed, written down and run again."""
    step, recipe = mlp_step(rng, device), RECIPES[name]
    expected = step(recipe, CODES)
    for call in range(3):
        assert_bits(step(recipe, READS_VALUES), expected, call)


@pytest.mark.parametrize(
    "how",
    [
        {"form": "standard"},
        {"form": "keep_all"},
        {"form": "lean"},
        {"form": "recompute"},
        {"form": "recompute", "weight_codes": "remake"},
        {"form": "standard", "weight_codes": "remake"},
    ],
    ids=lambda how: "-".join(how.values()),
)
@pytest.mark.parametrize(("name", "device"), CASES)
def test_a_layer_has_the_bits_of_codes(name: str, device: str, how: dict[str, Any], rng: np.random.Generator) -> None:
    """So it is in each form of a MoE layer, which quantizes from tokens and makes planes again in backward."""
    step, recipe = moe_step(rng, device), RECIPES[name]
    expected = step(recipe, CODES, **how)
    for call in range(3):
        assert_bits(step(recipe, READS_VALUES, **how), expected, call)


def test_what_is_read_at_once_is_values(rng: np.random.Generator, read: list[str]) -> None:
    """Of the twelve planes that a step's six products read, all are values but those that wait for backward: an MLP's
    columns of x, of the activation and of both weights, and in a MoE layer, which makes columns again, the weights'."""
    kept = {"mlp": 4, "keep_all": 4, "standard": 2, "remade": 0}
    calls: dict[str, Callable[[], object]] = {
        "mlp": lambda: mlp_step(rng, "cpu")(MXFP8(), READS_VALUES),
        "keep_all": lambda: moe_step(rng, "cpu")(MXFP8(), READS_VALUES, form="keep_all"),
        "standard": lambda: moe_step(rng, "cpu")(MXFP8(), READS_VALUES),
        "remade": lambda: moe_step(rng, "cpu")(MXFP8(), READS_VALUES, weight_codes="remake"),
    }
    for name, call in calls.items():
        read.clear()
        call()
        assert len(read) == 12, name
        assert read.count(VALUES) == 12 - kept[name], name


def test_what_waits_is_codes(rng: np.random.Generator, read: list[str]) -> None:
    """Postponed gradients of weights keep no values of x, of the activation or of gradients until they are computed."""
    store = DelayedWgrad()
    x, (w1, w2) = torch.randn(sum(SIZES), K).bfloat16(), weights(rng, "cpu")
    x.requires_grad_()
    options: dict[str, Any] = {"recipe": MXFP8(), "backend": READS_VALUES, "delayed_wgrad": store}
    grouped_mlp(x, w1, w2, torch.tensor(SIZES), **options).sum().backward()
    of_fprop, of_dgrad = 2 * 2, 2  # of a weight, dgrad reads codes
    assert (len(read), read.count(VALUES)) == (8, of_fprop + of_dgrad)
    read.clear()
    store.backward_dw()
    assert (len(read), read.count(VALUES)) == (4, 0)


def test_values_are_of_emulated_products(rng: np.random.Generator, read: list[str]) -> None:
    """Block scaling's products are of codes."""
    moe_step(rng, "cpu")(BlockScaling(), READS_VALUES)
    assert read
    assert VALUES not in read


def test_nobody_keeps_values(rng: np.random.Generator) -> None:
    """What autograd saves has the bytes of a layer of codes."""
    for make, how in ((mlp_step, {}), (moe_step, {"form": "keep_all"}), (moe_step, {"form": "recompute"})):
        step = make(rng, "cpu")
        kept: dict[str, int] = {}
        for backend in (CODES, READS_VALUES):
            sizes: dict[int, int] = {}

            def note(tensor: Tensor, sizes: dict[int, int] = sizes) -> Tensor:
                sizes[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
                return tensor

            with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
                step(MXFP8(), backend, **how)
            kept[backend] = sum(sizes.values())
        assert kept[READS_VALUES] == kept[CODES] > 0, how
