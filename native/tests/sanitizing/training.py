"""Routers, optimizers, states of delayed scaling, and GEMMs."""

from __future__ import annotations

import itertools
from dataclasses import replace
from functools import partial
from typing import get_args

import numpy as np
import torch
from adamw_calls import BF16, Run, define, draw, planes, same, step
from gemm_launches import KINDS, Launch
from move_calls import poisoned, stream
from problems import DTYPES, NATIVE_LAYOUT, Place, address
from router_bounds import gradient_is_bound, weights_are_bound
from router_calls import rule_of
from sanitizing.comparison import Comparison
from torch import Tensor

import octavo_native as native
import octavo_numerics as numerics
from octavo.router import RouterRule, Score


def routers(check: Comparison) -> None:
    """Choices by every score, by groups, and taken as given; the gradient of the logits."""
    kinds = itertools.product((1, 40, 60, 128, 256, 512, 1024), get_args(Score))
    for number, (experts, score) in enumerate(kinds):
        _routed(check, 33, experts, min(8, experts), score, tuple(DTYPES)[number % 3], number)


def _routed(check: Comparison, tokens: int, experts: int, k: int, score: Score, dtype: str, number: int) -> None:
    grouped = experts % 4 == 0 and number % 2 == 1
    logits = torch.randn(tokens, experts, generator=check.draw).to(DTYPES[dtype])
    dweights, bias = torch.randn(tokens, k, generator=check.draw), torch.zeros(experts)
    replay = torch.randint(-1, experts + 1, (tokens, k), generator=check.draw)
    groups = {"groups": 4, "kept_groups": 2} if grouped else {}
    rule = RouterRule(k, score, renormalize=number % 4 < 2, **groups)

    def run(place: Place) -> list[Tensor]:
        held = [tensor.to(place.device) for tensor in (logits, dweights, bias, replay)]
        given = native.Logits(
            data=address(held[0]), dtype=native.DTYPES[dtype], tokens=tokens, experts=experts, stride=experts
        )
        common = {**place.common, "stream": stream(place), "rule": rule_of(rule), "logits": given}
        choices, counts = (poisoned(side, torch.int64, place) for side in ((tokens, k), (experts,)))
        weights, dlogits = (
            poisoned(side, like, place) for side, like in (((tokens, k), torch.float32), (logits.shape, logits.dtype))
        )
        native.choose_experts(
            **common, bias=address(held[2]) if grouped else 0, replay=address(held[3]) if number % 5 == 0 else 0,
            choices=address(choices), weights=address(weights), counts=address(counts),
        )  # fmt: skip
        native.choose_gradient(**common, choices=address(choices), dweights=address(held[1]), dlogits=address(dlogits))
        return [tensor.cpu() for tensor in (choices, counts, weights, dlogits)]

    what = f"router of {experts} {score} {dtype}"
    made = check.both(what, run)
    if made is None:
        return
    if not grouped:  # sums of scores may tie by an identity that rounding breaks
        for name, ours, theirs in zip(("choices", "counts"), made[0], made[1], strict=False):
            check.same(f"{name} of {what}", ours.view(torch.uint8).numpy(), theirs.view(torch.uint8).numpy())
    values = logits.float().numpy().astype(dtype)
    for choices, _, weights, dlogits in made:
        choice = numerics.choose_experts(values, rule, None, choices.numpy())
        gradient = dlogits.float().numpy().astype(dtype)
        if not weights_are_bound(weights.numpy(), values, choice, rule):
            check.faults.append(f"{what}: weights are past octavo_numerics.choice_weights_bound")
        if not gradient_is_bound(gradient, values, choices.numpy(), dweights.numpy(), rule):
            check.faults.append(f"{what}: gradients are past octavo_numerics.choose_gradient_bound")


def optimizers(check: Comparison) -> None:
    """AdamW's step, which has no kernel on CPUs: against octavo_numerics."""
    if not check.place.cuda:
        return
    rng = np.random.default_rng(20)
    kinds = itertools.product(((3, 130, 132), (2, 7, 131)), (np.float32, BF16), (32, 8), (np.float32, BF16))
    for number, (shape, master, bits, grad) in enumerate(kinds):
        arrays, run = draw(rng, shape, master, grad, bits), Run(on_device=number % 2 == 1)
        held = planes(shape, NATIVE_LAYOUT["columnwise"]) if shape[2] % 4 == 0 else None
        made, wanted = step(*arrays, run, None if held is None else held.arguments), define(*arrays, run)
        wrong = [*same(made, wanted), *([] if held is None else held.differs(wanted.master))]
        check.equal += not wrong
        check.faults += [f"{name} of AdamW {shape} {master} {bits}" for name in wrong]
        values = replace(run, values=BF16)
        check.faults += [f"{name} of AdamW {shape}" for name in same(step(*arrays, values), define(*arrays, values))]


def states(check: Comparison) -> None:
    """Amaxes that are recorded and the scales of the next step, of one group to more than a CTA has threads."""
    kinds = itertools.product((1, 7, 300), (2, 257, 1024), (False, True), (False, True))
    for groups, slots, most_recent, reduce in kinds:
        history = torch.exp(torch.randn(3, slots, groups, generator=check.draw) * 8)
        amax, reduced = (torch.exp(torch.randn(3, groups, generator=check.draw) * 8) for _ in range(2))
        amax[0, 0], reduced[-1, -1], history[1, :, -1] = torch.nan, torch.inf, 0
        run = partial(_stepped, (history, amax, reduced if reduce else None), most_recent)
        what = f"delayed scaling of {groups} groups, {slots} slots"
        made = check.both(what, run)
        if made is not None:
            for name, ours, theirs in zip(("history", "scales"), *made, strict=True):
                check.same(f"{name} of {what}", ours.view(torch.uint8).numpy(), theirs.view(torch.uint8).numpy())


def _stepped(given: tuple[Tensor, Tensor, Tensor | None], most_recent: bool, place: Place) -> list[Tensor]:
    """History and scales after a step that records `amax`, those of all ranks beside it or not."""
    history, amax, reduced = (None if value is None else value.to(place.device, copy=True) for value in given)
    assert history is not None
    operands, slots, groups = history.shape
    scale = torch.ones(operands, groups, device=place.device)
    common = {
        "cuda": place.cuda, "stream": stream(place), "history": address(history), "slots": slots, "groups": groups
    }  # fmt: skip
    native.record_amax(amax=address(amax), operands=operands, **common)
    native.update_scales(
        scale=address(scale),
        maxima=[448.0, 448.0, 57344.0],
        most_recent=most_recent,
        reduced=address(reduced),
        **common,
    )
    return [history.cpu(), scale.cpu()]


def gemms(check: Comparison) -> None:
    """Every kind of GEMM on every tile; sizes, sides, biases and accumulators in turn."""
    for number, kind in tuple(enumerate(KINDS))[check.share]:
        launch = Launch(kind, number, check.draw)
        for tile in (-1, *range(launch.tiles)):

            def run(place: Place, launch: Launch = launch, tile: int = tile) -> Tensor:
                return launch.run(place, tile, unwritten=check.tail == "unwritten" and place.cuda)

            made = check.both(f"{launch} tile {tile}", run)
            if made is not None:
                check.same(f"{launch} tile {tile}", *(value.cpu().numpy() for value in made))
