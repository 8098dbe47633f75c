"""Calls that would compute or keep something else than they say: each is refused, with what to give instead."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from octavo import BlockScaling, DelayedScaling
from octavo_torch import (
    DelayedState,
    GroupedLinear,
    GroupedMLP,
    MoeShape,
    Observer,
    Room,
    bytes_exchanged,
    expert_tensors,
    export_experts,
    quantize_weight,
    unstack_experts,
)
from octavo_torch.linear.coded_weight import CodedWeight
from octavo_torch.wgrad.main_grad import write_main_grad


def mlp(**changed: Any) -> GroupedMLP:
    """Two experts that every layout of a file holds, unless told."""
    return GroupedMLP(2, 128, 128, **{"recipe": BlockScaling(), "dtype": torch.bfloat16, **changed})


def buffers_of_two_dtypes() -> None:
    leaves = [nn.Parameter(torch.ones(16, 16)) for _ in range(2)]
    for leaf, dtype in zip(leaves, (torch.float32, torch.bfloat16), strict=True):
        leaf.main_grad = torch.zeros(16, 16, dtype=dtype)  # type: ignore[attr-defined]
    write_main_grad(lambda *_, **__: pytest.fail("written"), None, None, None, leaves, "accumulate")  # type: ignore


def values_into_delayed_codes() -> None:
    recipe = DelayedScaling()
    w = torch.ones(2, 32, 32)
    codes = quantize_weight(w, recipe, state=DelayedState.create(recipe, 2)).codes
    assert codes is not None
    CodedWeight(codes, recipe, torch.float32).copy_(w)


CALLS: dict[str, tuple[Callable[[], Any], str]] = {
    "names for an ungated MLP": (
        lambda: expert_tensors(mlp(activation="relu2"), "hf-fp8", names=("gate", "up", "down")),
        r"names is \['gate', 'up', 'down'\] and module has activation relu2; give a name for each of its 2 projections",
    ),
    "export without values": (
        lambda: expert_tensors(mlp(device="meta"), "hf-fp8"),
        "module is on the meta device and has no values; give one with memory",
    ),
    "names for stacked experts": (
        lambda: expert_tensors(mlp(), "gpt-oss-mxfp4", names=("gate", "up", "down")),
        "names is given and gpt-oss-mxfp4 has all experts under fixed names; leave it out",
    ),
    "export of what is no tensor": (
        lambda: export_experts(mlp(), "folder", "hf-fp8", others={"norm": 3}),  # type: ignore[dict-item]
        "others has 'norm': 3; give tensors with memory, under their names",
    ),
    "nothing to unstack": (
        lambda: unstack_experts({"router.weight": torch.ones(2, 2)}),
        "state_dict has no stacked experts; give one with keys such as 'experts.weight1'",
    ),
    "half a gate": (
        lambda: unstack_experts({"experts.weight1": torch.ones(2, 5, 4), "experts.weight2": torch.ones(2, 4, 2)}),
        "experts.weight1 has 5 rows; a gate needs an even number, or give two names",
    ),
    "buffers of two dtypes": (buffers_of_two_dtypes, "buffers .* are bfloat16 and float32; give one dtype"),
    "values into delayed codes": (
        values_into_delayed_codes,
        "values cannot be copied into codes of recipe delayed, whose scales come from earlier steps",
    ),
    "experts that ranks do not divide": (
        lambda: bytes_exchanged(MoeShape(64, 2, 10, 32, 32), 4),
        "shape has 10 experts for 4 ranks; give a multiple of 4",
    ),
    "choices of another k": (
        lambda: bytes_exchanged(MoeShape(64, 2, 8, 32, 32), 4, choices=torch.zeros(64, 3, dtype=torch.int64)),
        "choices has 3 per token and shape 2; give them alike",
    ),
    "room that is a number": (
        lambda: GroupedLinear(2, 32, 32, recipe="mxfp8", room=4),  # type: ignore[arg-type]
        "room is 4; give an octavo_torch.Room",
    ),
    "room beside a w2 that is not there": (
        lambda: GroupedLinear(2, 32, 32, recipe="mxfp8", room=Room(w2=4)),
        r"room is Room\(.*w2=4.*\) and one layer has no w2; give Room\(gemms=...\)",
    ),
    "no values to observe": (
        lambda: Observer(GroupedLinear(2, 32, 32, recipe="mxfp8", device="meta"), every=1, rows=8),
        "model is on the meta device and has no values to observe",
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_it_is_refused(name: str) -> None:
    """ValueError that names what was given."""
    call, message = CALLS[name]
    with pytest.raises(ValueError, match=message):
        call()
