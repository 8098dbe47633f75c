"""Rows that are quantized where they stand: every byte is that of permuted rows, quantized.

The choices hold lost ones, so that rows past the sum name tokens, experts without rows, and one expert with all of
them; the last test gives numbers that are no choice.
"""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import pytest
from cpu_calls import DTYPE, NATIVE, Operand, Prepared, prepare
from cpu_operands import SPECS, random_values
from guarded import Guarded, put

from octavo import QuantizerSpec
from octavo_native.layouts import PLAIN

ORIENTATIONS = (("rowwise",), ("columnwise",), ("rowwise", "columnwise"))


def indexed(call: Prepared, tokens: np.ndarray, order: np.ndarray, each: int, stride: int) -> Prepared:
    """`call`, which is on rows, on tokens whose rows stand `stride` elements apart, through the index `order`."""
    wide = np.full((len(tokens), stride), np.nan, dtype=tokens.dtype)
    wide[:, : tokens.shape[1]] = tokens
    call.inputs |= {"x": put(wide), "index": put(order)}
    call.arguments |= {name: call.inputs[name].address for name in ("x", "index")}
    call.arguments |= {"each": each, "count": len(tokens), "row_stride": stride}
    return call


def compare(
    rng: np.random.Generator, spec: QuantizerSpec, tokens: np.ndarray, rows: Operand, order: np.ndarray, each: int
) -> None:
    """Every orientation, in drawn layouts, with the extra outputs."""
    for directions, threads in zip(ORIENTATIONS, (0, 1, 3), strict=True):
        planes = {direction: str(rng.choice([PLAIN, NATIVE[direction]])) for direction in directions}
        wanted = ("amax", "activated", "dbias", *(("dequantized",) if "rowwise" in planes else ()))
        scale = np.exp2(rng.normal(0, 3, rows.groups)).astype(np.float32) if spec.scaling == "delayed" else None
        how: dict[str, Any] = {"scale": scale, "wanted": wanted, "seed": int(rng.integers(1 << 63)), "threads": threads}
        stride = tokens.shape[1] + int(rng.choice([0, 3]))
        through = indexed(prepare(spec, rows, planes, **how), tokens, order, each, stride)().everything
        for name, array in prepare(spec, rows, planes, **how)().everything.items():
            assert (through[name].bytes == array.bytes).all(), (spec, planes, name)


def choices_of(rng: np.random.Generator, tokens: int, each: int, groups: int) -> np.ndarray:
    """Experts of each token: drawn, some of them lost; or all one expert's."""
    if rng.random() < 0.3:
        return np.full((tokens, each), rng.integers(groups))
    return rng.choice([-1, *range(0, groups, 2), groups], (tokens, each))


def routed(choices: np.ndarray, groups: int) -> tuple[np.ndarray, np.ndarray]:
    """Rows of each group, and the choice of each row: by group, in the order of the choices, lost ones last."""
    flat = choices.reshape(-1)
    group = np.where((flat >= 0) & (flat < groups), flat, groups)
    return np.bincount(group, minlength=groups + 1)[:groups], np.argsort(group, kind="stable")


@pytest.mark.parametrize(("name", "dtype"), list(product(SPECS, DTYPE)))
def test_an_index_gives_the_bytes_of_permuted_rows(name: str, dtype: str, rng: np.random.Generator) -> None:
    """Every scaling, format and dtype; no tokens, fewer rows than a block, more than a panel."""
    spec = SPECS[name].model_copy(update={"orientation": "both"})
    for tokens, each, cols in ((0, 2, 40), (7, 3, 17), (90, 4, 144)):
        x = random_values(rng, (tokens, cols), dtype)
        sizes, order = routed(choices_of(rng, tokens, each, 5), 5)
        permuted = x[order // each]
        permuted[sizes.sum() :] = np.nan  # is not read
        compare(rng, spec, x, Operand(permuted, tuple(sizes.tolist())), order, each)


@pytest.mark.parametrize("name", ["delayed.e4m3", "current.e4m3", "row.e4m3", "block.e4m3.pow2", "nvfp4.stochastic"])
def test_a_number_that_is_no_choice_stands_for_a_row_of_zeros(name: str, rng: np.random.Generator) -> None:
    """Negative ones, the first past the last, and those whose low half would be a choice: none is followed."""
    spec = SPECS[name].model_copy(update={"orientation": "both"})
    x, each = random_values(rng, (6, 50), "bfloat16"), 3
    order = rng.permutation(18)
    lost = rng.choice(18, 6, replace=False)
    order[lost] = [-1, -(1 << 63), 18, 1 << 32, (1 << 63) - 1, (1 << 40) + 2]
    rows = x[np.clip(order, 0, 17) // each]
    rows[lost] = 0
    compare(rng, spec, x, Operand(rows, (11, 0, 7)), order, each)


def test_an_index_that_does_not_fit_is_refused(rng: np.random.Generator) -> None:
    """Before anything is read: matrices, prologues, counts that are none."""
    spec = SPECS["mxfp8.e4m3"]
    x, order = random_values(rng, (4, 64), "bfloat16"), np.arange(8)
    rows = Operand(x[order // 2], (8,))
    call = indexed(prepare(spec, rows, {"rowwise": PLAIN}), x, order, 2, 64)
    stacked: dict[str, Any] = {"matrix_rows": 8, "plan": 0}
    for changes, reason in (
        ({"each": 0}, "each is less than 1"),
        ({"count": -1}, "count is negative"),
        ({"count": 1 << 30}, "count \\* each is past 2\\^30"),
        ({"index": call.arguments["index"] + 4}, "index is not aligned to 8 bytes"),
        (stacked, "index was given with stacked matrices"),
        ({"prologue": 1}, "index was given with a prologue"),
        ({"x": 0}, "input is null"),
    ):
        with pytest.raises(ValueError, match=reason):
            call(**changes)
    outputs: dict[str, Guarded] = call.result.everything
    assert all(array.untouched for array in outputs.values())


def test_tokens_that_are_more_than_rows(rng: np.random.Generator) -> None:
    """The array may hold rows that no choice names, and the index may repeat rows in any order."""
    x, order = random_values(rng, (40, 33), "float32"), rng.integers(0, 40, 11)
    compare(rng, SPECS["block.e5m2"].model_copy(update={"orientation": "both"}), x, Operand(x[order], (5, 6)), order, 1)
