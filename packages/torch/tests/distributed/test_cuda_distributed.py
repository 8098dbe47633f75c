"""The work of several ranks on GPUs, over NCCL: skipped where there are fewer than two."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from rank_work.data_parallel import delayed_gradients, scales
from rank_work.distributed import columns_and_shards, expert_parallel, scales_with_an_empty_rank
from rank_work.fsdp import (
    accumulate_with_an_empty_rank,
    codes_of_a_step,
    poison,
    train_all_dims,
    train_compiled,
    train_ways,
)
from ranks import Ranks

BACKEND = "cpu:gloo,cuda:nccl"
RECIPES = ("bf16", "fp8-current", "fp8-delayed", "fp8-row", "fp8-block", "mxfp8", "mxfp8-square", "nvfp4")


@pytest.fixture(scope="module", params=[2, 4])
def gpus(request: pytest.FixtureRequest) -> Iterator[Ranks]:
    """A rank a GPU."""
    if torch.cuda.device_count() < request.param:
        pytest.skip(f"needs {request.param} GPUs, there are {torch.cuda.device_count()}")
    ranks = Ranks(request.param, BACKEND)
    yield ranks
    ranks.stop()


@pytest.mark.parametrize("recipe", RECIPES)
def test_shards_give_the_bits_of_one_gpu(recipe: str, gpus: Ranks) -> None:
    """FSDP2 along every dim, codes gathered: results, gradients and weights after optimizer steps (faults.md 49)."""
    for answer in gpus(train_all_dims, recipe):
        for dim, (equal, *_, told) in enumerate(answer):
            assert all(equal), (dim, equal, told)


def test_ways_of_training_change_no_bit(gpus: Ranks) -> None:
    """Gathered once, checkpointed both ways, offloaded to the CPU, mixed precision."""
    for answer in gpus(train_ways):
        assert all(all(equal) for equal in answer.values()), answer


def test_codes_of_a_step_and_compiled_layers(gpus: Ranks) -> None:
    """Codes kept for a step's microbatches, and gathered codes in a compiled graph: the same bits."""
    assert all(all(equal) for found, _ in gpus(codes_of_a_step) for equal, _ in found)
    assert all(all(equal) for answer in gpus(train_compiled) for equal, *_ in answer)


def test_data_parallel(gpus: Ranks) -> None:
    """Gradients that `backward_dw()` makes, and scales of all ranks, under DistributedDataParallel."""
    assert all(all(answer) for answer in gpus(delayed_gradients))
    assert all(all(answer) for answer in gpus(scales))


def test_a_rank_without_tokens(gpus: Ranks) -> None:
    """It takes part in every reduction: of gradients, of scales, of NaN (faults.md 54, 55)."""
    assert all(answer == [True, True] for answer in gpus(accumulate_with_an_empty_rank))
    assert all(answer == (True, True) for answer in gpus(scales_with_an_empty_rank))
    assert all(answer == (True, True) for answer in gpus(poison, 1))


@pytest.mark.parametrize("recipe", ["bf16", "fp8-row", "fp8-block", "mxfp8", "mxfp8-square"])
def test_expert_parallel_tokens_come_back_as_from_one_gpu(recipe: str, gpus: Ranks) -> None:
    """Results and gradients, bit for bit, with `all_to_all_single`; the last rank has no tokens. For recipes without an
    amax of a group, which would be of all ranks' rows."""
    assert all(answer == [True, True, True] for answer in gpus(expert_parallel, recipe))


def test_tensor_parallel_shards_are_gathered_as_codes(gpus: Ranks) -> None:
    """Tensor parallelism over two GPUs, FSDP2 over two others."""
    if gpus.world != 4:
        pytest.skip(f"needs 4 GPUs, this group has {gpus.world}")
    assert all(answer == [True, True, True] for answer in gpus(columns_and_shards))
