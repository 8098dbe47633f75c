"""What moves bytes and rounds none: plans of groups, scales and codes in another order, rows of tokens and experts."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from move_calls import CASES, draw_index, draw_rows, poisoned, route, stream
from problems import DTYPES, SIZES, Place, Shape, address, filled
from sanitizing.comparison import Comparison
from torch import Tensor

import octavo_native as native
from octavo_native import layouts


def plans(check: Comparison) -> None:
    """Good and bad sizes, both widths, one group and many."""
    many = tuple(7 * i % 13 for i in range(1024))
    for sizes in (*SIZES, many):
        shape = Shape(sizes, 16)
        for wide in (True, False):
            made = [shape.plan(place, wide) for place in (check.place, check.reference)]
            ours, theirs = (value.cpu().numpy().view(np.uint8) for value in made)
            check.same(f"plan of {len(sizes)} groups {sizes[:8]}", ours, theirs)
            what = f"sizes of {len(sizes)} groups that fit {sizes[:8]}"
            check.same(what, *(_bounded(place, sizes, shape.rows, wide) for place in (check.place, check.reference)))


def _bounded(place: Place, sizes: tuple[int, ...], rows: int, wide: bool) -> npt.NDArray[np.uint8]:
    """The sizes that a plan writes beside itself, with a status whose bit is set where they are others."""
    dtype = torch.int64 if wide else torch.int32
    given = torch.tensor(sizes).clamp(torch.iinfo(dtype).min, torch.iinfo(dtype).max).to(dtype).to(place.device)
    fitting = poisoned((len(sizes),), torch.int64, place)
    words = poisoned((native.plan_words(rows, len(sizes)),), torch.int64, place)
    status = torch.zeros(1, dtype=torch.int32, device=place.device)
    native.plan(
        cuda=place.cuda, sizes=address(given), sizes_are_64=wide, groups=len(sizes), rows=rows, plan=address(words),
        status=address(status), bounded=address(fitting), stream=stream(place),
    )  # fmt: skip
    return torch.cat([fitting, status.long()]).cpu().numpy().view(np.uint8)


def reshuffles(check: Comparison) -> None:
    """Swizzled scales and packed E2M1, there and back; MXFP4 to values."""
    for outer, blocks in ((1, 1), (128, 4), (130, 9), (257, 3)):
        tiles = layouts.round_up(outer, 128) * layouts.round_up(blocks, 4)
        sides = {"outer": outer, "blocks": blocks}
        _there_and_back(check, native.swizzle_scales, "to_swizzled", sides, outer * blocks, tiles, most=256)
    for rows, cols in ((1, 1), (3, 37), (130, 64)):
        halves = rows * layouts.ceil_div(cols, 2)
        _there_and_back(check, native.pack_e2m1, "pack", {"rows": rows, "cols": cols}, rows * cols, halves, most=16)
    for blocks, dtype in itertools.product((1, 7, 1000), DTYPES):
        _expanded(check, blocks, dtype)


def turns(check: Comparison) -> None:
    """Halves of rows to blocks that take turns, there and back, by wide words and by single bytes."""
    shapes = (
        (1, 1, 2), (3, 16, 1), (5, 300, 2), (2, 7, 2), (9, 128, 4), (4, 33, 8), (3, 5, 6), (7, 3, 48), (70, 40, 2),
    )  # fmt: skip
    for rows, blocks, size in shapes:
        sides = {"rows": rows, "blocks": blocks, "block_bytes": size}
        count = 2 * rows * blocks * size
        _there_and_back(check, native.interleave_halves, "interleave", sides, count, count, most=256)


def _expanded(check: Comparison, blocks: int, dtype: str) -> None:
    lengths = 16 * blocks, blocks
    codes, scales = (torch.randint(256, (n,), generator=check.draw, dtype=torch.uint8) for n in lengths)

    def run(place: Place) -> Tensor:
        held, out = [array.to(place.device) for array in (codes, scales)], filled((32 * blocks,), 4, place)
        native.expand_mxfp4(
            cuda=place.cuda, codes=address(held[0]), scales=address(held[1]), blocks=blocks, out=address(out),
            out_dtype=native.DTYPES[dtype],
        )  # fmt: skip
        return out.cpu()

    made = check.both(f"expand_mxfp4 {blocks} {dtype}", run)
    if made is not None:
        check.same(f"expand_mxfp4 {blocks} {dtype}", made[0].numpy(), made[1].numpy())


def _there_and_back(
    check: Comparison, call: Any, flag: str, sides: dict[str, int], count: int, other: int, most: int
) -> None:
    values = torch.randint(0, most, (count,), generator=check.draw, dtype=torch.uint8)
    what = f"{call.__name__} {sides}"

    def run(place: Place) -> tuple[Tensor, Tensor]:
        there, back, source = filled((other,), 1, place), filled((count,), 1, place), values.to(place.device)
        call(cuda=place.cuda, from_=address(source), into=address(there), **sides, **{flag: True})
        call(cuda=place.cuda, from_=address(there), into=address(back), **sides, **{flag: False})
        return there.cpu(), back.cpu()

    made = check.both(what, run)
    if made is None:
        return
    (there, back), (reference, _) = made
    check.same(what, there.numpy(), reference.numpy())
    check.same(f"{what} and back", back.numpy(), values.numpy())


def moves(check: Comparison) -> None:
    """Routing, and rows that move with it, weighted and not, close together and apart."""
    for number, (case, dtype) in enumerate(itertools.product(CASES, DTYPES)):
        _moved(check, case, dtype, gap=(0, 8, 3)[number % 3], weighted=number % 2 == 0)


def _moved(check: Comparison, case: tuple[int, int, int, int], dtype: str, gap: int, weighted: bool) -> None:
    tokens, each, cols, groups = case
    index, weights = draw_index(check.draw, tokens, each, groups), torch.rand(tokens, each, generator=check.draw)
    seed = int(torch.randint(1 << 40, (), generator=check.draw))

    def run(place: Place) -> list[Tensor]:
        held, draw = route(place, index, groups), torch.Generator().manual_seed(seed)
        x = draw_rows(draw, tokens, cols, dtype, gap, place)
        rows = draw_rows(draw, tokens * each, cols, dtype, gap, place)
        rows[held.used :] = torch.nan
        factors = weights.to(place.device) if weighted else None
        moved = [held.move("permute_rows", x, factors), held.move("combine_rows", rows, factors)]
        products = held.dot(rows, x), held.dot(rows.abs(), x.abs())
        return [value.cpu() for value in (*held.tensors, *moved, *products)]

    made = check.both(f"moves {case} {dtype}", run)
    if made is None:
        return
    names = ("sizes", "order", "position", "routed", "rows", "y")
    for name, ours, theirs in zip(names, made[0], made[1], strict=False):
        check.same(f"{name} of {case} {dtype}", ours.view(torch.uint8).numpy(), theirs.view(torch.uint8).numpy())
    # fp32 sums of `cols` products are within (cols + 2) 2^-24 of the sum of magnitudes; the CPU's are rounded once
    wrong = (made[0][-2].double() - made[1][-2].double()).abs()
    if (wrong > (cols + 4) * 2.0**-24 * made[1][-1].double()).any():
        check.faults.append(f"products of {case} {dtype} are off by {wrong.max().item()}")
