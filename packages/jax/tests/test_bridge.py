"""The bridge, as the packages that import no framework use it."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import octavo
import octavo_numerics
import octavo_registry
from octavo_jax import bridge
from octavo_jax.bridge import BRIDGE
from octavo_jax.dispatch.device import device_holding


def test_the_registry_finds_it() -> None:
    """Published under `octavo.frameworks` as "jax"."""
    assert octavo_registry.framework("jax") is BRIDGE
    assert any(device.kind == "cpu" for device in BRIDGE.devices())
    assert BRIDGE.version() == jax.__version__


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, np.uint8])
def test_arrays_keep_their_bits(dtype: Any) -> None:
    """NaN payloads and subnormals survive the way to JAX and back."""
    array = np.arange(256, dtype=np.uint8).view(dtype)
    back = BRIDGE.to_numpy(BRIDGE.from_numpy(array))
    assert back.dtype == array.dtype
    assert back.tobytes() == array.tobytes()


def test_grouped_tensors_can_be_built(rng: np.random.Generator) -> None:
    """A quantized tensor that the definition made dequantizes to the definition's values."""
    spec = octavo.MXFP8().quantizer("x")
    assert spec is not None
    expected = octavo_numerics.quantize(rng.standard_normal((20, 40)).astype(np.float32), spec, [7, 9])
    arrays = {name: getattr(expected, name) for name in octavo_registry.PLANES}
    q = BRIDGE.grouped_tensor(expected.spec, np.asarray(expected.group_sizes, np.int32), arrays)
    import octavo_jax

    assert np.array_equal(octavo_jax.dequantize(q), octavo_numerics.dequantize(expected))
    with pytest.raises(ValueError, match="rows"):
        BRIDGE.grouped_tensor(expected.spec, None, {"rows": arrays["rowwise"]})


@pytest.mark.parametrize("compiled", [False, True])
def test_grouped_linear(compiled: bool, rng: np.random.Generator) -> None:
    """Weights are [G, N, K], gradients come in the arguments' shapes, jitted or not, with equal bits."""
    x, w, dy = (rng.standard_normal(shape).astype(np.float32) for shape in ((20, 16), (2, 8, 16), (20, 8)))
    bias = rng.standard_normal((2, 8)).astype(np.float32)
    scales = {name: np.ones(2, np.float32) for name in ("x", "w", "dy")}
    recipe = octavo.recipe("fp8-delayed")
    results = [
        BRIDGE.grouped_linear(x, w, sizes, dy, recipe=recipe, bias=bias, scales=scales, compiled=compiled)
        for sizes in ([7, 9], jnp.array([7, 9]))
    ]
    for result in results:
        assert (result.y.shape, result.dx.shape, result.dw.shape, result.db.shape) == (
            dy.shape,
            x.shape,
            w.shape,
            (2, 8),
        )
    assert all(np.array_equal(getattr(results[0], name), getattr(results[1], name)) for name in ("y", "dx", "dw", "db"))
    forward = BRIDGE.grouped_linear(x, w, [7, 9], recipe=recipe, scales=scales)
    assert forward.dx is None


def test_a_layer_is_planned_for_the_device_of_its_arrays(
    rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a machine with a GPU, layers on the CPU had plans for the GPU: autograd's traced arrays name no device."""
    planned = []
    grouped_dense = bridge.grouped_dense

    def watched(x: jax.Array, *args: Any, **options: Any) -> Any:
        planned.append((isinstance(x, jax.core.Tracer), device_holding(x)))
        return grouped_dense(x, *args, **options)

    monkeypatch.setattr(bridge, "grouped_dense", watched)
    elsewhere = jax.devices()[-1]  # not the default one, of several
    shapes = (20, 16), (2, 8, 16), (20, 8)
    x, w, dy = (jax.device_put(rng.standard_normal(shape).astype(np.float32), elsewhere) for shape in shapes)
    result = BRIDGE.grouped_linear(x, w, [7, 9], dy, recipe=octavo.MXFP8())
    assert planned == [(True, elsewhere)]
    assert result.dw.devices() == {elsewhere}


def test_host_reads_are_seen() -> None:
    """A read of a value, a branch on one, and a callback are named; a clean layer has none."""
    sizes = jnp.array([7, 9])
    x, kernel = jnp.ones((20, 16)), jnp.ones((2, 16, 8))
    recipe = octavo.recipe("mxfp8")
    assert BRIDGE.host_reads(lambda x, w, s: BRIDGE.grouped_linear(x, w, s, recipe=recipe).y, x, kernel.mT, sizes) == ()
    assert BRIDGE.host_reads(lambda s: x[: int(s[0])], sizes) == ("ConcretizationTypeError",)
    assert BRIDGE.host_reads(lambda s: np.asarray(s).sum(), sizes) == ("TracerArrayConversionError",)
    assert BRIDGE.host_reads(lambda s: s if s[0] > 3 else -s, sizes) == ("TracerBoolConversionError",)
    told = BRIDGE.host_reads(jax.jit(lambda s: jax.pure_callback(lambda v: v, s, s)), sizes)
    assert told == ("pure_callback",)
