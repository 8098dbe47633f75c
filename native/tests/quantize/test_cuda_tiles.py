"""Tiles for rowwise data alone are as wide as an operand's columns fill them: the bits are those of every other tile.

Skipped where there is no device.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from devices import needs_device

torch = pytest.importorskip("torch", reason="torch holds the memory of the device")

from problems import CUDA, EDGE_SIZES, NATIVE_LAYOUT, SPECS, Extras, Shape, assert_same, drawn_values, quantize  # noqa: E402

pytestmark = needs_device

COLS = (8, 64, 128, 256, 384, 512, 640, 768, 1024, 1536, 2176)
"""Of every width that tiles have, with threads to spare and without."""

READ_BY_INDEX = [spec for spec in SPECS if not spec.get("square")]

WIDE_ROWS = (4096, 4104, 5120, 7168, 8184, 8192, 8200)
"""Around the columns between which row scaling keeps a row in registers, and within."""

MANY_TOKENS = 14_000
"""Whose rows of 1024 columns in bf16 do not fit the L2 cache: tiles of fewer columns are read one after another."""


def _name(spec: dict[str, Any]) -> str:
    return "-".join(str(value) for value in spec.values())


@pytest.mark.parametrize("spec", SPECS, ids=_name)
def test_rows_alone_have_the_bits_of_rows_beside_columns(rng: np.random.Generator, spec: dict[str, Any]) -> None:
    """Tiles of 128 rows make both planes; tiles of 16 rows and more, and of 1024 columns and fewer, make one."""
    for cols in COLS:
        shape = Shape((0, *(int(size) for size in rng.choice(EDGE_SIZES, 6)), 257), cols)
        x = drawn_values(rng, shape.rows, cols, "bfloat16", "wide").cuda()
        x[shape.used :] = torch.nan
        alone, _ = quantize(spec, shape, x, "bfloat16", {"rowwise": NATIVE_LAYOUT["rowwise"]}, CUDA, Extras())
        beside, _ = quantize(spec, shape, x, "bfloat16", NATIVE_LAYOUT, CUDA, Extras())
        assert_same(spec, shape, alone, beside[:1], f"{cols} columns")


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("spec", [spec for spec in SPECS if spec["scaling"] == "row"], ids=_name)
def test_rows_that_threads_keep_have_the_bits_of_those_read_twice(
    rng: np.random.Generator, spec: dict[str, Any], dtype: str
) -> None:
    """Read once and kept, or again for their codes as beside columns; of tokens, some of which stand nowhere, too."""
    for cols in WIDE_ROWS:
        shape = Shape((0, *(int(size) for size in rng.choice(EDGE_SIZES, 3)), 130), cols)
        x = drawn_values(rng, shape.rows, cols, dtype, "wide").cuda()
        x[int(rng.integers(shape.rows)), cols - 1] = torch.nan
        rows = {"rowwise": NATIVE_LAYOUT["rowwise"]}
        kept, _ = quantize(spec, shape, x, dtype, rows, CUDA, Extras())
        beside, _ = quantize(spec, shape, x, dtype, NATIVE_LAYOUT, CUDA, Extras())
        assert_same(spec, shape, kept, beside[:1], f"{cols} columns")
        index = torch.from_numpy(rng.integers(-2, shape.rows + 2, shape.rows)).cuda()
        through = Extras(tensors={"index": index}, source={"each": 1, "count": shape.rows})
        inside = (index >= 0) & (index < shape.rows)
        moved = torch.where(inside[:, None], x[index.clamp(0, shape.rows - 1)], 0)
        read, _ = quantize(spec, shape, x, dtype, rows, CUDA, through)
        written, _ = quantize(spec, shape, moved, dtype, NATIVE_LAYOUT, CUDA, Extras())
        assert_same(spec, shape, read, written[:1], f"{cols} columns of tokens")


@pytest.mark.parametrize("spec", READ_BY_INDEX, ids=_name)
def test_many_tokens_have_the_bits_of_their_rows(rng: np.random.Generator, spec: dict[str, Any]) -> None:
    """An index of so many tokens that tiles are narrowed for them."""
    cols, each = 1024, 2
    sizes = rng.multinomial(MANY_TOKENS * each, rng.dirichlet(np.ones(5)))
    shape = Shape(tuple(int(size) for size in sizes), cols)
    tokens = drawn_values(rng, MANY_TOKENS, cols, "bfloat16", "normal").cuda()
    order = torch.from_numpy(rng.permutation(MANY_TOKENS * each))
    index = torch.cat([order, torch.zeros(shape.rows - order.numel(), dtype=torch.int64)]).cuda()
    planes = {"rowwise": NATIVE_LAYOUT["rowwise"]}
    source = {"each": each, "count": MANY_TOKENS}
    read, _ = quantize(spec, shape, tokens, "bfloat16", planes, CUDA, Extras(tensors={"index": index}, source=source))
    rows = tokens[torch.div(index, each, rounding_mode="floor")]
    written, _ = quantize(spec, shape, rows, "bfloat16", planes, CUDA, Extras())
    assert_same(spec, shape, read, written, "rows of tokens")
