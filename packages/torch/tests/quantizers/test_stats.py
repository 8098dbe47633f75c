"""tensor_stats: the definition's numbers on a tensor's own device; a sample keeps the scales of the whole."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
import torch

import octavo
import octavo_numerics
import octavo_torch
from octavo import QuantizerSpec
from octavo.health import FIELDS

SIZES = [100, 0, 150]
RECIPES = ("fp8-delayed", "fp8-current", "fp8-row", "fp8-block", "mxfp8", "nvfp4")


def as_numpy(x: torch.Tensor) -> np.ndarray:
    return x.float().numpy().astype(ml_dtypes.bfloat16)


def order_bound(terms: int) -> float:
    """How far, relatively, two float64 sums of so many positive terms are apart at most.

    A sum of one term after another is off by less than terms * 2^-53 of the true one; numpy and torch add by pairs, and
    are off by far less than half of that.
    """
    return float(terms * 2.0**-53)


def check_equal(ours: octavo_torch.TensorStats, theirs: octavo_numerics.TensorStats) -> None:
    """Counts and amax exactly; sums of squares up to the order of float64 sums of positive terms."""
    for name in FIELDS:
        actual, expected = getattr(ours, name).numpy(), getattr(theirs, name)
        if name in ("signal", "noise"):
            np.testing.assert_allclose(actual, expected, rtol=order_bound(theirs.elements.max()))
        else:
            np.testing.assert_array_equal(actual, expected, name)


def quantizers() -> list[tuple[str, QuantizerSpec, str]]:
    specs = [(name, octavo.recipe(name).quantizer(operand)) for name in RECIPES for operand in ("x", "w", "dy")]  # type: ignore[arg-type]
    return [(name, spec, way) for name, spec in specs if spec is not None for way in spec.directions]


@pytest.mark.parametrize(("name", "spec", "way"), quantizers(), ids=lambda part: getattr(part, "role", str(part)))
def test_the_numbers_are_those_of_the_definition(name: str, spec: QuantizerSpec, way: str, rng: object) -> None:
    """Ragged rows with an empty group, a poisoned tail, outliers that saturate delayed scaling, values that vanish."""
    x = torch.randn(300, 80).bfloat16() * torch.logspace(-6, 3, 80).bfloat16()
    x[250:] = torch.nan
    more = {"seed": 3} if spec.stochastic else {}
    scales = torch.tensor([2.0, 1.0, 0.25]) if spec.scaling == "delayed" else None
    ours = octavo_torch.tensor_stats(x, spec, SIZES, direction=way, scale=scales, **more)  # type: ignore[arg-type]
    host = None if scales is None else scales.numpy()
    check_equal(ours, octavo_numerics.tensor_stats(as_numpy(x), spec, SIZES, direction=way, scale=host, **more))  # type: ignore[arg-type]
    check_equal(
        ours.total(),
        octavo_numerics.tensor_stats(as_numpy(x), spec, SIZES, direction=way, scale=host, **more).total(),  # type: ignore[arg-type]
    )


@pytest.mark.parametrize("name", ["fp8-current", "fp8-block", "nvfp4"])
def test_stacked_weights_and_what_is_not_finite(name: str, rng: object) -> None:
    """Matrices are groups; a NaN poisons what shares its scale, and is the amax."""
    spec = octavo.recipe(name).quantizer("w")
    assert spec is not None
    w = torch.randn(3, 130, 64).bfloat16()
    w[1, 129, 5] = torch.inf
    w[2, 0, 0] = torch.nan
    ours = octavo_torch.tensor_stats(w, spec)
    check_equal(ours, octavo_numerics.tensor_stats(as_numpy(w), spec))
    assert ours.non_finite[0] == 0
    assert (ours.non_finite[1:] > 0).all()


@pytest.mark.parametrize("name", ["fp8-current", "fp8-block", "mxfp8", "nvfp4"])
def test_a_sample_is_quantized_as_a_part_of_the_whole(name: str, rng: object) -> None:
    """The rows of a sample, counted with the definition's codes of *all* rows: no scale is another one."""
    spec = octavo.recipe(name).quantizer("x")
    assert spec is not None
    x = torch.randn(1100, 64).bfloat16()
    x[700, 3] = 900  # an outlier that the sample leaves out, and whose scale it has to have
    sizes = [600, 60, 420]
    sample = octavo_torch.tensor_stats(x, spec, sizes, rows=256)
    values = octavo_numerics.dequantize(octavo_numerics.quantize(as_numpy(x), spec, sizes), spec.directions[0])
    # windows of 128 rows, spread evenly: of 5 the first and the third, of 4 the first and the third, of one that one
    parts = [[(0, 128), (256, 384)], [(600, 660)], [(660, 788), (916, 1044)]]
    noise = [sum(float(((values[a:b] - as_numpy(x)[a:b].astype(np.float64)) ** 2).sum()) for a, b in p) for p in parts]
    np.testing.assert_allclose(sample.noise.numpy(), noise, rtol=order_bound(256 * 64))
    assert sample.elements.tolist() == [256 * 64, 60 * 64, 256 * 64]
    assert sample.amax.tolist() == octavo_torch.group_amax(x, sizes).tolist()
    everything = octavo_torch.tensor_stats(x, spec, sizes)
    assert octavo_torch.tensor_stats(x, spec, sizes, rows=640).noise.tolist() == pytest.approx(
        everything.noise.tolist(), rel=1e-12
    )


@pytest.mark.usefixtures("backend")
def test_equal_tensors_have_equal_numbers(rng: object) -> None:
    """Sums of squares, too, in each bit: on a GPU an indexed addition had taken rows as they came."""
    x, sizes = torch.randn(20_000, 48).bfloat16(), torch.tensor([9_000, 0, 10_500])
    spec = octavo.recipe("mxfp8").quantizer("x")
    assert spec is not None
    first, *others = (octavo_torch.tensor_stats(x, spec, sizes) for _ in range(5))
    for other in others:
        assert all(torch.equal(getattr(first, name), getattr(other, name)) for name in FIELDS)
    assert first.signal.bool().tolist() == [True, False, True]


@pytest.mark.parametrize("name", ["fp8-current", "fp8-row", "fp8-block", "mxfp8", "nvfp4"])
def test_a_sample_of_wide_rows_takes_some_columns(name: str, rng: object) -> None:
    """Eight windows of 128 columns, with the codes that the definition gives *all* columns; no scale is another one."""
    spec = octavo.recipe(name).quantizer("x")
    assert spec is not None
    x = torch.randn(300, 2300).bfloat16()
    x[30, 2299] = 900  # an outlier that the sample leaves out
    sizes = [200, 0, 100]
    sample = octavo_torch.tensor_stats(x, spec, sizes, rows=128)
    values = octavo_numerics.dequantize(octavo_numerics.quantize(as_numpy(x), spec, sizes), spec.directions[0])
    columns = [128 * window + place for window in (turn * 18 // 8 for turn in range(8)) for place in range(128)]
    if spec.scaling == "row":
        columns = list(range(2300))
    errors = (values - as_numpy(x).astype(np.float64)) ** 2
    noise = [float(errors[rows][:, columns].sum()) for rows in (slice(0, 128), slice(0), slice(200, 300))]
    np.testing.assert_allclose(sample.noise.numpy(), noise, rtol=order_bound(128 * len(columns)))
    assert sample.elements.tolist() == [128 * len(columns), 0, 100 * len(columns)]
    assert sample.amax.tolist() == octavo_torch.group_amax(x, sizes).tolist()


def test_compiled_in_one_graph(rng: object) -> None:
    """The operator passes torch's checks of its fake kernel, and a compiled call has eager's numbers."""
    spec = octavo.recipe("fp8-block").quantizer("x")
    assert spec is not None
    x, sizes = torch.randn(300, 64), torch.tensor([100, 0, 150])

    def noise(x: torch.Tensor, sizes: torch.Tensor) -> torch.Tensor:
        return octavo_torch.tensor_stats(x, spec, sizes, rows=128).noise

    torch.compiler.reset()
    compiled = torch.compile(noise, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(x, sizes), noise(x, sizes))
    arguments = (x, sizes, spec.model_dump_json(), "rowwise", None, "x", None, 128)
    torch.library.opcheck(torch.ops.octavo_torch.operand_stats, arguments)


@pytest.mark.parametrize("sizes", [None, [2, 3]])
@pytest.mark.parametrize(("name", "spec", "way"), quantizers(), ids=lambda part: getattr(part, "role", str(part)))
def test_rows_without_columns_hold_nothing(name: str, spec: QuantizerSpec, way: str, sizes: list[int] | None) -> None:
    """Zeros, as the definition says, and no error of a shape."""
    if spec.hadamard or spec.scaling == "delayed":
        return  # refused, and in need of scales
    more = {"seed": 3} if spec.stochastic else {}
    ours = octavo_torch.tensor_stats(torch.zeros(5, 0), spec, sizes, direction=way, **more)  # type: ignore[arg-type]
    check_equal(ours, octavo_numerics.tensor_stats(np.zeros((5, 0), np.float32), spec, sizes, direction=way, **more))  # type: ignore[arg-type]


@pytest.mark.parametrize("rows", [0, 100, -128, True, 128.0, "128"])
def test_rows_that_would_cut_a_block_are_refused(rows: object) -> None:
    """A block of scales is 128 rows."""
    spec = octavo.recipe("mxfp8").quantizer("x")
    assert spec is not None
    with pytest.raises(ValueError, match=r"rows is .*multiple of 128"):
        octavo_torch.tensor_stats(torch.ones(4, 32), spec, rows=rows)  # type: ignore[arg-type]
