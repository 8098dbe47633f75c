"""Seeds of stochastic rounding: integers of either sign, arrays, words and keys of JAX's generators."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import octavo
import octavo_jax
from octavo_jax.scaling.seeds import seed_words


def _words(seed: object) -> list[int]:
    return np.asarray(seed_words(seed)).tolist()  # type: ignore[arg-type]


def test_a_negative_seed_is_one_number_wherever_it_lies(rng: np.random.Generator) -> None:
    """Modulo 2^64, as the definition takes a host integer: an int32 array has a high word of ones, traced or not."""
    seed = -int(rng.integers(1, 1 << 31))
    wanted = [seed % (1 << 32), (1 << 32) - 1]
    on_device = jnp.asarray(seed, jnp.int32)
    assert _words(seed) == _words(np.int32(seed)) == _words(on_device) == wanted
    assert np.asarray(jax.jit(seed_words)(on_device)).tolist() == wanted
    assert _words(jnp.asarray(-seed, jnp.int32)) == _words(-seed) == [-seed, 0]


def test_keys_are_seeds(rng: np.random.Generator) -> None:
    """A key of JAX's default generator gives its own two words, as the old kind of key did; of a generator with more
    words two are drawn. Keys that were split differ."""
    number = int(rng.integers(1 << 31))
    key = jax.random.key(number)
    assert _words(key) == _words(jax.random.PRNGKey(number)) == np.asarray(jax.random.key_data(key)).tolist()
    assert np.asarray(jax.jit(seed_words)(key)).tolist() == _words(key)
    first, second = jax.random.split(key)
    assert _words(first) != _words(second)
    wide = jax.random.key(number, impl="rbg")
    assert len(_words(wide)) == 2
    assert _words(wide) != _words(jax.random.fold_in(wide, 1))


@pytest.mark.parametrize("dtype", ["int64", "uint64", "int32", "uint8"])
def test_a_numpy_scalar_keeps_its_upper_half(dtype: str, rng: np.random.Generator) -> None:
    """A 0-d array of numpy is the host integer that it holds; as an array of JAX it would keep 32 bits."""
    ends = np.iinfo(dtype)
    for seed in (int(ends.max), int(ends.min), int(rng.integers(ends.min, ends.max, dtype=dtype))):
        assert _words(np.array(seed, dtype)) == _words(seed)


def test_a_quantizer_takes_a_key() -> None:
    """As an argument of a traced program, where it is still a key."""
    spec = octavo.NVFP4(hadamard=False, wgrad="high_precision").quantizer("dy")
    assert spec is not None

    def quantized(x: jax.Array, key: jax.Array) -> jax.Array:
        payload = octavo_jax.quantize(x, spec, [16], seed=key, backend="jax-reference").rowwise
        assert payload is not None
        return payload

    made = jax.eval_shape(quantized, jnp.ones((16, 32)), jax.random.key(7))
    assert made.shape == (16, 32)


def test_several_keys_are_refused() -> None:
    """A layer has one seed."""
    keys = jax.random.split(jax.random.key(0), 3)
    with pytest.raises(ValueError, match=re.escape("seed is 3 keys of shape [3]; give one of them")):
        seed_words(keys)
