"""Codes and scales equal the executable definition bit for bit, in the plain and in the native layouts."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import octavo_jax
import octavo_native
import octavo_numerics
import octavo_registry
from octavo import QuantizerSpec
from octavo_registry import Request

BACKEND = "jax-native"
M, G, K = 300, 6, 200
STACKED = (3, 150, 200)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_ragged_rows(
    spec: QuantizerSpec, dtype: str, rng: Any, rows_of: Any, sizes_of: Any, arguments_for: Any, same_tensor: Any
) -> None:
    """Subnormal inputs under XLA's own threads, which flush them; empty groups; a NaN tail (faults.md 6, 8, 14, 56)."""
    sizes = sizes_of(rng, G, M)
    x, arguments = rows_of(rng, (M, K), dtype, sizes), arguments_for(spec, rng, G)
    q = octavo_jax.quantize(x, spec, jnp.asarray(sizes), backend=BACKEND, **arguments)
    same_tensor(q, octavo_numerics.quantize(x, spec, sizes, **arguments))


def test_stacked_matrices(
    stackable: QuantizerSpec, rng: Any, rows_of: Any, arguments_for: Any, same_tensor: Any
) -> None:
    """[G, N, K], block tails in both axes (faults.md 24, 25, 59)."""
    spec, w = stackable, rows_of(rng, STACKED, "bfloat16")
    arguments = arguments_for(spec, rng, STACKED[0])
    q = octavo_jax.quantize(w, spec, backend=BACKEND, **arguments)
    same_tensor(q, octavo_numerics.quantize(w, spec, **arguments))


def test_only_subnormals(spec: QuantizerSpec, rng: Any, arguments_for: Any, same_tensor: Any, same_bits: Any) -> None:
    """Nothing but subnormals, so that a flush would leave zeros: quantized and dequantized alike (numerics: Casts)."""
    sizes = np.array([40, 0, 50], np.int32)
    x = (rng.integers(0, 1 << 23, (100, 48), np.uint32) | rng.integers(0, 2, (100, 48), np.uint32) << 31).view("f4")
    arguments = arguments_for(spec, rng, 3)
    q = octavo_jax.quantize(x, spec, jnp.asarray(sizes), backend=BACKEND, **arguments)
    expected = octavo_numerics.quantize(x, spec, sizes, **arguments)
    same_tensor(q, expected)
    for direction in ("rowwise", "columnwise"):
        values = octavo_jax.dequantize(q, direction, backend=BACKEND)
        same_bits(values, octavo_numerics.dequantize(expected, direction), direction)


@pytest.mark.parametrize("shape", [(0, 64), (5, 0), (1, 1), (3, 7)])
def test_tiny_and_empty_operands(
    one_per_scaling: QuantizerSpec, shape: tuple[int, int], rng: Any, rows_of: Any, arguments_for: Any, same_tensor: Any
) -> None:
    """No rows or no columns: XLA's empty buffers may have no address, and group scales are made all the same."""
    spec, sizes = one_per_scaling, np.array([0, shape[0], 0], np.int32)
    x, arguments = rows_of(rng, shape), arguments_for(spec, rng, 3)
    q = octavo_jax.quantize(x, spec, jnp.asarray(sizes), backend=BACKEND, **arguments)
    same_tensor(q, octavo_numerics.quantize(x, spec, sizes, **arguments))


@pytest.mark.parametrize("orientation", ["rowwise", "columnwise"])
def test_one_plane_alone(
    spec: QuantizerSpec, orientation: str, rng: Any, rows_of: Any, sizes_of: Any, arguments_for: Any, same_tensor: Any
) -> None:
    """The same bits as beside the other plane, and no array of the other."""
    spec, sizes = QuantizerSpec(**{**dict(spec), "orientation": orientation}), sizes_of(rng, G, M)
    x, arguments = rows_of(rng, (M, K)), arguments_for(spec, rng, G)
    q = octavo_jax.quantize(x, spec, jnp.asarray(sizes), backend=BACKEND, **arguments)
    same_tensor(q, octavo_numerics.quantize(x, spec, sizes, **arguments))


def test_shared_codes_share_arrays(sharing: QuantizerSpec, rng: Any, rows_of: Any, arguments_for: Any) -> None:
    """Per-tensor and square-block recipes hold the codes once in the plain layout."""
    spec = sharing
    q = octavo_jax.quantize(rows_of(rng, (40, 32)), spec, backend=BACKEND, **arguments_for(spec, rng, 1))
    assert q.rowwise is q.columnwise
    assert q.rowwise_scale is q.columnwise_scale


@pytest.mark.parametrize("stacked", [False, True], ids=["ragged", "stacked"])
def test_native_layouts(spec: QuantizerSpec, stacked: bool, rng: Any, draws: Any, same_bits: Any) -> None:
    """Native planes hold what layouts.h says of the definition's bits (faults.md 13, 59)."""
    if stacked and spec.hadamard:
        pytest.skip("Hadamard data are defined for ragged operands")
    _check_layouts(spec, ("rows", "panels"), stacked, rng, draws, same_bits)


@pytest.mark.parametrize("layouts", [("plain", "panels"), ("rows", "plain")], ids="-".join)
def test_one_native_layout(
    sharing: QuantizerSpec, layouts: tuple[str, str], rng: Any, draws: Any, same_bits: Any
) -> None:
    """One plane native and one plain, where the two would else share their codes."""
    _check_layouts(sharing, layouts, False, rng, draws, same_bits)


@pytest.fixture
def draws(rows_of: Any, sizes_of: Any, arguments_for: Any) -> tuple[Any, Any, Any]:
    """What draws rows, sizes and further arguments."""
    return rows_of, sizes_of, arguments_for


def _check_layouts(
    spec: QuantizerSpec, layouts: tuple[str, str], stacked: bool, rng: Any, draws: Any, same_bits: Any
) -> None:
    rows_of, sizes_of, arguments_for = draws
    sizes = None if stacked else sizes_of(rng, G, M)
    x = rows_of(rng, STACKED if stacked else (M, K))
    groups = STACKED[0] if stacked else G
    arguments = arguments_for(spec, rng, groups)
    request = Request(
        "quantize", "jax", "cpu", "float32", "float32", quantizer=spec, layouts=layouts, stacked=stacked, groups=groups
    )
    run = octavo_registry.plan(request, backend=BACKEND).run
    given = {name: jnp.asarray(value) if name == "scale" else value for name, value in arguments.items()}
    q = run(jnp.asarray(x), None if stacked else jnp.asarray(sizes), **given)
    expected = octavo_numerics.quantize(x, spec, sizes, **arguments)
    for direction, layout in zip(("rowwise", "columnwise"), layouts, strict=True):
        codes, scales, second = (np.asarray(a) if a is not None else None for a in q.plane(direction))
        assert getattr(q.spec, f"{direction}_layout") == layout
        for what, actual, wanted, used in _native_planes(expected, direction, layout, codes, scales):
            same_bits(np.where(used, actual, 0), np.where(used, wanted, 0), f"{direction} {what}")
        if second is not None:
            same_bits(second, getattr(expected, f"{direction}_global"), f"{direction} global")
        values = octavo_registry.plan(
            Request("dequantize", "jax", "cpu", "float32", "float32", quantizer=spec, layouts=layouts), backend=BACKEND
        ).run(q, direction)
        same_bits(values, octavo_numerics.dequantize(expected, direction), f"{direction} values")


def _bytes(array: np.ndarray) -> np.ndarray:
    """Codes and one-byte scales as bytes, fp32 scales as their bits: NaN compares by its bits."""
    return np.ascontiguousarray(array).view(np.uint8 if array.dtype.itemsize == 1 else np.uint32)


def _packed(codes: np.ndarray) -> np.ndarray:
    """Two E2M1 codes a byte along the last axis, the even one low."""
    if codes.shape[-1] % 2:
        codes = np.concatenate([codes, np.zeros_like(codes[..., :1])], -1)
    low, high = codes[..., 0::2], codes[..., 1::2]
    return (low | high << 4).astype(np.uint8)


def _groups(expected: Any, direction: str) -> list[tuple[int, int, int]]:
    """(first row of the plane's payload, rows, first scale block) of each group, blocks restarting at each."""
    size = expected.spec.quantizer.block_size or 1
    if expected.group_sizes is None:
        groups, rows, _ = expected.spec.shape
        return [(g * rows, rows, g * -(-rows // size)) for g in range(groups)]
    sizes = octavo_numerics.plane_sizes(expected, direction)
    rows, blocks = np.cumsum(sizes) - sizes, np.cumsum(-(-sizes // size)) - -(-sizes // size)
    return [(int(r), int(n), int(b)) for r, n, b in zip(rows, sizes, blocks, strict=True)]


def _native_planes(expected: Any, direction: str, layout: str, codes: np.ndarray, scales: np.ndarray) -> Any:
    """(what, actual, wanted, which elements mean something) of a plane's codes and scales."""
    payload, scale, _ = expected.plane(direction)
    spec = expected.spec.quantizer
    if layout == "panels":
        yield from _panels(expected, codes, scales, payload, scale)
        return
    total = None if expected.group_sizes is None else int(octavo_numerics.plane_sizes(expected, direction).sum())
    wanted = _bytes(payload)
    if layout == "rows" and spec.format == "e2m1":
        wanted = _packed(wanted)
    yield "codes", _bytes(codes), wanted, _first(wanted.shape, total)
    wanted = _bytes(scale)
    if layout == "rows" and spec.scaling == "block" and not spec.square:
        flat = wanted.reshape(-1, wanted.shape[-1])
        padded = np.zeros((flat.shape[1], -(-flat.shape[0] // 4) * 4), np.uint32)
        padded[:, : flat.shape[0]] = flat.T
        used = np.zeros(padded.shape, bool)
        used[:, : flat.shape[0] if total is None else total] = True
        yield "scales", _bytes(scales), padded, used
    else:
        blocks = octavo_numerics.valid(expected)[f"{direction}_scale"].shape[0]
        yield "scales", _bytes(scales), wanted, _first(wanted.shape, blocks)


def _first(shape: tuple[int, ...], rows: int | None) -> np.ndarray:
    used = np.ones(shape, bool)
    if rows is not None:
        used[rows:] = False
    return used


def _panels(expected: Any, codes: np.ndarray, scales: np.ndarray, payload: np.ndarray, scale: np.ndarray) -> Any:
    """Panels of 128 rows of one group, column after column; rows past its end are zero codes."""
    spec, columns = expected.spec.quantizer, payload.shape[-1]
    flat = _bytes(payload).reshape(-1, columns)
    per_panel = 128 // spec.block_size if spec.block_size else 0
    blocks = _bytes(scale).reshape(-1, columns) if per_panel and not spec.square_in("columnwise") else None
    panels, panel_scales = [], []
    for first, rows, block in _groups(expected, "columnwise"):
        for start in range(0, rows, 128):
            here = flat[first + start : first + min(start + 128, rows)]
            panel = np.zeros((columns, 128), np.uint8)
            panel[:, : len(here)] = here.T
            panels.append(_packed(panel) if spec.format == "e2m1" else panel)
            if blocks is not None:
                size = spec.block_size
                count = -(-min(128, rows - start) // size)
                one = np.full((columns, per_panel), _zero_block_scale(spec), blocks.dtype)
                one[:, :count] = blocks[block + start // size : block + start // size + count].T
                panel_scales.append(one)
    wanted = np.zeros(codes.shape, np.uint8)
    if panels:
        wanted[: len(panels)] = panels
    yield "codes", _bytes(codes), wanted, _first(wanted.shape, len(panels))
    if blocks is None:
        whole = _bytes(scale)
        valid = octavo_numerics.valid(expected)["columnwise_scale"].shape[0]
        yield "scales", _bytes(scales), whole, _first(whole.shape, valid)
        return
    wanted = np.zeros(scales.shape, blocks.dtype)
    used = _first(wanted.shape, len(panels))
    if per_panel == 1:
        used[:, columns:] = False
        if panels:
            wanted[: len(panels), :columns] = np.stack(panel_scales)[..., 0]
    elif panels:
        wanted[: len(panels)] = panel_scales
    yield "scales", _bytes(scales), wanted, used


def _zero_block_scale(spec: QuantizerSpec) -> int:
    return int(np.float32(1).view(np.uint32)) if spec.scaling == "block" else 0


def test_shapes_of_the_kernels_and_of_python_agree(rng: Any) -> None:
    """A native plan has as many words as octavo_native says, one group or many (faults.md 26, 27)."""
    for _ in range(20):
        rows, groups = int(rng.integers(0, 1 << 20)), int(rng.integers(1, 1100))
        assert octavo_native.plan_words(rows, groups) == octavo_native.layouts.plan_words(rows, groups)
