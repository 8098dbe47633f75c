"""tensor_stats and observed: the definition's numbers on a tensor's own device, in and out of a training step."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import octavo
import octavo_jax
import octavo_numerics
from octavo import DelayedScaling, QuantizerSpec
from octavo.health import FIELDS

SIZES = [100, 0, 150]
SLOW = [
    ("fp8-current", "dy", "rowwise"),
    ("fp8-row", "x", "columnwise"),
    ("fp8-block", "dy", "columnwise"),
    ("nvfp4", "x", "rowwise"),
    ("nvfp4", "dy", "rowwise"),
]
CASES = [
    ("fp8-delayed", "x", "rowwise"),
    ("mxfp8", "x", "rowwise"),
    ("nvfp4", "x", "columnwise"),
    *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW),
]
"""XLA compiles each for seconds."""


def spec_of(name: str, operand: str) -> QuantizerSpec:
    spec = octavo.recipe(name).quantizer(operand)  # type: ignore[arg-type]
    assert spec is not None
    return spec


def order_bound(terms: int) -> float:
    """How far, relatively, a float32 sum of so many positive terms is off, in whatever order they are added."""
    return float(terms * 2.0**-24)


def check_equal(ours: octavo_jax.TensorStats, theirs: octavo_numerics.TensorStats) -> None:
    """Counts and amax exactly, sums within their bound."""
    for name in FIELDS:
        actual, expected = np.asarray(getattr(ours, name), np.float64), getattr(theirs, name)
        if name in ("signal", "noise"):
            np.testing.assert_allclose(actual, expected, rtol=order_bound(theirs.elements.max()))
        else:
            np.testing.assert_array_equal(actual, expected, name)


@pytest.mark.parametrize(("name", "operand", "way"), CASES)
def test_the_numbers_are_those_of_the_definition(name: str, operand: str, way: Any, rng: np.random.Generator) -> None:
    """Ragged rows with an empty group and a poisoned tail; values that vanish, and that delayed scaling cuts."""
    spec = spec_of(name, operand)
    x = (rng.standard_normal((300, 48)) * np.logspace(-3, 3, 48)).astype(ml_dtypes.bfloat16)
    x[250:] = np.nan
    more: dict[str, Any] = {"seed": 3} if spec.stochastic else {}
    if spec.scaling == "delayed":
        more["scale"] = np.array([2, 1, 0.25], np.float32)
    ours = octavo_jax.tensor_stats(x, spec, SIZES, direction=way, **more)
    check_equal(ours, octavo_numerics.tensor_stats(x, spec, SIZES, direction=way, **more))


def test_subnormal_values_are_counted(rng: np.random.Generator) -> None:
    """Of weights that MXFP4's values are subnormal of: codes of one matrix lose them, because larger weights are in
    the block, and those of the other hold them. Comparisons on a CPU take what is subnormal for zero."""
    spec = octavo.MXFP4Weights().quantizer("w")
    assert spec is not None
    x = np.exp2(rng.uniform(-140, -127, (2, 32, 64))).astype(np.float32)
    x[0, :, :32] *= 2.0**60
    ours, theirs = octavo_jax.tensor_stats(jnp.asarray(x), spec), octavo_numerics.tensor_stats(x, spec)
    assert theirs.inexact[0] > 0
    for name in ("underflow", "inexact"):
        np.testing.assert_array_equal(getattr(ours, name), getattr(theirs, name), name)


@pytest.mark.usefixtures("on_a_cpu")
def test_subnormal_values_are_counted_in_an_optimized_program(
    rng: np.random.Generator, as_users_have_it: dict[str, Any]
) -> None:
    """Not compiled in a hurry, as most tests are: LLVM made one comparison of floats, which flushes, of "finite"
    and "its bits are not zero", and nothing had underflown."""
    spec = octavo.MXFP4Weights().quantizer("w")
    assert spec is not None
    x = np.exp2(rng.uniform(-140, -124, (1, 1, 127))).astype(np.float32)
    ours = jax.jit(lambda x: octavo_jax.tensor_stats(x, spec)).lower(x).compile(as_users_have_it)(x)
    theirs = octavo_numerics.tensor_stats(x, spec)
    assert theirs.underflow[0] > 0
    np.testing.assert_array_equal(ours.underflow, theirs.underflow)


@pytest.mark.parametrize(("name", "operand"), [("fp8-block", "w"), ("nvfp4", "dy")])
def test_rows_without_columns_hold_nothing(name: str, operand: str) -> None:
    """Zeros, as the definition says, and codes of that shape; JAX divides by zero to find how many rows they are."""
    spec, x = spec_of(name, operand), np.zeros((5, 0), np.float32)
    for way in spec.directions:
        given: dict[str, Any] = {"seed": 3} if spec.stochastic else {}
        q = octavo_jax.quantize(x, spec, [2, 3], backend="jax-reference", **given)
        values = octavo_jax.dequantize(q, way, backend="jax-reference")
        assert values.shape == octavo_numerics.dequantize(octavo_numerics.quantize(x, spec, [2, 3], **given), way).shape
        ours = octavo_jax.tensor_stats(x, spec, [2, 3], direction=way, **given)
        check_equal(ours, octavo_numerics.tensor_stats(x, spec, [2, 3], direction=way, **given))


@pytest.mark.parametrize("name", ["fp8-current", pytest.param("nvfp4", marks=pytest.mark.slow)])
def test_a_sample_is_quantized_as_a_part_of_the_whole(name: str, rng: np.random.Generator) -> None:
    """The rows of a sample, counted with the definition's codes of *all* rows: no scale is another one."""
    spec = spec_of(name, "x")
    x = rng.standard_normal((1100, 32)).astype(ml_dtypes.bfloat16)
    x[700, 3] = 900  # an outlier that the sample leaves out, and whose scale it has to have
    sizes = [600, 60, 420]
    sample = octavo_jax.tensor_stats(x, spec, sizes, rows=256)
    values = octavo_numerics.dequantize(octavo_numerics.quantize(x, spec, sizes), spec.directions[0])
    # windows of 128 rows, spread evenly: of 5 the first and the third, of 4 the first and the third, of one that one
    parts = [[(0, 128), (256, 384)], [(600, 660)], [(660, 788), (916, 1044)]]
    noise = [sum(float(((values[a:b] - x[a:b].astype(np.float64)) ** 2).sum()) for a, b in p) for p in parts]
    np.testing.assert_allclose(np.asarray(sample.noise), noise, rtol=order_bound(256 * 32))
    assert sample.elements.tolist() == [256 * 32, 60 * 32, 256 * 32]
    assert sample.amax.tolist() == octavo_numerics.tensor_stats(x, spec, sizes).amax.tolist()


@pytest.mark.parametrize("name", ["fp8-block", pytest.param("fp8-row", marks=pytest.mark.slow)])
def test_a_sample_of_wide_rows_takes_some_columns(name: str, rng: np.random.Generator) -> None:
    """Eight windows of 128 columns, with the codes that the definition gives *all* columns; no scale is another one."""
    spec = spec_of(name, "x")
    x = rng.standard_normal((80, 1200)).astype(ml_dtypes.bfloat16)
    sizes = [60, 0, 20]
    sample = octavo_jax.tensor_stats(x, spec, sizes, rows=128)
    values = octavo_numerics.dequantize(octavo_numerics.quantize(x, spec, sizes), spec.directions[0])
    # of ten windows the fifth and the last are left out, but for scales of whole rows
    columns = [128 * window + place for window in (turn * 10 // 8 for turn in range(8)) for place in range(128)]
    if spec.scaling == "row":
        columns = list(range(1200))
    errors = (values - x.astype(np.float64)) ** 2
    noise = [float(errors[rows][:, columns].sum()) for rows in (slice(0, 60), slice(0), slice(60, 80))]
    np.testing.assert_allclose(np.asarray(sample.noise), noise, rtol=order_bound(60 * len(columns)))
    assert sample.elements.tolist() == [60 * len(columns), 0, 20 * len(columns)]


@pytest.mark.filterwarnings("ignore:a layer with delayed scaling")  # its scales are given and stay
def test_a_tap_counts_a_jitted_step_and_changes_no_bit(rng: np.random.Generator) -> None:
    """x, the kernel and dy of delayed scaling with the step's own scales; results and gradients as without."""
    recipe = DelayedScaling(history=2)
    state = octavo_jax.init_delayed(recipe, 3)
    x, kernel, dy = (
        (scale * rng.standard_normal(shape)).astype(ml_dtypes.bfloat16)
        for scale, shape in ((900, (300, 48)), (1, (3, 48, 32)), (1, (300, 32)))
    )
    sizes = jnp.array(SIZES)

    def loss(kernel: Any, tap: Any) -> Any:
        y, _ = octavo_jax.observed(tap, x, kernel, sizes, recipe=recipe, state=state, rows=None)
        return jnp.sum(y * dy)

    step = jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))
    value, (grad, seen) = step(kernel, octavo_jax.new_tap(3))
    plain, (plain_grad, _) = step(kernel, None)
    assert np.array_equal(np.asarray(value), np.asarray(plain))
    assert np.array_equal(np.asarray(grad), np.asarray(plain_grad))
    ones = np.ones(3, np.float32)
    stats = seen.stats()
    check_equal(stats["x"], octavo_numerics.tensor_stats(x, spec_of("fp8-delayed", "x"), SIZES, scale=ones))
    expected = octavo_numerics.tensor_stats(kernel.swapaxes(1, 2), spec_of("fp8-delayed", "w"), scale=ones)
    check_equal(stats["kernel"], expected)
    check_equal(stats["grad"], octavo_numerics.tensor_stats(dy, spec_of("fp8-delayed", "dy"), SIZES, scale=ones))
    assert stats["x"].saturated[0] > 0
    numbers = octavo_jax.observations({"fc1": seen}, experts=True)
    assert numbers["octavo/fc1/x/saturated"] == pytest.approx(float(stats["x"].saturated.sum()) / (250 * 48))
    assert "octavo/fc1/dy/expert2/sqnr_db" in numbers
    assert "octavo/fc1/x/expert1/amax" not in numbers  # an expert without rows has no numbers


def test_what_does_not_fit_is_refused() -> None:
    """With the argument, what was given and what is needed."""
    spec = spec_of("mxfp8", "x")
    for rows in (0, 100, True):
        with pytest.raises(ValueError, match=r"rows is .*multiple of 128"):
            octavo_jax.tensor_stats(jnp.ones((4, 32)), spec, rows=rows)
    with pytest.raises(ValueError, match="direction is 'diagonal'"):
        octavo_jax.tensor_stats(jnp.ones((4, 32)), spec, direction="diagonal")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="hadamard=True is defined for ragged"):
        octavo_jax.tensor_stats(jnp.ones((2, 16, 32)), spec_of("nvfp4", "dy"), seed=1)
    with pytest.raises(ValueError, match="groups is 0"):
        octavo_jax.new_tap(0)
    blocks = jnp.ones((2, 4, 32))
    with pytest.raises(ValueError, match=r"x has shape \[2, 4, 32\]"):
        octavo_jax.observed(octavo_jax.new_tap(1), blocks, jnp.ones((1, 32, 8)), [8], recipe=None)


def test_rows_in_blocks_of_their_devices_are_refused() -> None:
    """Where a tap would count one expert's rows as another's."""
    if jax.device_count() < 2:
        pytest.skip("one device")
    roles, mesh = octavo_jax.MeshAxes(ep="ep"), jax.make_mesh((2,), ("ep",))
    with jax.set_mesh(mesh), octavo_jax.mesh_roles(roles), pytest.raises(ValueError, match="of mesh_roles"):
        octavo_jax.observed(octavo_jax.new_tap(2), jnp.ones((8, 32)), jnp.ones((2, 32, 8)), [4, 4], recipe=None)


def test_a_tap_leaves_a_status_to_be_read() -> None:
    """Sizes that do not fit are in the status, as without a tap, and no error."""
    x, kernel, sizes = jnp.ones((8, 32)), jnp.ones((2, 32, 8)), jnp.array([9, -1])
    found = [
        octavo_jax.observed(tap, x, kernel, sizes, recipe=None, return_status=True)[1]
        for tap in (None, octavo_jax.new_tap(2))
    ]
    assert int(found[0]) == int(found[1]) != 0


def test_a_tap_is_donated() -> None:
    """With the step's other arguments: its three arrays were one, and JAX gives a program no buffer twice."""
    tap = octavo_jax.new_tap(2)
    jax.jit(lambda tap: jax.tree.map(lambda counts: counts + 1, tap), donate_argnums=0)(tap)
    assert all(counts.is_deleted() for counts in jax.tree.leaves(tap))
