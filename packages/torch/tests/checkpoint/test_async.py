"""Checkpoints that are written while training goes on, with `torch.distributed.checkpoint.async_save`."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint import async_save, load
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from octavo_torch import AdamW, MoE, update_scales

T, E, K, F, C = 24, 3, 128, 64, 2


@pytest.fixture
def group() -> Iterator[None]:
    """This process alone: an asynchronous checkpoint needs a group with a backend for CPUs."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


class Run:
    """A layer and its optimizer."""

    def __init__(self, recipe: str, state_bits: Any) -> None:
        self.model = MoE(E, K, F, C, recipe=recipe, dtype=torch.bfloat16, seed=5)
        self.optimizer = AdamW(self.model.parameters(), lr=1e-2, state_bits=state_bits)

    def step(self, x: Tensor) -> None:
        self.model(x).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        update_scales(self.model)

    def state(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer}

    def values(self) -> dict[str, Tensor]:
        return {name: value.detach().clone() for name, value in self.model.state_dict().items()}


@pytest.mark.parametrize(("recipe", "state_bits"), [("fp8-delayed", 32), ("nvfp4", 8)])
def test_a_run_goes_on_from_a_checkpoint_of_a_step_that_has_passed(
    recipe: str, state_bits: int, group: None, tmp_path: Path, rng: np.random.Generator
) -> None:
    """Steps while it is written change parameters, scales, seeds and optimizer states in place; the checkpoint has
    those of its own step, and a run that resumes from it has every bit of the one that went on."""
    inputs = torch.from_numpy(rng.standard_normal((4, T, K))).bfloat16()
    first = Run(recipe, state_bits)
    for x in inputs[:2]:
        first.step(x)
    written = async_save(first.state(), checkpoint_id=str(tmp_path))
    assert isinstance(written, Future)
    for x in inputs[2:]:
        first.step(x)
    written.result()

    second = Run(recipe, state_bits)
    second.step(inputs[3])  # an optimizer has its states after a step
    restored = second.state()
    load(restored, checkpoint_id=str(tmp_path))
    set_state_dict(
        second.model,
        second.optimizer,
        model_state_dict=restored["model"],
        optim_state_dict=restored["optimizer"],
    )
    for x in inputs[2:]:
        second.step(x)
    wanted = first.values()
    for name, value in second.values().items():
        assert torch.equal(value, wanted[name]), name
