"""Process groups of experts: what is left of them, and calls in which they have nothing to do."""

from __future__ import annotations

import pickle
import secrets
from pathlib import Path

import pytest
import torch.distributed as dist
from experts_work.groups import NOTHING, file_of_one_rank, in_pairs, is_freed, of_others, without_tokens
from ranks import WORLD, Ranks

from octavo_torch import MoE


@pytest.mark.parametrize("route", ["collective", "peer"])
def test_a_group_is_freed_with_its_layers(route: str, ranks: Ranks) -> None:
    """What its static exchanges have agreed on does not keep it: its connections and threads end."""
    assert ranks(is_freed, route) == [True] * WORLD


@pytest.mark.parametrize("route", ["collective", "peer"])
def test_static_buffers_of_no_tokens(route: str, ranks: Ranks) -> None:
    """The last batch may have none, on every rank: an empty result, and gradients of zero."""
    assert ranks(without_tokens, route, secrets.randbits(24)) == [NOTHING] * WORLD


def test_ranks_of_a_part_are_named_as_all_ranks_know_them(ranks: Ranks) -> None:
    """Beside their numbers in the group, where these are others: logs and launchers have those of all ranks."""
    fine, first, again, last = ranks(in_pairs)
    assert fine == again == ""
    assert first.startswith("rank 0 (1 of all) of 2: rank 1 (3 of all) calls this layer otherwise: recipe"), first
    assert last.startswith("rank 1 (3 of all) of 2: rank 0 (1 of all) calls this layer otherwise: recipe"), last


def test_a_group_of_other_ranks(ranks: Ranks) -> None:
    """A rank that it lacks is told so, of torch's placeholder for such a group and of a mesh."""
    first, second, *outside = ranks(of_others)
    assert first == second == ["", ""]
    for rank, (of_group, of_mesh) in enumerate(outside, start=2):
        assert f"ep is what new_group returns on ranks outside of the group, such as this one, {rank};" in of_group
        assert f"without this rank, {rank}; create the layer on its ranks alone" in of_mesh


def test_a_file_of_one_rank_is_of_no_other(ranks: Ranks, tmp_path: Path) -> None:
    """Its experts have the names that the other ranks' have."""
    first, *others = ranks(file_of_one_rank, str(tmp_path))
    assert first == ["", ""]
    for rank, told in enumerate(others, start=1):
        for text in told:
            assert f"of how many, is [0, 8] in the checkpoint and [{2 * rank}, 8] here" in text


def test_a_module_with_a_group_is_not_pickled() -> None:
    """A sentence, where Python named a function in the module."""
    with pytest.raises(TypeError, match="a MoE with ep= has a process group, which no file or other process can hold"):
        pickle.dumps(MoE(4, 16, 32, 2, recipe=None, ep=dist.ProcessGroup(0, 2)))
