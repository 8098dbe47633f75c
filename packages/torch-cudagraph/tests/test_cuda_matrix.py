"""Layers, MLPs and Sequentials of every kind in a graph against eager, bit for bit.

dtype x recipe x parameters per group x bias x main_grad x module x sizes: by default a selection in which every two
options meet, with --slow the whole product. Skipped where torch sees no Hopper device or octavo-native was built
without CUDA kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import product
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from covering import pairwise
from graph_layers import MARKS, Differences, G, K, M, N, splits
from torch import Tensor, nn

import octavo_torch_cudagraph as graphs
from octavo_conformance.cards.variants import RECIPES
from octavo_torch import Activation, GroupedLinear, GroupedMLP, Sequential, update_scales
from octavo_torch.compiler.graphs import no_waiting
from octavo_torch_cudagraph.restoring import state_of

F = 144
REPLAYS = 6


class Case(NamedTuple):
    """What is captured."""

    module: str
    recipe: str
    dtype: str
    parameters: str
    bias: str
    main_grad: str
    sizes: str


AXES: dict[str, Sequence[str]] = {
    "module": ("linear", "mlp", "sequential"),
    "recipe": tuple(RECIPES),
    "dtype": ("bfloat16", "float16"),
    "parameters": ("single", "per group", "weight per group", "bias per group"),
    "bias": ("no bias", "bias", "scaled bias"),
    "main_grad": ("grad", "accumulate", "overwrite"),
    "sizes": ("fixed", "changed"),
}
PARTED: dict[str, Any] = {
    "single": False,
    "per group": True,
    "weight per group": {"weight"},
    "bias per group": {"bias"},
}


def is_sensible(case: Case) -> bool:
    """Without a bias two of the forms of parameters are the other two."""
    return case.bias != "no bias" or case.parameters in ("single", "per group")


CHOSEN = [Case(*case) for case in pairwise(AXES)]
OTHERS = [case for case in map(Case._make, product(*AXES.values())) if is_sensible(case) and case not in CHOSEN]


def module_of(case: Case, backend: str | None) -> nn.Module:
    """The module of a case, with main_grad where it has some."""
    options: dict[str, Any] = {
        "bias": case.bias != "no bias", "recipe": RECIPES[case.recipe], "device": "cuda",
        "dtype": getattr(torch, case.dtype), "backend": backend, "seed": 1,
        "main_grad": None if case.main_grad == "grad" else case.main_grad,
        "per_group_parameters": PARTED[case.parameters],
    }  # fmt: skip
    made: nn.Module
    if case.module == "linear":
        made = GroupedLinear(G, K, N, **options)
    elif case.module == "mlp":
        made = GroupedMLP(G, K, F, N, **options)
    else:
        made = Sequential(GroupedLinear(G, K, 2 * F, **options), Activation(), GroupedLinear(G, F, N, **options))
    for name, parameter in made.named_parameters():
        if case.main_grad != "grad" and "weight" in name:
            parameter.main_grad = torch.zeros(parameter.shape, device="cuda")  # type: ignore[attr-defined]
    return made


def arguments_of(case: Case, split: Sequence[int]) -> tuple[Tensor, ...]:
    """x, dy, one number per row for probs and another for scales, sizes; NaN past the sum."""
    x, dy = torch.randn(M, K, device="cuda"), 4 * torch.randn(M, N, device="cuda")
    probs, scales = torch.rand(M, device="cuda"), torch.randn(M, device="cuda")
    for value in (x, dy, probs, scales):
        value[sum(split) :] = torch.nan
    dtype = getattr(torch, case.dtype)
    return x.to(dtype), dy.to(dtype), probs, scales, torch.tensor(split, device="cuda", dtype=torch.int32)


def step_of(module: nn.Module, case: Case, fixed: Tensor | None) -> Callable[..., tuple[Tensor, ...]]:
    """y and every gradient; sizes that do not change are no argument but something that the function closes over."""

    def step(x: Tensor, dy: Tensor, probs: Tensor, scales: Tensor, sizes: Tensor) -> tuple[Tensor, ...]:
        leaves = [value.detach().requires_grad_() for value in (x, probs, scales)]
        scaled = leaves[2] if case.bias == "scaled bias" else None
        of_groups = sizes if fixed is None else fixed
        if case.module == "linear":
            wanted, y = [leaves[0]], module(leaves[0], of_groups, bias_scales=scaled)
        else:
            wanted, y = leaves[:2], module(leaves[0], of_groups, leaves[1], bias2_scales=scaled)
        wanted = [*wanted, *([] if scaled is None else [scaled]), *module.parameters()]
        grads = torch.autograd.grad(y, wanted, dy)
        update_scales(module)
        return y, *grads

    return step


def captured_equals_eager(case: Case, rng: np.random.Generator) -> None:
    module, twin = module_of(case, None), module_of(case, "torch-native")

    @torch.no_grad()
    def same_state() -> None:
        for ours, theirs in zip(state_of(module), state_of(twin), strict=True):
            theirs.copy_(ours)

    every = splits(rng, REPLAYS)
    fixed = None
    if case.sizes == "fixed":
        every = every[2:3] * REPLAYS
        fixed = torch.tensor(every[0], device="cuda", dtype=torch.int32)
    captured = graphs.capture(step_of(module, case, fixed), *arguments_of(case, [7] * G), restore=state_of(module))
    eager = step_of(twin, case, None)
    same_state()
    wrong = Differences()
    for number, split in enumerate(every):
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.normal_(std=0.1)
                if hasattr(parameter, "main_grad"):
                    parameter.main_grad.normal_()
        same_state()
        given = arguments_of(case, split)
        with no_waiting():
            made, expected = captured(*given), eager(*given)
            wrong.add(
                f"{case}, replay {number}, sizes {split}", [*made, *state_of(module)], [*expected, *state_of(twin)]
            )
    wrong.none()


@pytest.mark.parametrize("case", CHOSEN, ids="-".join)
@pytest.mark.skipif(MARKS[0].args[0], reason=MARKS[0].kwargs["reason"])
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_captured_equals_eager(case: Case, rng: np.random.Generator) -> None:
    """Inputs, parameters, main_grad, states and seeds, and sizes unless fixed, change between replays; nothing waits
    (faults 33, 35, 36, 37)."""
    captured_equals_eager(case, rng)


@pytest.mark.slow
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("module", AXES["module"])
@pytest.mark.skipif(MARKS[0].args[0], reason=MARKS[0].kwargs["reason"])
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_the_whole_product_equals_eager(module: str, recipe: str, rng: np.random.Generator) -> None:
    """Every other case of the product, likewise."""
    for case in OTHERS:
        if (case.module, case.recipe) == (module, recipe):
            captured_equals_eager(case, rng)


def test_the_selection_holds_every_pair() -> None:
    """Of options on different axes; and it is a small part of the product."""
    for (first, ours), (second, theirs) in product(enumerate(AXES.values()), repeat=2):
        if first < second:
            assert {(case[first], case[second]) for case in CHOSEN} == set(product(ours, theirs))
    assert len(CHOSEN) < len(OTHERS) / 30
