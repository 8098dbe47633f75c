"""Megatron's MoE layer as one layer of ours, over ranks: its router, shared experts, groups and configuration."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rank_work.megatron import config_of, ends, like_megatrons, otherwise, refusals, trains
from ranks import WORLD, Ranks

import octavo

pytestmark = [
    pytest.mark.skipif(
        find_spec("megatron") is None, reason="megatron-core is not installed; `nox -s adapters` installs it"
    ),
    pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning", "ignore::FutureWarning"),
]


def fresh() -> int:
    seed = secrets.randbits(24)
    print(f"seed {seed}")
    return seed


@pytest.fixture(scope="module")
def alone() -> Iterator[Ranks]:
    """Two processes that may end, and are then started anew."""
    two = Ranks(2)
    yield two
    two.stop()


CASES = {
    "shared expert": (4, octavo.MXFP8(), {"moe_shared_expert_intermediate_size": 32}),
    "replicas, delayed scaling, postponed gradients": (
        2, octavo.DelayedScaling(history=3), {"later": {"delay_wgrad_compute": True}},
    ),
    "parts of a sequence": (4, octavo.MXFP8(), {"tensor_model_parallel_size": 2, "sequence_parallel": True}),
    "biases": (4, octavo.BlockScaling(), {"add_bias_linear": True}),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_gradients_are_those_of_one_process(case: str, ranks: Ranks) -> None:
    """What routed experts give, the gradients of their tokens, of their weights by the router and of their parameters
    bit for bit, in two steps; the router's and the shared expert's gradients add up."""
    ep, recipe, changes = CASES[case]
    assert ranks(trains, fresh(), ep, {"recipe": recipe}, changes) == [[]] * WORLD


@pytest.mark.parametrize("changes", ["swiglu", "biases", "gpt-oss", "relu2"])
def test_it_computes_what_megatrons_layer_does(changes: str, ranks: Ranks) -> None:
    """Without quantization, from the same parameters: y, dx and every gradient, in fp32."""
    for answer in ranks(like_megatrons, fresh(), changes):
        assert max(answer) <= 2.0**-12, answer


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"moe_shared_expert_overlap": True}, "moe_shared_expert_overlap is True, and shared experts run beside"),
        ({"overlap_moe_expert_parallel_comm": True}, "overlap_moe_expert_parallel_comm is True"),
        ({"moe_token_dispatcher_type": "flex"}, "'flex', which reserves buffers .* give 'alltoall'"),
        ({"moe_pad_expert_input_to_capacity": True}, "no expert's rows are padded here"),
        ({"moe_apply_probs_on_input": True}, "probs multiply the activation here"),
        ({"cuda_graph_impl": "local", "cuda_graph_scope": []}, "captures the experts, .* such as attn"),
    ],
)
def test_configurations_that_are_refused(changes: dict[str, Any], error: str) -> None:
    """Before anything is built, with what to change and the adapter that leaves the exchange to Megatron."""
    from octavo_torch.adapters.megatron_moe import check_config

    one, four = (SimpleNamespace(expt_tp=SimpleNamespace(size=lambda size=size: size)) for size in (1, 4))
    check_config(config_of(1), one)
    with pytest.raises(ValueError, match="expert_tensor_parallel_size is 4; give 1"):
        check_config(config_of(1), four)
    with pytest.raises(ValueError, match=f"{error}.*builders with Megatron's own MoELayer"):
        check_config(config_of(1, later=changes), one)


def test_activations_that_are_refused() -> None:
    """Of which the experts have no formula."""
    from octavo_torch.adapters.megatron_moe import activation_of

    assert activation_of(config_of(1)) == "swiglu"
    for later in ({"activation_func": torch.tanh}, {"activation_func_clamp_value": 5.0}, {"glu_linear_offset": 1.0}):
        with pytest.raises(ValueError, match="moe_layer has silu, gelu and squared_relu"):
            activation_of(config_of(1, later=later))


def test_choices_of_a_routing_map() -> None:
    """In the experts' order, and -1 where a choice was dropped."""
    from octavo_torch.adapters.megatron_moe import choices_of

    routing = torch.tensor([[0, 1, 0, 1], [1, 0, 0, 0], [0, 0, 0, 0]], dtype=torch.bool)
    assert choices_of(routing, 2).tolist() == [[1, 3], [0, -1], [-1, -1]]


def test_experts_of_one_recipe_and_without_adapters(alone: Ranks) -> None:
    """Both layers run as one, so what changes one of them is told."""
    for recipes, adapters in alone(refusals):
        assert "are block" in recipes, recipes
        assert "convert both" in recipes, recipes
        assert "a layer of experts has adapters, and moe_layer runs both layers as one" in adapters, adapters


GRACE = 0.5
"""Seconds for which ranks wait for one another's word."""


def test_ranks_that_have_another_layer(alone: Ranks) -> None:
    """Each names the other, and what differs, at once (faults.md 54, 55)."""
    for rank, answers in enumerate(alone(otherwise)):
        for what, error, seconds in answers:
            assert f"rank {rank} of 2: rank {1 - rank} calls this layer otherwise" in error, (what, error)
            assert what in error, (what, error)
            assert seconds < 5


def test_a_rank_that_ends_is_named(alone: Ranks) -> None:
    """By the other one, in its backward, and not after torch's half hour."""
    (error, seconds), ended = alone.survivors(ends, GRACE)
    assert ended is None
    assert "no answer from rank 1:" in error, error
    assert seconds < GRACE + 3
