"""Weights that are views of [G, K, N]: read and written where they lie, with the bits of [G, N, K]."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from cuda_device import MARKS
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from octavo import PRESETS, DelayedScaling, HighPrecision, Recipe
from octavo_torch import DelayedState, grouped_linear, grouped_mlp, grouped_mm, moe_mlp, quantize_weight
from octavo_torch.dispatch import rounded
from octavo_torch.dispatch.layer_spec import LayerRequest, LayerSpec
from octavo_torch.linear.functional import explain_linear

G, N, K, F, M, T = 4, 144, 176, 112, 260, 90
NATIVE = "torch-native"
RECIPES: dict[str, Recipe] = {**PRESETS, "fp8-delayed": DelayedScaling(history=4), "bf16": HighPrecision()}
DEVICES = ["cpu", pytest.param("cuda", marks=MARKS)]
SIZES = [100, 0, 33, 101]


def turned(w: Tensor) -> Tensor:
    """`w` [G, N, K] in memory as [G, K, N]; a leaf."""
    return w.detach().mT.contiguous().mT.requires_grad_()


def states_of(recipe: Recipe, device: str, count: int) -> Any:
    made = [DelayedState.create(recipe, G, device) for _ in range(count)] if isinstance(recipe, DelayedScaling) else []
    for state in made:
        state.scale.add_(torch.linspace(0, 1, 3 * G, device=device).view(3, G))
    return None if not made else made[0] if count == 1 else tuple(made)


def drawn(device: str, **shapes: tuple[int, ...]) -> dict[str, Tensor]:
    """Leaves of these shapes."""
    made = {name: torch.randn(shape, device=device) * shape[-1] ** -0.5 for name, shape in shapes.items()}
    return {name: value.bfloat16().requires_grad_() for name, value in made.items()}


def results(run: Any, given: dict[str, Tensor]) -> list[Tensor]:
    """The result and the gradients of `given`."""
    y = run(given)
    torch.manual_seed(1)  # of the gradient of y
    grads = torch.autograd.grad(y, list(given.values()), torch.randn_like(y), allow_unused=True)
    return [y, *(grad for grad in grads if grad is not None)]


def assert_equal(ours: Sequence[Tensor], theirs: Sequence[Tensor], what: object) -> None:
    assert [torch.equal(a, b) for a, b in zip(ours, theirs, strict=True)] == [True] * len(theirs), what


class Copied(TorchDispatchMode):
    """The sizes of what is copied, in elements."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.ops.aten.clone.default, torch.ops.aten.copy_.default, torch.ops.aten._to_copy.default):
            self.sizes.append(args[0].numel())
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", RECIPES)
def test_a_layer_has_the_bits_and_copies_nothing(name: str, device: str, rng: np.random.Generator) -> None:
    """y, dx and dw of every recipe, with a bias; dw lies as w does, so that autograd takes it without a copy."""
    chosen, sizes = RECIPES[name], torch.tensor(SIZES, device=device)
    given = drawn(device, x=(M, K), weight=(G, N, K), bias=(G, N))
    other = {**given, "weight": turned(given["weight"])}
    plan = str(explain_linear(other["x"], other["weight"], sizes, recipe=chosen, backend=NATIVE))
    assert "w read as [G, K, N]" in plan

    def run(given: dict[str, Tensor]) -> Tensor:
        state = states_of(chosen, device, 1)
        return grouped_linear(group_sizes=sizes, recipe=chosen, seed=7, state=state, backend=NATIVE, **given)

    expected = results(run, given)
    with Copied() as copied:
        made = results(run, other)
    assert_equal(made, expected, name)
    assert made[2].mT.is_contiguous()
    assert max(copied.sizes, default=0) < G * N * K


def test_a_weight_is_turned_for_kernels_that_round_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a backend's kernels round [G, N, K] to MXFP4 alone, [G, K, N] would be rounded by torch's operations in a
    dozen passes: the experts of gpt-oss took 4.4 times as long with those. Where both are, or neither is, there is
    nothing to turn for."""
    x, weight = torch.zeros(M, K).bfloat16(), torch.zeros(G, N, K).bfloat16()

    def orders_of_plans() -> list[str]:
        orders = (weight, turned(weight))
        requests = [LayerRequest.of(RECIPES["mxfp4"], x, w, False, True, True, NATIVE, False) for w in orders]
        return [LayerSpec.planned(request).plan.fprop.request.weight for request in requests]

    assert orders_of_plans() == ["nk", "kn"]
    monkeypatch.setattr(rounded, "_is_rounded_here", lambda plan: plan.fprop.request.weight == "kn")
    assert orders_of_plans() == ["nk", "nk"]
    monkeypatch.setattr(rounded, "_is_rounded_here", lambda plan: True)
    assert orders_of_plans() == ["nk", "kn"]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", ["bf16", "fp8-current", "fp8-block", "mxfp4", "mxfp8", "nvfp4"])
@pytest.mark.parametrize("interleave", [None, 1, 8])
def test_experts_have_the_bits(name: str, interleave: int | None, device: str, rng: np.random.Generator) -> None:
    """grouped_mlp, and moe_mlp in its default form and in another one that each run draws: both weights turned, and one
    of them; gates in turns as gpt-oss has them."""
    chosen = RECIPES[name]
    shapes = {"x": (T, K), "w1": (G, 2 * F, K), "w2": (G, N, F), "bias1": (G, 2 * F), "bias2": (G, N)}
    given = drawn(device, **shapes)
    both = {**given, **{name: turned(given[name]) for name in ("w1", "w2")}}
    one = str(rng.choice(["w1", "w2"]))
    orders = both, {**given, one: both[one]}
    how: dict[str, Any] = {"recipe": chosen, "seed": 7, "backend": NATIVE, "interleave": interleave}
    how["activation"] = "clamped_swiglu"
    sizes = torch.tensor([30, 0, 41, 10], device=device)

    def mlp(given: dict[str, Tensor]) -> Tensor:
        return grouped_mlp(group_sizes=sizes, **given, **how)

    expected = results(mlp, given)
    for other in orders:
        assert_equal(results(mlp, other), expected, one)
    choices = torch.from_numpy(rng.choice([0, 2, 3, -1], (T, 3))).to(device)
    weights = torch.rand(T, 3, device=device)
    other_form = [("keep_all", "remake"), ("lean", "remake"), ("recompute", "keep")][int(rng.integers(3))]
    for form, codes in (("standard", "keep"), other_form):

        def moe(given: dict[str, Tensor], form: Any = form, codes: Any = codes) -> Tensor:
            return moe_mlp(choices=choices, weights=weights, form=form, weight_codes=codes, **given, **how)

        expected = results(moe, given)
        for other in orders:
            made = results(moe, other)
            assert_equal(made, expected, (form, codes, one))
            for dw, weight in zip(made[2:4], ("w1", "w2"), strict=True):
                assert dw.stride() == other[weight].stride()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", ["fp8-delayed", "fp8-row", "fp8-block", "mxfp4", "mxfp8"])
def test_codes_that_are_made_once(name: str, device: str, rng: np.random.Generator) -> None:
    """quantize_weight, written again in place, takes the weight's place; a weight that is moved has to be quantized
    again, for the planes of its codes have traded places."""
    chosen, sizes = RECIPES[name], torch.tensor(SIZES, device=device)
    given = drawn(device, x=(M, K), weight=(G, N, K))
    state = states_of(chosen, device, 1)
    results_of = {}
    for order, weight in (("nk", given["weight"]), ("kn", turned(given["weight"]))):
        codes = quantize_weight(weight, chosen, seed=7, state=copy.deepcopy(state), backend=NATIVE)
        assert codes.order == order
        with torch.no_grad():
            weight.mul_(0.5)
        codes = quantize_weight(weight, chosen, seed=7, state=copy.deepcopy(state), backend=NATIVE, out=codes)
        how: dict[str, Any] = {"recipe": chosen, "seed": 7, "state": copy.deepcopy(state), "backend": NATIVE}
        y = grouped_linear(given["x"], codes, sizes, **how)
        results_of[order] = [y, *torch.autograd.grad(y, (given["x"], weight), torch.ones_like(y))]
    assert_equal(results_of["kn"], results_of["nk"], name)
    codes.weight = weight.detach().contiguous().requires_grad_()
    with pytest.raises(ValueError, match=r"quantized as \[G, K, N\] and the call reads it as \[G, N, K\]"):
        grouped_linear(given["x"], codes, sizes, **how)


def test_who_takes_them_the_other_way_alone_gets_a_copy(rng: np.random.Generator) -> None:
    """A backend is chosen whatever the order is: the reference transposes, and says so."""
    sizes = torch.tensor(SIZES)
    given = drawn("cpu", x=(M, K), weight=(G, N, K))
    other = {**given, "weight": turned(given["weight"])}
    how: dict[str, Any] = {"recipe": PRESETS["fp8-block"], "backend": "torch-reference"}
    assert "w [G, K, N] transposed to [G, N, K] and dw back" in str(
        explain_linear(other["x"], other["weight"], sizes, **how)
    )
    runs = [results(lambda given: grouped_linear(group_sizes=sizes, **given, **how), one) for one in (given, other)]
    assert_equal(runs[1], runs[0], "torch-reference")


def test_main_grad_is_written_in_its_own_order(rng: np.random.Generator) -> None:
    """A buffer [G, N, K] of a weight that lies as [G, K, N] receives the sums in place."""
    sizes = torch.tensor(SIZES)
    given = drawn("cpu", x=(M, K), weight=(G, N, K))
    buffers = []
    for weight in (given["weight"], turned(given["weight"])):
        weight.main_grad = torch.full((G, N, K), 0.25)  # type: ignore[attr-defined]
        y = grouped_linear(given["x"], weight, sizes, recipe="fp8-block", backend=NATIVE, main_grad="accumulate")
        y.backward(torch.ones_like(y))
        buffers.append(weight.main_grad)  # type: ignore[attr-defined]
    assert_equal(buffers[1:], buffers[:1], "main_grad")


@pytest.mark.parametrize("device", DEVICES)
def test_grouped_mm_and_a_compiled_layer(device: str, rng: np.random.Generator) -> None:
    """b [G, K, N], as torch's grouped_mm takes it, is such a weight; a graph reads it as it lies, too."""
    given = drawn(device, x=(M, K), weight=(G, N, K))
    b = given["weight"].detach().mT.contiguous().requires_grad_()
    sizes = torch.tensor(SIZES, device=device)
    ends = torch.cumsum(sizes, 0).to(torch.int32)
    how: dict[str, Any] = {"recipe": "fp8-block", "backend": NATIVE}
    expected = results(lambda given: grouped_linear(group_sizes=sizes, **given, **how), given)
    made = results(
        lambda given: grouped_mm(given["x"], given["b"], ends, recipe="fp8-block"), {"x": given["x"], "b": b}
    )
    assert_equal([*made[:2], made[2].mT], expected, "grouped_mm")
    compiled = torch.compile(lambda x, b: grouped_linear(x, b.mT, sizes, **how), fullgraph=True, backend="aot_eager")
    made = results(lambda given: compiled(given["x"], given["b"]), {"x": given["x"], "b": b})
    assert_equal([*made[:2], made[2].mT], expected, "compiled")
