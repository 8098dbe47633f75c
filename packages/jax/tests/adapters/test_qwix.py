"""octavo_jax.adapters.qwix: a model that calls jax.lax.ragged_dot runs a recipe, without an edit."""

from __future__ import annotations

import inspect
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx

import octavo
import octavo_jax
import octavo_jax.linen

qwix = pytest.importorskip("qwix", reason="qwix is not installed; `nox -s adapters` installs it")

from octavo_jax.adapters.qwix import RecipeProvider, RecipeRule  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # qwix 0.1.8 uses names that flax 0.12 renamed

M, K, G = 24, 32, 3
SIZES = np.array([7, 0, 12], np.int32)
RECIPE = octavo.recipe("mxfp8")


class Experts(nn.Module):
    """What a model of its own does: a kernel a group, and JAX's ragged_dot."""

    @nn.compact
    def __call__(self, x: Any) -> Any:
        kernel = self.param("kernel", nn.initializers.lecun_normal(), (G, K, K), x.dtype)
        return jax.lax.ragged_dot(x, kernel, jnp.asarray(SIZES))


class Model(nn.Module):
    """A dense layer, experts, and a layer of ours that the model calls by name."""

    @nn.compact
    def __call__(self, x: Any) -> Any:
        x = nn.Dense(K, name="before")(x)
        x = Experts(name="experts")(x)
        kernel = self.param("own", nn.initializers.lecun_normal(), (G, K, K), x.dtype)
        return octavo_jax.grouped_dense(x, kernel, jnp.asarray(SIZES), recipe=RECIPE, backend="jax-reference")


def _ours(*operands: Any) -> Any:
    return octavo_jax.ragged_dot(*operands, recipe=RECIPE, backend="jax-reference")


def _expected(parameters: Any, x: Any, experts: Any) -> Any:
    x = x @ parameters["before"]["kernel"] + parameters["before"]["bias"]
    x = experts(x, parameters["experts"]["kernel"], jnp.asarray(SIZES))
    own = parameters["own"]
    return octavo_jax.grouped_dense(x, own, jnp.asarray(SIZES), recipe=RECIPE, backend="jax-reference")


def _gradients(f: Any, parameters: Any, x: Any) -> Any:
    return jax.jit(jax.value_and_grad(lambda p, x: jnp.sum(jnp.sin(f(p, x))), (0, 1)))(parameters, x)


def _same(a: Any, b: Any) -> bool:
    return all(np.array_equal(one, two) for one, two in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True))


def test_a_linen_model(rng: np.random.Generator) -> None:
    """Our bits, forward and backward, beside modules that no rule names."""
    assert qwix.__version__ == "0.1.8"
    x = jnp.asarray(rng.standard_normal((M, K)), jnp.float32)
    parameters = Model().init(jax.random.key(0), x)["params"]
    rule = RecipeRule(module_path=".*experts", recipe=RECIPE, backend="jax-reference")
    everywhere = qwix.QtRule(module_path="", weight_qtype="int8", act_qtype="int8")  # the outermost module's own calls
    for rules in ([rule], [rule, everywhere]):
        model = qwix.quantize_model(Model(), RecipeProvider(rules))
        mine = _gradients(lambda p, x, m=model: m.apply({"params": p}, x), parameters, x)
        ours = _gradients(
            lambda p, x: _expected(p, x, _ours),
            parameters,
            x,
        )
        assert _same(mine, ours)
    plain = _gradients(lambda p, x: _expected(p, x, jax.lax.ragged_dot), parameters, x)
    assert not _same(mine, plain)


def test_a_layer_of_ours_keeps_its_products(rng: np.random.Generator) -> None:
    """qwix replaces products wherever they are called, a backend's too; under our provider a layer's stay its own
    (faults.md 63)."""

    class Own(nn.Module):
        @nn.compact
        def __call__(self, x: Any) -> Any:
            kernel = self.param("kernel", nn.initializers.lecun_normal(), (G, K, K), x.dtype)
            return octavo_jax.grouped_dense(x, kernel, SIZES, recipe=None, backend="jax-reference")

    x = jnp.asarray(rng.standard_normal((M, K)), jnp.float32)
    parameters = Own().init(jax.random.key(0), x)
    expected = Own().apply(parameters, x)
    for provider, untouched in ((qwix.QtProvider, False), (RecipeProvider, True)):
        jax.clear_caches()  # what is traced already is not replaced
        model = qwix.quantize_model(Own(), provider([qwix.QtRule(weight_qtype="int8", act_qtype="int8")]))
        assert _same(model.apply(parameters, x), expected) is untouched


def test_an_moe_block_of_ours_keeps_its_products(rng: np.random.Generator) -> None:
    """Its programs are traced once per process, so a provider's products in one would stay when it is gone."""
    x = jnp.asarray(rng.standard_normal((M, K)), jnp.float32)
    model = octavo_jax.linen.MoE(4, K, k=2, recipe=None, backend="jax-reference")
    parameters = model.init(jax.random.key(0), x)
    expected = model.apply(parameters, x)[0]
    jax.clear_caches()
    quantized = qwix.quantize_model(model, RecipeProvider([qwix.QtRule(weight_qtype="int8", act_qtype="int8")]))
    assert _same(quantized.apply(parameters, x)[0], expected)
    assert _same(model.apply(parameters, x)[0], expected)


def test_every_layer_is_protected() -> None:
    """A public function that computes products by a recipe is among those that a provider leaves alone."""
    parameters = {"recipe", "backend", "preferred_element_type"}
    public = (getattr(place, name) for place in (octavo_jax, octavo_jax.moe) for name in place.__all__)
    layers = {f for f in public if inspect.isfunction(f) and parameters <= inspect.signature(f).parameters.keys()}
    layers.remove(octavo_jax.explain)  # of a layer, and computes none
    protected = set(RecipeProvider([]).get_intercept_map().values())
    assert {octavo_jax.grouped_dense, octavo_jax.moe.moe_mlp} <= layers
    assert {f for f in layers if inspect.unwrap(f) not in protected} == set()


def test_an_nnx_model(rng: np.random.Generator) -> None:
    """The same for nnx, whose provider sees the model's inputs; a stochastic recipe takes a seed a product."""

    class Layer(nnx.Module):
        def __init__(self) -> None:
            self.kernel = nnx.Param(jnp.asarray(rng.standard_normal((G, K, K)), jnp.float32))

        def __call__(self, x: Any) -> Any:
            return jax.lax.ragged_dot(x, self.kernel[...], jnp.asarray(SIZES))

    x = jnp.asarray(rng.standard_normal((M, K)), jnp.float32)
    layer, recipe = Layer(), octavo.recipe("nvfp4")
    model = qwix.quantize_model(layer, RecipeProvider([RecipeRule(recipe=recipe, seed=lambda: 7)]), x)
    expected = octavo_jax.ragged_dot(x, layer.kernel[...], jnp.asarray(SIZES), recipe=recipe, seed=7)
    assert np.array_equal(model(x), expected)


def test_rules_that_contradict_themselves() -> None:
    """A recipe says how operands are quantized; qwix's own fields beside it would be ignored, so they are refused."""
    with pytest.raises(ValueError, match=r"weight_qtype='int8'; its recipe says how"):
        RecipeRule(recipe=RECIPE, weight_qtype="int8")
