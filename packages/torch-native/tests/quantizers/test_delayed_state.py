"""Delayed scaling's state: one launch for an amax and one for the end of a step, the bits of the reference."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
import pytest
import torch
from cuda_device import MARKS

import octavo_registry
from octavo import DelayedScaling
from octavo_torch import DelayedState
from octavo_torch_native.quantizers import delayed

DEVICES = ["cpu", pytest.param("cuda", marks=MARKS)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("algorithm", ["max", "most_recent"])
def test_scales_of_a_step_in_one_launch(
    algorithm: Literal["max", "most_recent"], device: str, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Histories and scales of x, w and dy after several steps of two microbatches, groups without tokens and odd amaxes
    among them: each amax that is recorded is one launch, and so is the end of a step."""
    recipe = DelayedScaling(history=5, algorithm=algorithm, margin=1)
    ours, expected = (DelayedState.create(recipe, 40, device) for _ in range(2))
    launches: list[Any] = []
    real = delayed.submit
    monkeypatch.setattr(delayed, "submit", lambda *given, **rest: (launches.append(given[0]), real(*given, **rest))[1])
    odd = torch.tensor([0.0, torch.inf, torch.nan, 1e-42, 3e38])
    for step in range(12):
        for operand in 2 * ("x", "w", "dy"):
            drawn = torch.where(torch.rand(40) < 0.4, odd[torch.randint(5, (40,))], torch.rand(40) * 100).to(device)
            for state, backend in ((ours, "torch-native"), (expected, "torch-reference")):
                with octavo_registry.prefer(backend):
                    state.record(operand, drawn)  # type: ignore[arg-type]
            assert torch.equal(ours.history, expected.history)
        with octavo_registry.prefer("torch-native"):
            ours.update()
        assert len(launches) == 7 * (step + 1)
        with octavo_registry.prefer("torch-reference"):
            expected.update()
        assert torch.equal(ours.history, expected.history)
        assert torch.equal(ours.scale, expected.scale)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("algorithm", ["max", "most_recent"])
def test_an_amax_of_another_rank(
    algorithm: Literal["max", "most_recent"], device: str, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What all_reduce leaves takes the place of this rank's amax, where it is not 0 or NaN: the reference's bits."""
    others = torch.tensor([5.0, 0.0, torch.nan, 7.0], device=device)
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda reduced, op, group: reduced.copy_(others))
    recipe, own = DelayedScaling(history=3, algorithm=algorithm), torch.rand(4, device=device)
    states: dict[str, DelayedState] = {}
    for backend in ("torch-native", "torch-reference"):
        states[backend] = DelayedState.create(recipe, 4, device)
        for operand in ("x", "w", "dy"):
            states[backend].record(operand, own)  # type: ignore[arg-type]
        with octavo_registry.prefer(backend):
            states[backend].update(process_group=object())  # type: ignore[arg-type]  # all_reduce is not torch's here
    ours, expected = states.values()
    assert torch.equal(ours.history, expected.history)
    assert torch.equal(ours.scale, expected.scale)
    assert ours.history[0, -1].tolist() == [5.0, own[1].item(), own[2].item(), 7.0]


def test_a_state_that_stands_in_steps() -> None:
    """Strided tensors take the operations one by one, with the same bits."""
    recipe = DelayedScaling(history=3)
    whole = DelayedState.create(recipe, 4)
    parts = DelayedState(recipe, torch.zeros(3, 3, 8)[..., ::2], torch.ones(3, 8)[:, ::2])
    for state in (whole, parts):
        state.record("x", torch.tensor([1.0, 0.0, 3.0, torch.nan]))
        state.update()
    assert torch.equal(whole.history, parts.history)
    assert torch.equal(whole.scale, parts.scale)
