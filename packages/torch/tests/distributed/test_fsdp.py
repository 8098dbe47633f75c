"""FSDP2 over grouped layers: shards on every dim train as one process does, and weights are gathered as codes."""

from __future__ import annotations

import pytest
import torch
from rank_work.fsdp import (
    RECIPES,
    K,
    M,
    accumulate_with_an_empty_rank,
    codes_of_a_step,
    layer_of,
    linear_layers,
    mlp_and_uneven,
    poison,
    train_all_dims,
    train_compiled,
    train_tied,
    train_ways,
)
from rank_work.fsdp_autocast import train_in_autocast
from ranks import WORLD, Ranks
from torch import nn

from octavo import MXFP8
from octavo_torch import GroupedLinear, explain_gather, quantize_before_gather, unchanged_weights
from octavo_torch.distributed.fsdp import shard
from octavo_torch.distributed.fsdp.route import route_of

VALUES = {"bf16": (0, 1, 2), "bf16 backward": (0, 1, 2), "fp8-row": (1, 2)}
"""Recipes, and dims on which their weights are gathered as values; all else is gathered as codes."""


# ---- the bits of one process


@pytest.mark.parametrize("name", RECIPES)
def test_shards_on_every_dim_give_the_bits_of_one_process(name: str, ranks: Ranks) -> None:
    """Results, gradients and weights after optimizer steps, with norms for clipping; codes are gathered wherever the
    recipe's scales allow it, and `explain_gather` says what was done (faults.md 49)."""
    for answer in ranks(train_all_dims, name):
        for dim, (equal, norm, kinds, told) in enumerate(answer):
            assert all(equal), (dim, equal)
            assert norm < 2**-7  # a bf16 result, each
            values = dim in VALUES.get(name, ())
            assert kinds == {not values}
            assert ("gathered unquantized" in told) == values, told


# ---- ways of training


def test_ways_of_training_change_no_bit(ranks: Ranks) -> None:
    """Gathered once, checkpointed both ways, offloaded to the CPU, mixed precision."""
    for answer in ranks(train_ways):
        assert len(answer) == 5
        assert all(all(equal) for equal in answer.values()), answer


def test_autocast_quantizes_what_one_process_quantizes(ranks: Ranks) -> None:
    """Shards in fp32 are cast to autocast's dtype, then quantized; codes had been those of the fp32 values. The
    gather for the backward, which is outside of autocast, makes the codes of the forward. Scales of NVFP4, which are
    E4M3, were joined by torch.cat, which autocast refuses them."""
    for answer in ranks(train_in_autocast, ["fp8-block", "fp8-delayed", "nvfp4"]):
        assert len(answer) == 6
        assert all(all(equal) for equal in answer.values()), answer


def test_shards_are_padded_inside_of_autocast_for_another_dtype() -> None:
    """As shards in bf16 are inside of the default on CUDA, fp16: torch's own cat is refused there."""
    with torch.autocast("cpu", torch.float16):
        padded = shard._padded(torch.ones(1, 4, dtype=torch.bfloat16), torch.Size((3, 4)), 0, 2)
    assert torch.equal(padded, torch.tensor([[1.0], [0.0]], dtype=torch.bfloat16).expand(2, 4))


def test_tied_weights_stay_tied(ranks: Ranks) -> None:
    """quantize_before_gather keeps one parameter where two layers have one, and its bits are those of one process."""
    for answer in ranks(train_tied):
        assert len(answer) == 2 * 2 + 3  # of two steps, and three parameters
        assert all(answer), answer


def test_compiled_layers_read_gathered_codes(ranks: Ranks) -> None:
    """torch.compile before or after fully_shard, one graph without a break; codes stay codes, shared planes one. They
    are freed between forward and backward, compiled and not: autograd holds the rows' codes, and no copy of these."""
    for rank, answer in enumerate(ranks(train_compiled)):
        for equal, graphs, held, told in answer:
            assert all(equal), equal
            assert all(M * K <= count < 4 * M * K for count in held), held
            assert graphs == (not rank)
            assert "quantized, then gathered" in told


def test_gradients_are_the_mean_over_ranks_and_microbatches(ranks: Ranks) -> None:
    """One without tokens takes part in every collective (faults.md 54, 55)."""
    for answer in ranks(accumulate_with_an_empty_rank):
        assert answer == [True, True]


def test_codes_of_a_step(ranks: Ranks) -> None:
    """In `unchanged_weights` a shard is quantized once for all microbatches, and its amax reduced once: the same bits.
    A weight that is written in the block is not served old codes (faults.md 37)."""
    for found, told in ranks(codes_of_a_step):
        for equal, counts in found:
            assert all(equal)
            assert counts == [8, 2]  # two gathers per microbatch
        assert "has changed inside unchanged_weights; leave the block before weights are written" in told


def test_mlps_and_shards_that_are_not_equal(ranks: Ranks) -> None:
    """Both weights of a GroupedMLP; five experts on four ranks are gathered as values, and that is said."""
    for uneven, first, equal, told, refused in ranks(mlp_and_uneven):
        assert uneven
        assert first.count("5 does not divide by 4 ranks") == 2
        assert equal == [True, True]
        assert told.count("quantized, then gathered") == 2
        assert "call quantize_before_gather first" in refused


def test_linear_layers_are_gathered_as_values(ranks: Ranks) -> None:
    """One matrix for all rows: the bits of one process, scales included; tensor parallelism, which FSDP2 is not and
    which torch offers for its own linear layers, is refused when the layer is called."""
    for equal, told, refused in ranks(linear_layers):
        assert all(equal), equal
        assert told == "weight: gathered unquantized: it is one matrix"
        assert "leave this layer out of the parallelize plan" in refused


def test_an_overflow_in_one_shard_is_not_hidden(ranks: Ranks) -> None:
    """NaN wins the reduction of the amax: the whole group is NaN on every rank, and no other."""
    assert ranks(poison, 1) == [(True, True)] * WORLD


# ---- what is decided, and what is refused


@pytest.mark.parametrize(
    ("name", "shape", "dim", "why"),
    [
        ("fp8-block", (4, 384, 512), 1, "a rank has 96 of 384, which would cut a block of 128"),
        ("mxfp8", (4, 96, 64), 1, "a rank has 24 of 96, which would cut a block of 32"),
        ("nvfp4", (4, 64, 96), 2, "a rank has 24 of 96, which would cut a block of 16"),
        ("fp8-row", (4, 64, 64), 2, "one of row scaling's scales covers all of K"),
        ("bf16", (4, 64, 64), 0, "fprop and dgrad of recipe high_precision read values"),
        ("fp8-current", (6, 64, 64), 0, "6 does not divide by 4 ranks"),
        ("fp8-current", (4, 64, 64), 1, ""),
        ("fp8-block", (4, 512, 96), 1, ""),
        ("fp8-row", (4, 64, 64), 0, ""),
    ],
)
def test_blocks_are_not_cut(name: str, shape: tuple[int, ...], dim: int, why: str) -> None:
    """Codes are gathered only where a shard's are those of the whole weight."""
    route = route_of(RECIPES[name], shape, dim, 4)
    assert (route.spec is None) == bool(why)
    assert why in str(route)
    assert "there is one rank" in str(route_of(RECIPES[name], shape, dim, 1))


def test_what_is_refused() -> None:
    """A module without grouped layers; values of a weight that is codes alone."""
    with pytest.raises(ValueError, match="without a GroupedLinear"):
        quantize_before_gather(nn.Linear(4, 4))
    assert "quantize_before_gather was not called" in explain_gather(layer_of(MXFP8(), 2, 8, 8))
    layer = layer_of(MXFP8(), 2, 8, 8)
    parted = GroupedLinear(2, 8, 8, recipe=MXFP8(), per_group_parameters=True)
    with pytest.raises(ValueError, match="without a GroupedLinear or GroupedMLP that has its weights in one parameter"):
        quantize_before_gather(parted)
    assert explain_gather(parted) == "weight: gathered unquantized: it has one parameter per group"
    with pytest.raises(ValueError, match="call quantize_before_gather first"), unchanged_weights(layer):
        raise AssertionError
    quantize_before_gather(layer)
    assert explain_gather(layer) == "weight: not gathered yet"
