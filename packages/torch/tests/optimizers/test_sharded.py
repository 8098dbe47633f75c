"""AdamW over shards: DTensors of any placement that 8-bit blocks allow step with the bits of the whole."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from rank_work.adamw import fsdp_steps, gathered_at_one_rank, loaded_shards, resharded, sharded_steps
from ranks import Ranks


@pytest.mark.parametrize(("dtype", "state_bits"), [(torch.bfloat16, 8), (torch.float32, 32)])
def test_shards_step_as_the_whole(dtype: torch.dtype, state_bits: int, ranks: Ranks, rng: np.random.Generator) -> None:
    """Random bits belong to positions in the whole, so stochastic rounding does not depend on the number of ranks."""
    answers = ranks(sharded_steps, int(rng.integers(1 << 30)), dtype, state_bits)
    assert all(all(answer) for answer in answers), answers


def test_states_are_resharded_by_distributed_checkpoints(
    ranks: Ranks, rng: np.random.Generator, tmp_path: Path
) -> None:
    """8-bit codes, tops and masters come back under another placement, and parameters are written from masters."""
    answers = ranks(resharded, int(rng.integers(1 << 30)), str(tmp_path))
    assert all(all(answer) for answer in answers), answers


def test_states_are_gathered_at_one_rank_and_sent_from_there(ranks: Ranks, rng: np.random.Generator) -> None:
    """What torch gathers and sends holds tensors, numbers and strings; `master_dtype` as a dtype was refused."""
    answers = ranks(gathered_at_one_rank, int(rng.integers(1 << 30)))
    assert all(all(answer) for answer in answers), answers


def test_fsdp_shards_of_a_grouped_layer_step(ranks: Ranks, rng: np.random.Generator) -> None:
    """The shard that quantize_before_gather wraps is stepped in place; forward then gathers the new codes."""
    answers = ranks(fsdp_steps, int(rng.integers(1 << 30)))
    assert all(all(answer) for answer in answers), answers


def test_values_of_shards_that_a_step_would_undo(ranks: Ranks, rng: np.random.Generator) -> None:
    """A state dict that is loaded into a sharded model after its optimizer was created; DTensors count it."""
    for said in ranks(loaded_shards, int(rng.integers(1 << 30))):
        assert len(said) == 2
        assert all("was changed after this optimizer had written it" in each for each in said), said
