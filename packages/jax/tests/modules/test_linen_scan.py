"""linen modules in flax.linen.scan: what each layer has of its own, whichever streams are split."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax.errors import InvalidRngError

import octavo
from octavo_jax import linen as octavo_linen
from octavo_jax.linen import STATE_COLLECTION, grouped

M, K, G, LAYERS = 32, 16, 3, 5
SIZES = jnp.array([10, 0, 15])
STOCHASTIC = octavo.NVFP4(hadamard=False)
DELAYED = octavo.DelayedScaling(history=4)


class Layer(nn.Module):
    """A grouped layer whose activation needs y, as the body of a scan; it also returns y and what it was given."""

    recipe: Any

    @nn.compact
    def __call__(self, x: Any, sizes: Any) -> tuple[Any, Any]:
        """(the next x, (x, y))."""
        y = octavo_linen.GroupedDense(G, K, recipe=self.recipe, name="dense")(x, sizes)
        return jnp.tanh(y), (x, y)


def _scanned(recipe: Any, **split: bool) -> Any:
    axes = {"params": 0, STATE_COLLECTION: 0}
    scan = nn.scan(Layer, variable_axes=axes, split_rngs=split, in_axes=nn.broadcast, length=LAYERS)
    return scan(recipe=recipe)


@pytest.mark.parametrize("params", [True, False])
def test_a_scan_gives_each_layer_its_own_seed(params: bool, x: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """split_rngs splits the stream "quantization" (faults.md 40), whether it splits "params" or not; a stream that is
    passed on and not split is one seed for all, as Flax has it."""

    def seeds(x: Any, *_: Any, seed: Any, **__: Any) -> Any:
        return jnp.broadcast_to(seed.astype(jnp.float32), (M, 8, 2)).reshape(M, K)

    monkeypatch.setattr(grouped, "grouped_dense", seeds)
    keys = {name: jax.random.key(i) for i, name in enumerate(("params", "quantization"))}
    for quantization, wanted in ((True, LAYERS), (False, 1)):
        module = _scanned(STOCHASTIC, params=params, quantization=quantization)
        variables = jax.jit(module.init)(keys, x, SIZES)
        kernels = np.asarray(variables["params"]["dense"]["kernel"])
        assert len(np.unique(kernels, axis=0)) == (LAYERS if params else 1)
        drawn = np.asarray(jax.jit(module.apply)(variables, x, SIZES, rngs=keys)[1][1])[:, 0, :2]
        assert len(np.unique(drawn, axis=0)) == wanted


def test_a_scan_gives_each_layer_its_own_state(x: Any) -> None:
    """A state follows variable_axes and no stream: where split_rngs={"params": False} starts layers with equal kernels,
    each records the amax of its own input, bit for bit."""
    module = _scanned(DELAYED, params=False)
    variables = jax.jit(module.init)(jax.random.key(0), x, SIZES)

    def loss(variables: Any) -> Any:
        y, (inputs, _) = module.apply(variables, x, SIZES)
        return jnp.sum(y[:25] ** 2), inputs

    gradient, inputs = jax.jit(jax.grad(loss, has_aux=True))(variables)
    state = gradient[STATE_COLLECTION]["dense"]["state"]
    recorded = np.asarray(state.x.history[:, 0])
    for group, rows in ((0, slice(0, 10)), (2, slice(10, 25))):
        assert np.array_equal(recorded[:, group], np.abs(np.asarray(inputs))[:, rows].max((1, 2)))
    of_kernels = np.asarray(state.kernel.history[:, 0])
    assert np.array_equal(of_kernels, np.abs(np.asarray(variables["params"]["dense"]["kernel"])).max((2, 3)))
    assert len(np.unique(state.grad.history[:, 0, 0])) == LAYERS


class Model(nn.Module):
    """A scan within a module, told of some streams."""

    split: Any

    @nn.compact
    def __call__(self, x: Any) -> Any:
        """x after five layers."""
        return _scanned(STOCHASTIC, **self.split)(x, SIZES)[0]


@pytest.mark.parametrize("params", [True, False])
def test_a_scan_that_was_not_told_of_the_stream_is_refused(params: bool, x: Any) -> None:
    """Flax draws from "params" where a stream is missing: with the keys that init took, every step rounded by the same
    bits, and with split_rngs={"params": False} every layer did. A single key, which is "params", is taken as it is."""
    module: Any = Model({"params": params})
    keys = {name: jax.random.key(i) for i, name in enumerate(("params", "quantization"))}
    variables = jax.eval_shape(module.init, keys, x)  # in which no bits matter
    with pytest.raises(InvalidRngError, match=r"told of, split_rngs=\{'quantization': True\}"):
        jax.eval_shape(partial(module.apply, rngs=keys), variables, x)
    for told, rngs in (({"params": params}, keys["params"]), ({"quantization": True}, keys)):
        assert jax.eval_shape(partial(Model(told).apply, rngs=rngs), variables, x).shape == x.shape
