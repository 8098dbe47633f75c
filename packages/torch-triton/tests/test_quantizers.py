"""Quantizers beside the definition where the conformance suite does not look: strides, tails, sizes out of bounds."""

from __future__ import annotations

from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest
import torch

import octavo
import octavo_numerics
import octavo_torch
from octavo.quantizer import Direction
from octavo_torch.plugin_api import status_word
from octavo_torch_triton.arrays.launch import start
from octavo_torch_triton.arrays.row_index import index_rows
from octavo_torch_triton.gemm.gemm import Fprop
from octavo_torch_triton.quantizers import launches
from octavo_triton.kernels.panels import index_rows as index_kernel
from octavo_triton.layouts import panels_of
from octavo_triton.quantizer_tiles import QuantizerTile

SIZES = [0, 129, 31, 0, 1, 70]
DIRECTIONS: tuple[Direction, ...] = ("rowwise", "columnwise")


@pytest.mark.parametrize("recipe", ["fp8-current", "fp8-row", "fp8-block", "mxfp8", "nvfp4"])
def test_rows_may_be_a_view(recipe: str, rng: np.random.Generator, device: str, backend: str) -> None:
    """Every other columns' half of a wider tensor, and a transposed one: the codes of a contiguous copy."""
    wide = torch.from_numpy(rng.standard_normal((260, 272)).astype(np.float32)).to(device)
    spec = octavo.recipe(recipe).quantizer("x")
    assert spec is not None
    for x in (wide[:, 128:], wide.T[:260]):
        x = x[:256] if x.shape[0] > 256 else x
        expected = octavo_numerics.quantize(x.cpu().numpy(), spec, np.array(SIZES))
        q = octavo_torch.quantize(x, spec, torch.tensor(SIZES), backend=backend)
        for name, plane in octavo_numerics.valid(expected).items():
            got = getattr(q, name)[: len(plane)].cpu().contiguous().view(torch.uint8).numpy()
            np.testing.assert_array_equal(got.ravel(), np.ascontiguousarray(plane).view(np.uint8).ravel(), name)


TILES = [QuantizerTile(4, 128, 16, 8), QuantizerTile(8, 128, 16, 4), QuantizerTile(16, 64, 8, 2)]
NVFP4_TILES = [QuantizerTile(16, 128, 4, 8), QuantizerTile(16, 64, 4, 4), QuantizerTile(16, 32, 8, 1)]


@pytest.mark.parametrize("recipe", ["fp8-row", "mxfp8", "nvfp4"])
@pytest.mark.parametrize("place", range(3))
def test_tiles_decide_no_bit(
    recipe: str, place: int, rng: np.random.Generator, device: str, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tile that is faster on some chip can be taken without asking whether its codes are right."""
    monkeypatch.setattr(launches, "codes_tile", lambda casts: TILES[place])
    monkeypatch.setattr(launches, "blocks_tile", lambda spec, casts, stacked: TILES[place])
    monkeypatch.setattr(launches, "nvfp4_tile", lambda spec: NVFP4_TILES[place])
    monkeypatch.setattr(launches, "HADAMARD_AMAX", NVFP4_TILES[place])
    x = rng.standard_normal((300, 144)).astype(ml_dtypes.bfloat16)
    x[40] *= 1e4
    spec = octavo.recipe(recipe).quantizer("x")
    assert spec is not None
    expected = octavo_numerics.quantize(x, spec, np.array(SIZES))
    tensor = torch.from_numpy(x.view(np.int16)).view(torch.bfloat16).to(device)
    q = octavo_torch.quantize(tensor, spec, torch.tensor(SIZES), backend=backend)
    for name, plane in octavo_numerics.valid(expected).items():
        got = getattr(q, name)[: len(plane)].cpu().contiguous().view(torch.uint8).numpy()
        np.testing.assert_array_equal(got.ravel(), np.ascontiguousarray(plane).view(np.uint8).ravel(), name)


@pytest.mark.parametrize("scaling", ["delayed", "current", "row"])
@pytest.mark.parametrize("shape", [(0, 48), (48, 0), (2, 0, 48), (2, 48, 0)], ids=str)
def test_an_operand_without_elements_has_scales(
    scaling: str, shape: tuple[int, ...], device: str, backend: str
) -> None:
    """No program has a tile, and the scales, which a product may read, are written all the same."""
    spec = octavo.QuantizerSpec(scaling=scaling, format="e4m3", orientation="both")
    sizes = None if len(shape) == 3 else np.array([0, shape[0]])
    scale = np.array([0.5, 2.0], np.float32) if scaling == "delayed" else None
    expected = octavo_numerics.quantize(np.zeros(shape, np.float32), spec, sizes, scale=scale)
    given = None if scale is None else torch.from_numpy(scale).to(device)
    of_groups = None if sizes is None else torch.from_numpy(sizes)
    for layout in ("plain", "turned"):
        # what a kernel leaves out is what this memory held before
        poison = [torch.full((1 << size,), float("nan"), device=device) for size in range(8)]
        del poison
        x = torch.zeros(shape, device=device)
        q = octavo_torch.quantize(x, spec, of_groups, scale=given, layouts=("plain", layout), backend=backend)
        for direction in DIRECTIONS:
            got, wanted = q.plane(direction)[1], getattr(expected, f"{direction}_scale")
            np.testing.assert_array_equal(got.cpu().numpy(), wanted, f"{layout} {direction}")


def test_rows_past_the_sum_have_no_value(rng: np.random.Generator, device: str, backend: str) -> None:
    """They are zero when codes are made values again, whatever bytes stand there, and the other rows are those of the
    definition."""
    x = torch.from_numpy(rng.standard_normal((300, 130)).astype(np.float32)).to(device)
    spec = octavo.MXFP8().quantizer("x")
    assert spec is not None
    q = octavo_torch.quantize(x, spec, torch.tensor(SIZES), backend=backend)
    defined = octavo_numerics.quantize(x.cpu().numpy(), spec, np.array(SIZES))
    for direction in DIRECTIONS:
        value = octavo_torch.dequantize(q, direction, backend=backend)
        assert not value[sum(SIZES) :].view(torch.int32).any()
        wanted = torch.from_numpy(octavo_numerics.dequantize(defined, direction))
        assert torch.equal(value.cpu().view(torch.int32), wanted.view(torch.int32))


@pytest.mark.parametrize(("sizes", "bounded"), [([5, -3, 9], [5, 0, 5]), ([20, 1, 0], [10, 0, 0]), ([4, 6, 0], None)])
def test_device_sizes_are_cut_to_bounds(sizes: list[int], bounded: list[int] | None, device: str) -> None:
    """Sizes that nobody reads back reach no row out of bounds, and set the device's word; right ones do not."""
    rows, groups = 10, len(sizes)
    word = status_word(torch.device(device, 0) if device == "cuda" else torch.device(device))
    word.zero_()
    table = torch.empty(4 * groups + 1 + 2 * panels_of(rows, groups), dtype=torch.int64, device=device)
    cut = torch.empty(groups, dtype=torch.int64, device=device)
    given = torch.tensor(sizes, dtype=torch.int32, device=device)
    arguments = (given, table, cut, word, rows, groups, panels_of(rows, groups))
    start(index_kernel, (1,), given, arguments, GROUPS=16, CHUNK=4, FLAG=True)
    assert cut.tolist() == (bounded or sizes)
    assert int(word) == (0 if bounded is None else 1)
    word.zero_()
    assert int(table[groups]) == sum(bounded or sizes)


def test_panels_cover_every_row_once(rng: np.random.Generator, device: str) -> None:
    """Each row of a group is in one panel of that group; those past the sum are in panels of no group, all of them."""
    for _ in range(20):
        sizes = rng.choice([0, 1, 127, 128, 129, 300], size=int(rng.integers(1, 9)))
        rows = int(sizes.sum() + rng.choice([0, 1, 128, 500]))
        groups, panels = len(sizes), panels_of(rows, len(sizes))
        index = index_rows(torch.from_numpy(sizes), rows, torch.empty(0, device=device))
        owners, firsts = index.table[4 * groups + 1 :].view(2, panels).tolist()
        ends = [*np.cumsum(sizes).tolist(), rows]
        seen = [row for g, first in zip(owners, firsts, strict=True) for row in range(first, min(first + 128, ends[g]))]
        assert sorted(seen) == list(range(rows))
        for group, first in zip(owners, firsts, strict=True):
            assert first >= (ends[group - 1] if group else 0)


def test_factors_of_the_second_level_may_be_views(rng: np.random.Generator, device: str, backend: str) -> None:
    """Columns of wider arrays, as the factors of a step's layers may be: values and products read what is meant."""
    recipe, sizes = octavo.NVFP4(), torch.tensor([16, 0, 40])
    x, w = (
        torch.from_numpy(rng.standard_normal(shape).astype(np.float32)).to(device) for shape in ((56, 32), (3, 16, 32))
    )
    x[16:] *= 300
    given = [
        octavo_torch.quantize(value, spec.model_copy(update={"orientation": "rowwise"}), group, backend=backend)
        for value, group, spec in ((x, sizes, recipe.quantizer("x")), (w, None, recipe.quantizer("w")))
    ]
    spread = [replace(q, rowwise_global=torch.stack([q.rowwise_global, -q.rowwise_global], 1)[:, 0]) for q in given]
    values = [octavo_torch.dequantize(q, backend=backend) for q in (given[0], spread[0])]
    assert torch.equal(*values)
    products = [
        Fprop("interpreter" if device == "cpu" else "sm_90", "float32")(*pair, sizes.to(device))
        for pair in (given, spread)
    ]
    assert torch.equal(*products)
