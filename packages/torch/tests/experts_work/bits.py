"""Bits of one process: as rows, as codes, and the bound of partial sums."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import torch
from moe_layers import RECIPES, REFERENCE
from torch import Tensor

import octavo_numerics
from experts_work.problems import ROUTINGS, C, E, differences, draw, group_of, rows_of, run, shared, states_of
from octavo import Recipe
from octavo.payload import payload_spec
from octavo_torch import Exchange, dequantize, quantize
from octavo_torch.bridge import BRIDGE


def decoded(values: Tensor, payload: Recipe, operand: Any) -> Tensor:
    """What arrives of tokens that travel as codes."""
    with torch.no_grad():
        codes = quantize(values, payload_spec(payload, operand), backend=REFERENCE)
        return dequantize(codes, dtype=values.dtype, backend=REFERENCE)


def equal_to_one_process(ranks: int, recipes: list[str], seed: int, *exchange: str) -> list[str]:
    """What differs from one process with all tokens, over every recipe and routing; "static" with buffers that are as
    small as they can be, "peer" with those in memory of all ranks."""
    group, number = group_of(ranks)
    me = group.rank()
    own = slice(me * E // ranks, (me + 1) * E // ranks)
    cases, works, found = [], [], []
    for recipe_number, name in enumerate(recipes):
        recipe = RECIPES[name]
        for routing, counts in ROUTINGS.items():
            form = ("standard", "keep_all", "recompute", "lean")[(recipe_number + len(routing)) % 4]
            counts = [6] * ranks if "static" in exchange else counts[:ranks]
            problem = draw(seed + 10 * recipe_number + number, counts, routing, biased=routing == "one")
            how = {"form": form, "weight_codes": ("keep", "remake")[recipe_number % 2]}
            works.append(partial(run, problem, recipe, states_of(recipe, slice(None), seed), **how))
            cases.append((f"{name}, {routing}, {form}", problem, recipe, how))
    for (case, problem, recipe, how), whole in zip(cases, shared(group, works), strict=True):
        options: dict[str, Any] = {}
        if exchange:
            options = dict(zip(("rows", "pair_rows"), rows_of(problem, ranks), strict=True))
            options["route"] = "peer" if "peer" in exchange else "collective"
        mine = problem.mine(me, ranks)
        spread = run(mine, recipe, states_of(recipe, own, seed), ep=group, exchange=Exchange(**options), **how)
        found += [f"{case}: {each}" for each in differences(spread, whole, problem.counts, me, ranks)]
    return found


def strides_of_few_tokens(seed: int) -> list[str]:
    """Ranks that have no token, one or more, of rows that are parts of wider ones, where dy has strides of 0 as that of
    a sum has: what differs from one process. With static buffers every rank has one token."""
    group, number = group_of(4)
    me, found, recipe = group.rank(), [], RECIPES["mxfp8"]
    for counts, options in (
        ([0, 1, 3, 2], {}),
        ([1] * 4, {"rows": 4 * C}),
        ([1] * 4, {"rows": 4 * C, "route": "peer"}),
    ):
        problem = draw(seed + number, counts, "random")
        problem = problem._replace(dy=torch.ones(()).bfloat16().expand(problem.dy.shape))
        mine = problem.mine(me, 4)
        mine.given["x"] = torch.nn.functional.pad(mine.given["x"].detach(), (1, 0))[:, 1:].requires_grad_()
        spread = run(mine, recipe, ep=group, exchange=Exchange(**options))  # type: ignore[arg-type]
        found += [f"{options}: {each}" for each in differences(spread, run(problem, recipe), counts, me, 4)]
    return found


def travels_as_codes(ranks: int, seed: int) -> list[str]:
    """What differs where tokens and dy travel as codes of the recipe, whose scales are powers of two.

    y, dx and the choices' weights: from one process; weights' gradients: from one process of what codes stand for.
    """
    group, number = group_of(ranks)
    me = group.rank()
    found = []
    for recipe_number, name in enumerate(("fp8-block", "mxfp8", "fp8-row")):
        recipe = RECIPES[name]
        counts = ROUTINGS["random"][:ranks]
        problem = draw(seed + recipe_number + number, counts, "random")
        mine = problem.mine(me, ranks)
        whole = run(problem, recipe)
        again = problem.anew()._replace(dy=decoded(problem.dy, recipe, "dy"))
        with torch.no_grad():
            again.given["x"].copy_(decoded(problem.given["x"], recipe, "x"))
        of_codes = run(again, recipe)
        spread = run(mine, recipe, ep=group, exchange=Exchange(payload=recipe))
        exact = {"y", "dx", "dweights"}
        found += [f"{name}: {each}" for each in differences(spread, whole, counts, me, ranks) if each in exact]
        found += [f"{name} of codes: {each}" for each in differences(spread, of_codes, counts, me, ranks)]
    return found


def sums_and_their_bound(ranks: int, seed: int) -> list[float]:
    """The largest error of y and of dx over its bound, with one partial sum per rank; and of y as rows."""
    group, number = group_of(ranks)
    me = group.rank()
    counts = ROUTINGS["random"][:ranks]
    problem = draw(seed + number, counts, "random")
    mine = problem.mine(me, ranks)
    recipe = RECIPES["fp8-block"]
    rows = []
    for choice in range(C):  # alone, a choice's row is the result
        one = mine.choices.where(torch.arange(C) == choice, -1)
        made = run(mine.anew()._replace(choices=one), recipe, ep=group)
        rows.append((made.y, made.grads["x"]))
    experts = E // ranks
    owner = torch.where((mine.choices >= 0) & (mine.choices < E), mine.choices // experts, -1).numpy()
    worst = []
    for returns in ("sums", "rows"):
        made = run(mine.anew(), recipe, ep=group, exchange=Exchange(returns=returns))
        for result, parts in zip((made.y, made.grads["x"]), zip(*rows, strict=True), strict=True):
            of_choices = BRIDGE.to_numpy(torch.stack(parts, 1))
            bound = octavo_numerics.partial_sums_bound(of_choices, owner)
            wide = np.where((owner >= 0)[:, :, None], of_choices.astype(np.float64), 0).sum(1)
            error = np.abs(BRIDGE.to_numpy(result).astype(np.float64) - wide)
            worst.append(float((error / bound).max(initial=0.0)))
    return worst
