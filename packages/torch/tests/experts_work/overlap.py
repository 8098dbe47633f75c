"""What is called while a message is under way."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any
from unittest.mock import patch

from moe_layers import RECIPES

from experts_work.problems import draw, group_of, rows_of, run
from octavo_torch import Exchange
from octavo_torch.mlp import gradients
from octavo_torch.moe import forward, kept_operands
from octavo_torch.moe.call import MoeCall
from octavo_torch.moe.parallel.transports.peer import PeerTransport, _Message

_WATCHED = (
    ("choices have come", _Message, "ahead"),
    ("it has come", _Message, "rest"),
    ("weights' codes", forward, "_quantize_weights"),
    ("places", MoeCall, "place"),
    ("activation", kept_operands, "activation_again"),
    ("activation", kept_operands, "activation_of"),
    ("dw", gradients, "weight_gradient"),
)


def calls_beside_messages(ranks: int, recipe: str, seed: int) -> list[str]:
    """What is called in a second forward and backward, in its order: messages by their names when they start."""
    group, number = group_of(ranks)
    problem = draw(seed + number, [6] * ranks, "random")
    rows, pairs = rows_of(problem, ranks)
    seen: list[str] = []

    def watch(name: str, owner: Any, function: str) -> Any:
        watched = getattr(owner, function)

        def called(*given: Any, **named: Any) -> Any:
            seen.append(name or given[1])
            return watched(*given, **named)

        return patch.object(owner, function, called)

    def step() -> None:
        exchange = Exchange(rows=rows, pair_rows=pairs, returns="sums", route="peer")
        run(problem.mine(group.rank(), ranks), RECIPES[recipe], ep=group, exchange=exchange)

    step()
    with ExitStack() as stack:
        for each in (("", PeerTransport, "send"), *_WATCHED):
            stack.enter_context(watch(*each))
        step()
    return seen
