"""Quantized tensors equal the executable definition, octavo_numerics, bit for bit (contract.md, promise 5)."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

import octavo_numerics
from octavo import PRESETS, QuantizerSpec
from octavo_torch import GroupedTensor, dequantize, quantize
from octavo_torch.bridge import BRIDGE

PLANES = octavo_numerics.PLANES

SPECS: dict[str, QuantizerSpec] = {}
for _name, _recipe in PRESETS.items():
    for _operand in ("x", "w", "dy"):
        _spec = _recipe.quantizer(_operand)
        if _spec is not None:
            SPECS[f"{_name}:{_operand}"] = _spec
for _scaling, _format in itertools.product(("delayed", "current", "row", "block", "mxfp8"), ("e4m3", "e5m2")):
    SPECS[f"{_scaling}:{_format}"] = QuantizerSpec(scaling=_scaling, format=_format)
for _scaling in ("current", "row", "block"):
    SPECS[f"{_scaling}:epsilon"] = QuantizerSpec(scaling=_scaling, format="e4m3", amax_epsilon=0.1, power_of_two=True)
SPECS["nvfp4:stochastic square"] = QuantizerSpec(scaling="nvfp4", format="e2m1", rounding="stochastic", square=True)
SPECS["nvfp4:columns only"] = QuantizerSpec(scaling="nvfp4", format="e2m1", orientation="columnwise")
SPECS["nvfp4:stochastic columns"] = QuantizerSpec(scaling="nvfp4", format="e2m1", rounding="stochastic", role="dy")
SPECS["current:columns only"] = QuantizerSpec(scaling="current", format="e4m3", orientation="columnwise")
SPECS["block:square, rows only"] = QuantizerSpec(scaling="block", format="e4m3", square=True, orientation="rowwise")

DEVICES = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
INPUTS = ("gauss", "wide", "tiny", "huge", "denormal", "nonfinite", "zeros", "ties")


def make_input(kind: str, shape: tuple[int, ...], rng: np.random.Generator) -> np.ndarray:
    """fp32 values that reach the corners of the formats."""
    x = rng.standard_normal(shape).astype(np.float32)
    with np.errstate(over="ignore", under="ignore"):
        if kind == "wide":
            x = np.ldexp(x, rng.integers(-130, 120, shape))
        elif kind == "tiny":
            x = np.ldexp(x, -120)
        elif kind == "huge":
            x = np.clip(np.ldexp(x, 126), -3.4e38, 3.4e38)
        elif kind == "denormal":
            x = rng.integers(0, 1 << 23, shape).astype(np.uint32).view(np.float32) * np.sign(x)
        elif kind == "nonfinite":
            bad = np.array([np.inf, -np.inf, np.nan], np.float32)[rng.integers(0, 3, shape)]
            x = np.where(rng.random(shape) < 0.002, bad, x)
        elif kind == "zeros":
            x = np.where(rng.random(shape) < 0.9, np.copysign(np.float32(0), x), x)
        elif kind == "ties":
            x = rng.integers(-64, 65, shape).astype(np.float32) * np.float32(0.125)
    return np.ascontiguousarray(x, dtype=np.float32)


def make_sizes(rng: np.random.Generator, groups: int) -> np.ndarray:
    """Sizes around the block sizes, empty groups included (faults.md 1, 6)."""
    edges = np.array([0, 0, 1, 2, 15, 16, 17, 31, 32, 33, 64, 127, 128, 129])
    return rng.choice(edges, groups).astype(np.int64)


def assert_same(q: GroupedTensor, expected: octavo_numerics.QuantizedArray, what: str) -> None:
    """Every plane's valid part, byte for byte, and the dequantized values."""
    ours = octavo_numerics.QuantizedArray(
        spec=expected.spec,
        group_sizes=expected.group_sizes,
        **{name: None if getattr(q, name) is None else BRIDGE.to_numpy(getattr(q, name)) for name in PLANES},
    )
    assert q.spec == expected.spec
    got, want = octavo_numerics.valid(ours), octavo_numerics.valid(expected)
    assert got.keys() == want.keys(), what
    for name in want:
        assert got[name].dtype == want[name].dtype, f"{what}: {name}"
        assert got[name].tobytes() == want[name].tobytes(), f"{what}: {name}"
    for direction in expected.spec.quantizer.directions:
        value = BRIDGE.to_numpy(dequantize(q, direction))
        assert value.tobytes() == octavo_numerics.dequantize(expected, direction).tobytes(), f"{what}: {direction}"


def arguments(spec: QuantizerSpec, groups: int, rng: np.random.Generator) -> dict[str, object]:
    """Seed, operand and group offset for stochastic specs; scales for delayed scaling."""
    given: dict[str, object] = {}
    if spec.stochastic:
        given |= {
            "seed": int(rng.integers(0, 1 << 63)) * int(rng.choice([-1, 1])),
            "operand": str(rng.choice(["x", "w", "dy"])),
            "group_offset": int(rng.integers(0, 1 << 20)),
        }
    if spec.scaling == "delayed":
        given["scale"] = np.ldexp(rng.random(groups) + 0.5, rng.integers(-20, 20, groups)).astype(np.float32)
    return given


def for_torch(given: dict[str, object], device: str = "cpu") -> dict[str, object]:
    """The same arguments with tensors on `device`."""
    return {
        name: torch.from_numpy(value).to(device) if isinstance(value, np.ndarray) else value
        for name, value in given.items()
    }


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", SPECS)
def test_ragged_rows_equal_the_definition(name: str, device: str, rng: np.random.Generator) -> None:
    """Random ragged sizes, empty groups and NaN tails (faults.md 14, 15, 59, 64), every kind of input."""
    spec = SPECS[name]
    for kind in INPUTS:
        sizes = make_sizes(rng, int(rng.integers(1, 6)))
        used, tail = int(sizes.sum()), int(rng.integers(0, 40))
        x = make_input(kind, (used + tail, int(rng.choice([1, 15, 16, 40, 130, 160]))), rng)
        x[used:] = np.nan
        given = arguments(spec, len(sizes), rng)
        expected = octavo_numerics.quantize(x, spec, sizes, **given)
        on_device = torch.from_numpy(x).to(device), spec, torch.from_numpy(sizes).to(device)
        q = quantize(*on_device, **for_torch(given, device))
        assert_same(q, expected, f"{kind}, sizes {sizes.tolist()}, x {list(x.shape)}")


@pytest.mark.parametrize("name", SPECS)
def test_rows_without_columns_have_no_codes(name: str, rng: np.random.Generator) -> None:
    """In the definition's shapes, and no error of torch's about them."""
    spec, x, sizes = SPECS[name], np.zeros((20, 0), np.float32), np.array([3, 0, 17])
    given = arguments(spec, len(sizes), rng)
    q = quantize(torch.from_numpy(x), spec, torch.from_numpy(sizes), backend="torch-reference", **for_torch(given))
    assert_same(q, octavo_numerics.quantize(x, spec, sizes, **given), name)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", [name for name, spec in SPECS.items() if not spec.hadamard])
def test_stacked_matrices_equal_the_definition(name: str, device: str, rng: np.random.Generator) -> None:
    """Each matrix is its own group (faults.md 59: at least 2 x 3 blocks, not square)."""
    spec = SPECS[name]
    for kind in ("gauss", "nonfinite", "wide"):
        shape = (int(rng.integers(1, 4)), int(rng.choice([1, 48, 144, 160])), int(rng.choice([1, 40, 288])))
        w = make_input(kind, shape, rng)
        given = arguments(spec, shape[0], rng)
        expected = octavo_numerics.quantize(w, spec, **given)
        q = quantize(torch.from_numpy(w).to(device), spec, **for_torch(given, device))
        assert_same(q, expected, f"{kind} {shape}")


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_inputs(dtype: str, rng: np.random.Generator) -> None:
    """bf16 and fp16 are taken exactly."""
    import ml_dtypes

    numpy_dtype = np.dtype(getattr(ml_dtypes, dtype, dtype))
    for name in ("mxfp8:x", "fp8-block:dy", "nvfp4:x"):
        x = rng.standard_normal((50, 70)).astype(numpy_dtype)
        expected = octavo_numerics.quantize(x, SPECS[name], [20, 0, 25])
        assert_same(quantize(BRIDGE.from_numpy(x), SPECS[name], [20, 0, 25]), expected, name)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_the_default_dtype_of_torch_changes_no_bit(dtype: torch.dtype, rng: np.random.Generator) -> None:
    """Nothing on the way is made in torch's default dtype: fp16 had infinite factors for stochastic rounding."""
    x, sizes = rng.standard_normal((40, 48)).astype(np.float32), np.array([13, 0, 20])
    for name, spec in SPECS.items():
        given = arguments(spec, len(sizes), rng)
        expected, ours = octavo_numerics.quantize(x, spec, sizes, **given), for_torch(given)
        torch.set_default_dtype(dtype)
        try:
            q = quantize(torch.from_numpy(x), spec, torch.from_numpy(sizes), **ours)
        finally:
            torch.set_default_dtype(torch.float32)
        assert_same(q, expected, name)


@pytest.mark.parametrize("seed", [0, -1, (1 << 64) - 1, 1 << 63, (1 << 70) + 5])
def test_seeds_are_taken_modulo_two_to_the_64(seed: int, rng: np.random.Generator) -> None:
    """An integer and an int64 scalar tensor of the same bits draw the same random bits."""
    spec, x = SPECS["nvfp4:dy"], torch.randn(40, 48)
    expected = octavo_numerics.quantize(x.numpy(), spec, seed=seed)
    assert_same(quantize(x, spec, seed=seed), expected, str(seed))
    wrapped = torch.tensor((seed + (1 << 63)) % (1 << 64) - (1 << 63))
    assert_same(quantize(x, spec, seed=wrapped), expected, str(seed))


@pytest.mark.parametrize("shape", [(0, 32), (8, 0), (0, 0)])
@pytest.mark.parametrize("name", ["mxfp8:x", "fp8-current:x", "fp8-row:x", "fp8-block:w", "nvfp4:x"])
def test_empty_operands(shape: tuple[int, int], name: str) -> None:
    """No rows or no columns: planes of the right shapes, nothing raised."""
    spec = SPECS[name]
    q = quantize(torch.zeros(shape), spec, [0, shape[0]])
    for direction in spec.directions:
        assert tuple(getattr(q, direction).shape) == q.spec.payload_shape(direction)
        assert tuple(getattr(q, f"{direction}_scale").shape) == q.spec.scale_shape(direction)


def test_a_group_computed_alone_gets_the_same_bits(rng: np.random.Generator) -> None:
    """Stochastic bits depend on position and group number alone (faults.md 40, 41)."""
    spec, x = SPECS["nvfp4:dy"], torch.randn(60, 64)
    both = quantize(x, spec, [20, 0, 40], seed=7, group_offset=3)
    alone = quantize(x[20:], spec, [40], seed=7, group_offset=5)
    assert torch.equal(both.rowwise[20:60], alone.rowwise[:40])
    assert not torch.equal(both.rowwise, quantize(x, spec, [20, 0, 40], seed=8, group_offset=3).rowwise)
