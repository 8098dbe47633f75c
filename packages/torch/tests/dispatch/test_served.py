"""Operations that torch computes where no backend serves them: a name that nobody has is no such case."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch

import octavo_registry
from octavo import DelayedScaling
from octavo_torch import AdamW, DelayedState, GroupedLinear, choose_experts, permute, unpermute

T, E, K = 12, 3, 16


def operations(rng: np.random.Generator) -> dict[str, Callable[..., Any]]:
    """Each of them, with its result; those that take a backend are given it."""
    x, logits = (torch.from_numpy(rng.standard_normal((T, side), np.float32)) for side in (K, E))
    choices = torch.from_numpy(rng.integers(-1, E, (T, 2)))
    rows, _, routing = permute(x, choices, E, backend="torch-reference")

    def step() -> torch.Tensor:
        parameter = torch.nn.Parameter(x.clone())
        parameter.grad = torch.ones_like(parameter)
        AdamW([parameter], lr=0.5).step()
        return parameter.detach()

    def update() -> torch.Tensor:
        state = DelayedState.create(DelayedScaling(history=2), E)
        state.history[:, 0] = 2.0
        state.update()
        return state.scale

    return {
        "permute": lambda **how: permute(x, choices, E, **how)[0],
        "unpermute": lambda **how: unpermute(rows, routing, **how),
        "weights as rows": lambda **how: routing.to_rows(torch.ones(T, 2), **how),
        "choose_experts": lambda **how: choose_experts(logits, 1, **how)[0],
        "AdamW": step,
        "update": update,
    }


@pytest.mark.parametrize("names", ["torch-nativ", ["torch-nativ", "torch-reference"]], ids=str)
def test_a_name_that_is_not_installed_is_refused(names: str | Sequence[str], rng: np.random.Generator) -> None:
    """As a layer refuses it, from an argument and from `prefer`; torch's operations were run in its place."""
    every = (names,) if isinstance(names, str) else names
    for name, run in operations(rng).items():
        with (
            octavo_registry.prefer(*every),
            pytest.raises(octavo_registry.UnknownBackendError, match="there is no backend 'torch-nativ'"),
        ):
            run()
        if name not in ("AdamW", "update"):
            with pytest.raises(octavo_registry.UnknownBackendError, match="there is no backend 'torch-nativ'"):
                run(backend=names)


def test_one_that_serves_none_of_them_leaves_them_to_torch(rng: np.random.Generator) -> None:
    """The reference moves no rows, chooses no experts and steps no parameters: that is no error, and torch's operations
    compute what they compute where nothing is preferred."""
    every = operations(rng)
    for name, run in every.items():
        with octavo_registry.prefer("torch-reference"):
            result = run()
        assert torch.equal(result, run()), name


@pytest.mark.parametrize("sizes", [[8, 4], torch.tensor([8, 4])], ids=["list", "tensor"])
def test_backends_are_told_where_sizes_are(sizes: Any) -> None:
    """Those that read them on a device alone have to refuse a call on the host."""
    layer = GroupedLinear(2, K, K, recipe="mxfp8", dtype=torch.bfloat16)
    plan = layer.explain(torch.ones(T, K, dtype=torch.bfloat16), sizes)
    assert {gemm.request.sizes for _, gemm in plan.gemms if gemm is not None} == {"host"}
