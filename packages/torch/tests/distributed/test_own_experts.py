"""Experts over ranks are not copies of one another: who takes them for that is refused, and files hold all of them."""

from __future__ import annotations

import secrets
from pathlib import Path

from experts_work.own import exported, reduced, stored, wrapped
from experts_work.problems import E
from ranks import WORLD, Ranks


def test_wrappers_over_ranks_that_share_the_experts_are_refused(ranks: Ranks) -> None:
    """FSDP2 and FSDP1 would gather other ranks' experts into a weight, or into adapters, which FSDP2 may be given
    alone, and DistributedDataParallel gives all ranks one rank's."""
    for shards, of_adapters, copies, adapted, *flattened, replicas, sharded in ranks(wrapped):
        assert "weight1 is to be distributed over ranks" in shards
        assert "lora_A is to be distributed over ranks" in of_adapters
        assert "DistributedDataParallel over these ranks has given all of them one rank's" in copies
        assert adapted == copies
        assert len(flattened) == 2
        assert all("FullyShardedDataParallel has flattened them" in text for text in flattened)
        assert (replicas, sharded) == (True, True)


def test_scales_of_different_experts_are_not_mixed(ranks: Ranks) -> None:
    """The experts' ranks as the group change nothing; replicas and other experts at once are refused, before a layer of
    the model is changed, and where there are scales."""
    for equal, of_layer, of_model, of_megatron, unchanged, without_scales in ranks(reduced):
        assert equal
        assert "process_group has 4 ranks, of which ranks" in of_layer
        assert of_model == of_megatron == of_layer
        assert unchanged
        assert not without_scales


def test_sharded_checkpoints_hold_the_experts_of_all_ranks(ranks: Ranks, tmp_path: Path) -> None:
    """Biases, scales, adapters, and experts inside torch's wrapper for activation checkpointing: they were one rank's,
    on every rank."""
    assert ranks(stored, str(tmp_path)) == [[]] * WORLD


def test_exported_experts_have_their_own_numbers(ranks: Ranks, tmp_path: Path) -> None:
    """Each rank's tensors are those of other experts than the other ranks', and it loads those without being told their
    numbers, from a file of all experts and from its own; files of more experts and of other ranks are refused."""
    seed = secrets.randbits(24)
    print(f"seed {seed}")
    each = E // WORLD
    for rank, (numbers, equal, told) in enumerate(ranks(exported, str(tmp_path), seed)):
        assert numbers == [*range(rank * each, (rank + 1) * each)]
        assert equal == [True, True]
        assert f"has experts up to number {2 * E - 1}, and the {WORLD} ranks of ep= have {E}" in told[0]
        assert f"and not {rank * each}; give" in told[1]
