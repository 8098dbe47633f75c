"""Layers whose GEMMs read values that quantizers wrote in the place of codes, against layers that read codes.

A CPU's kernels multiply what codes stand for, so a layer there reads codes. Here two backends have the same kernels,
and one of them is asked as if they multiplied bf16 copies, as Hopper's do. MXFP8 then has the same bits on a CPU, too,
and NVFP4 where its second level is a power of two.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hopper_gpu import MARKS
from jax import Array
from jax.sharding import PartitionSpec as P

import octavo_jax
import octavo_native.values
import octavo_registry
from octavo import MXFP8, NVFP4, BlockScaling, Recipe
from octavo_jax import moe
from octavo_jax.counting import count_runs
from octavo_jax.linear.normalized_dense import layernorm_dense
from octavo_jax.moe.layer.forms import FORMS
from octavo_jax.policies import plane_names, save_quantized
from octavo_jax.remat.name_checks import unnamed_planes
from octavo_jax_native.backend import NativeBackend
from octavo_jax_native.plugin import CARD
from octavo_jax_native.quantizers import forms
from octavo_registry.contract import (
    AnyBound,
    AnyRequest,
    Backend,
    BackendCard,
    BoundQuantize,
    QuantizeRequest,
    hookimpl,
)

CODES, VALUES = "native-codes", "native-values"
M, K, N, G = 200, 96, 48, 4
SIZES = np.array([100, 0, 50, 7], np.int32)
SEED = 20_261_130
FACTOR_OF_TWO = 2.625
"""2688 / 1024: a group with this amax has a power of two for NVFP4's second level."""

RECIPES: dict[str, Recipe] = {
    "mxfp8": MXFP8(),
    "mxfp8 square e5m2": MXFP8(square_weights=True, gradient_format="e5m2"),
    "nvfp4 without a transform": NVFP4(hadamard=False),
}
POLICIES: dict[str, Any] = {
    "no policy": None,
    "planes": save_quantized(),
    "columns": save_quantized(*plane_names(directions="columnwise")),
    "planes and y": save_quantized("quantization", "y"),
    "everything": jax.checkpoint_policies.everything_saveable,
    "everything but y": jax.checkpoint_policies.save_anything_except_these_names("y"),
}


class _Asked(NativeBackend):
    """The kernels, of which a device multiplies copies or does not."""

    def __init__(self, copies: bool) -> None:
        super().__init__()
        self._copies = copies

    def bind(self, request: AnyRequest) -> AnyBound:
        with mock.patch.object(octavo_native.values, "multiplies_values", return_value=self._copies):
            return super().bind(request)


class _Plugin:
    @hookimpl
    def octavo_backends(self) -> tuple[BackendCard, ...]:
        return tuple(CARD.model_copy(update={"name": name, "priority": -300}) for name in (CODES, VALUES))

    @hookimpl
    def octavo_load(self, name: str) -> Backend | None:
        return _Asked(name == VALUES) if name in (CODES, VALUES) else None


@pytest.fixture(scope="module", autouse=True)
def _backends() -> Iterator[None]:
    octavo_registry.register(_Plugin(), "two-forms")
    yield
    octavo_registry.unregister("two-forms")


def _layer(recipe: Recipe, backend: str, policy: Any = "no remat") -> Callable[..., Array]:
    """|y|, whose gradient reads y and has the magnitudes of what comes in."""

    def layer(x: Array, kernel: Array) -> Array:
        how: dict[str, Any] = {"recipe": recipe, "seed": SEED, "backend": backend, "output_checkpoint_name": "y"}
        return jnp.abs(octavo_jax.grouped_dense(x, kernel, SIZES, **how))

    return layer if policy == "no remat" else jax.checkpoint(layer, policy=policy)


def _step(layer: Callable[..., Array]) -> Callable[..., tuple[Array, ...]]:
    """y, dx and dw."""

    def step(x: Array, kernel: Array, dy: Array) -> tuple[Array, ...]:
        y, pull = jax.vjp(layer, x, kernel)
        return y, *pull(dy)

    return step


def _operands(rng: np.random.Generator) -> list[Array]:
    """x, a kernel and dy below FACTOR_OF_TWO, which stands in each row or matrix once; NaN past the sum."""
    made = []
    for shape in ((M, K), (G, K, N), (M, N)):
        array = np.clip(rng.standard_normal(shape), -2.5, 2.5)
        array[..., 0] = FACTOR_OF_TWO
        if len(shape) == 2:
            array[SIZES.sum() :] = np.nan
        made.append(jnp.asarray(array, jnp.bfloat16))
    return made


def _same(made: Any, wanted: Any, same_bits: Any, what: str) -> None:
    for number, (one, other) in enumerate(zip(jax.tree.leaves(made), jax.tree.leaves(wanted), strict=True)):
        same_bits(one, other, f"{what}, result {number}")


@pytest.mark.parametrize("name", RECIPES)
def test_bits_of_codes(name: str, rng: np.random.Generator, same_bits: Any) -> None:
    """y, dx and dw of ragged groups and an empty one, whatever `jax.checkpoint` saves of x and of the kernel, and of a
    batch."""
    recipe, given = RECIPES[name], _operands(rng)
    wanted = jax.jit(_step(_layer(recipe, CODES)))(*given)
    for what in ("no remat", "no policy", "columns", "planes"):
        layer = _layer(recipe, VALUES, POLICIES.get(what, what))
        _same(jax.jit(_step(layer))(*given), wanted, same_bits, what)
    batch = jax.jit(jax.vmap(_step(layer), in_axes=(0, None, 0)))(given[0][None], given[1], given[2][None])
    _same([one[0] for one in batch], wanted, same_bits, "a batch")


def test_bits_inside_shard_map(rng: np.random.Generator, same_bits: Any) -> None:
    """Layers on local arrays, of which JAX's types know over which axis they differ."""
    if jax.device_count() < 2:
        pytest.skip("one device alone")
    mesh = jax.make_mesh((2,), ("dp",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:2])
    x, kernel, dy = _operands(rng)
    rows = jnp.stack([x, x]).reshape(2 * M, K)

    def step(backend: str) -> Any:
        layer = _layer(MXFP8(), backend, POLICIES["planes"])
        run = jax.shard_map(layer, mesh=mesh, in_specs=(P("dp"), P()), out_specs=P("dp"))
        return jax.jit(_step(run))(rows, kernel, jnp.concatenate([dy, dy]))

    _same(step(VALUES), step(CODES), same_bits, "shard_map")


@pytest.mark.parametrize("name", ["mxfp8", "nvfp4"])
@pytest.mark.parametrize("policy", ["no remat", "planes"])
def test_bits_of_codes_on_a_gpu(name: str, policy: str, rng: np.random.Generator, same_bits: Any) -> None:
    """The products of codes are products of the same bf16 copies there, of any operands."""
    recipe: Recipe = MXFP8() if name == "mxfp8" else NVFP4()
    given = [jax.device_put(array, jax.devices("gpu")[0]) for array in _operands(rng)]
    made, wanted = (
        jax.jit(_step(_layer(recipe, backend, {"no remat": policy, **POLICIES}[policy])))(*given)
        for backend in (VALUES, CODES)
    )
    _same(made, wanted, same_bits, policy)


for _mark in MARKS:
    test_bits_of_codes_on_a_gpu = _mark(test_bits_of_codes_on_a_gpu)


def _mlp(recipe: Recipe, backend: str) -> Callable[..., Array]:
    def run(x: Array, wi: Array, wo: Array) -> Array:
        how: dict[str, Any] = {"recipe": recipe, "seed": SEED, "backend": backend}
        made: Array = octavo_jax.grouped_mlp(x, wi, wo, SIZES, **how)
        return made

    return run


def _normalized(recipe: Recipe, backend: str) -> Callable[..., Array]:
    def run(x: Array, kernel: Array) -> Array:
        gamma = jnp.ones(K, x.dtype)
        made: Array = layernorm_dense(x, kernel[0], gamma, recipe=recipe, seed=SEED, backend=backend)
        return made

    return run


def _gradients(run: Callable[..., Array], *given: Array) -> Any:
    def loss(*given: Array) -> Array:
        return jnp.sum(jnp.tanh(run(*given).astype(jnp.float32)))

    return jax.jit(jax.value_and_grad(loss, argnums=tuple(range(len(given)))))(*given)


def test_bits_of_an_mlp_and_of_a_normalized_layer(rng: np.random.Generator, same_bits: Any) -> None:
    """What activations, their gradients and normalizations are quantized to is read as values, too."""
    x, kernel, _ = _operands(rng)
    x = jnp.nan_to_num(x)
    wi, wo = (jnp.asarray(rng.standard_normal(shape) / 8, jnp.bfloat16) for shape in ((G, K, 2 * N), (G, N, K)))
    for run, given in ((_mlp, (x, wi, wo)), (_normalized, (x, kernel))):
        made, wanted = (_gradients(run(MXFP8(), backend), *given) for backend in (VALUES, CODES))
        _same(made, wanted, same_bits, run.__name__)


def _moe(backend: str, form: Any, weight_codes: Any, weights_on: Any, chosen: Array) -> Callable[..., Array]:
    def run(x: Array, weights: Array, wi: Array, wo: Array) -> Array:
        how: dict[str, Any] = {"form": form, "weight_codes": weight_codes, "weights_on": weights_on}
        routing = moe.arrange(chosen, weights, G)
        made: Array = moe.routed_mlp(x, routing, wi, wo, recipe=MXFP8(), backend=backend, **how)
        return made

    return run


def test_bits_of_a_moe_layer(rng: np.random.Generator, same_bits: Any) -> None:
    """In a way of keeping that each run draws; x and dy are quantized where tokens stand."""
    shapes = ((M, K), (G, K, 2 * N), (G, N, K))
    x, wi, wo = (jnp.asarray(rng.standard_normal(shape) / 6, jnp.bfloat16) for shape in shapes)
    chosen = jnp.asarray(np.stack([rng.permutation(G)[:2] for _ in range(M)]))
    weights = jnp.asarray(rng.random((M, 2)), jnp.float32)
    form, codes, on = (str(rng.choice(names)) for names in (FORMS, ("keep", "remake"), ("output", "activation")))
    print(f"form {form}, weight_codes {codes}, weights on the {on}")  # shown by pytest where the test fails
    made, wanted = (
        _gradients(_moe(backend, form, codes, on, chosen), x, weights, wi, wo)[1] for backend in (VALUES, CODES)
    )
    # XLA sums the gradient of the weights in an order of its own
    _same((made[0], *made[2:]), (wanted[0], *wanted[2:]), same_bits, form)


def _planes(function: Callable[..., Any], *given: Any) -> tuple[list[str], dict[str, set[str]]]:
    """Of a program for CUDA, what each quantizer makes of rows and of columns, and each GEMM's sides with scales.

    A plane is "codes", "values" or "-"; values that are made of codes are listed by themselves.
    """
    text = str(jax.jit(function).trace(*given).lower(lowering_platforms=("cuda",)).as_text())
    made, scaled = [], {}
    for line in text.splitlines():
        if "custom_call @octavo_quantize_" in line:
            results = line.split('results = "')[1].split('"')[0].split(",")
            layouts = re.search(r"col_layout = (\d).*row_layout = (\d)", line)
            assert layouts is not None
            sides = zip(("row", "col"), reversed(layouts.groups()), strict=True)
            forms = {"0": "plain codes", "1": "codes", "2": "values"}
            made.append("/".join(forms[number] if f"{side}_codes" in results else "-" for side, number in sides))
        if "custom_call @octavo_gemm(" in line:
            operands = line.split('operands = "')[1].split('"')[0].split(",")
            number = line.split("gemm = ")[1][0]
            scaled[number] = {name.removesuffix("_scales") for name in operands if name.endswith("_scales")}
            # a GEMM of values copies nothing
            assert scaled[number] or 'results = "out"' in line
    made += ["values of codes"] * text.count("custom_call @octavo_dequantize(")
    return sorted(made), scaled


@pytest.mark.parametrize("recipe", [MXFP8(), NVFP4()], ids=["mxfp8", "nvfp4"])
def test_planes_of_a_step(recipe: Recipe) -> None:
    """Planes that are read in the pass that writes them are values, and those that wait for backward codes. Of a kernel
    that lies as [G, K, N] the columns are read first. A forward pass alone has no codes."""
    x, kernel, dy = (jnp.ones(shape, jnp.bfloat16) for shape in ((M, K), (G, K, N), (M, N)))

    def planes(policy: Any = "no remat", backend: str = VALUES) -> tuple[list[str], dict[str, set[str]]]:
        return _planes(_step(_layer(recipe, backend, policy)), x, kernel, dy)

    made, scaled = planes()
    assert made == ["codes/values", "values/codes", "values/values"]  # the kernel, x, dy
    # y by the kernels' dgrad, dx by their fprop of the kernel's rows, dw by wgrad of x's columns
    assert scaled == {"1": set(), "0": {"right"}, "2": {"left"}}
    assert _planes(_layer(recipe, VALUES), x, kernel)[0] == ["-/values", "values/-"]
    # computed again without a policy: what the second forward pass reads is values, too
    assert planes(None)[0] == ["-/values", "codes/values", "values/-", "values/codes", "values/values"]
    # saved planes are codes, of which both forward passes make values, as a GEMM did in its workspace
    saved = ["codes/codes", "codes/codes", *["values of codes"] * 4, "values/values"]
    assert planes(save_quantized())[0] == saved
    assert planes(save_quantized("quantization", "y"))[0] == ["codes/values", "values/codes", "values/values"]
    assert planes(backend=CODES)[0] == ["codes/codes"] * 3


def test_values_are_of_emulated_products() -> None:
    """A CPU multiplies what codes stand for, and block scaling's products are of codes on a GPU, too. NVFP4's columns
    are values where an array of 16-bit numbers is quantized, and nothing is in the plain layout."""

    def valued(device: str, recipe: Recipe, layouts: Any = ("rows", "panels"), dtype: Any = "bfloat16") -> Any:
        quantizer = recipe.quantizer("dy")
        assert quantizer is not None
        request = QuantizeRequest(
            "quantize", "jax", device, dtype, dtype, quantizer=quantizer, layouts=layouts, arch=(9, 0)
        )
        answer = NativeBackend().bind(request)
        assert isinstance(answer, BoundQuantize)
        assert (answer.in_two_forms is None) == (not forms.directions_as_values(request, of_array=True))
        return forms.directions_as_values(request, of_array=True)

    for recipe in (MXFP8(), NVFP4()):
        assert valued("cuda", recipe) == ("rowwise", "columnwise")
        assert valued("cuda", recipe, ("plain", "plain")) == valued("cpu", recipe) == ()
    assert valued("cuda", NVFP4(), dtype="float32") == ("rowwise",)
    assert valued("cuda", BlockScaling()) == ()


def test_planes_of_an_mlp_and_a_moe_layer() -> None:
    """Both layers of an MLP, and forms of a MoE layer that quantize again in backward: then columns of x and of an
    activation are read at once, too. NVFP4's columns are values of arrays alone, as their kernels are."""
    x, wi, wo = (jnp.ones(shape, jnp.bfloat16) for shape in ((M, K), (G, K, 2 * N), (G, N, K)))

    def gradients(run: Callable[..., Array], count: int) -> Callable[..., Any]:
        def loss(*given: Array) -> Array:
            return jnp.sum(run(*given).astype(jnp.float32))

        return jax.value_and_grad(loss, argnums=tuple(range(count)))

    of_layer = ["codes/values", "values/codes", "values/values"]
    assert _planes(gradients(_mlp(MXFP8(), VALUES), 3), x, wi, wo)[0] == sorted(2 * of_layer)
    gradient = "values/codes"  # of the activation, which a prologue computes
    nvfp4 = sorted([*of_layer, *of_layer[:2], gradient])
    assert _planes(gradients(_mlp(NVFP4(), VALUES), 3), x, wi, wo)[0] == nvfp4
    chosen, weights = jnp.zeros((M, 2), jnp.int32), jnp.ones((M, 2), jnp.float32)

    def of_moe(form: str, weight_codes: str) -> list[str]:
        run = _moe(VALUES, form, weight_codes, "activation", chosen)
        return _planes(gradients(run, 4), x, weights, wi, wo)[0]

    again = ["-/values", "values/-"]  # x, and the activation
    assert of_moe("standard", "keep") == sorted(2 * ["codes/values", "values/values", *again])
    kernels = 2 * ["-/values", "values/-"]
    assert of_moe("standard", "remake") == sorted(2 * ["values/values", *again] + kernels)


def _bytes(recipe: Recipe, backend: str, policy: Any) -> dict[str, int]:
    """Bytes of what a layer's backward pass keeps, by dtype."""
    avals = [jnp.zeros(shape, jnp.bfloat16) for shape in ((M, K), (G, K, N))]
    kept = jax.eval_shape(lambda *given: jax.vjp(_layer(recipe, backend, policy), *given)[1], *avals)
    found: dict[str, int] = {}
    for leaf in jax.tree.leaves(kept):
        found[leaf.dtype.name] = found.get(leaf.dtype.name, 0) + leaf.size * leaf.dtype.itemsize
    return found


@pytest.mark.parametrize("recipe", [MXFP8(), NVFP4()], ids=["mxfp8", "nvfp4"])
def test_what_is_kept_is_codes(recipe: Recipe) -> None:
    """No byte more than where GEMMs read codes: of a layer under each policy, and of every form of a MoE layer."""
    for what, policy in {"no remat": "no remat", **POLICIES}.items():
        assert _bytes(recipe, VALUES, policy) == _bytes(recipe, CODES, policy), what
    shape = octavo_jax.MoeShape(tokens=M, k=2, experts=G, in_features=K, hidden_features=N)
    for form in FORMS:
        for codes in ("keep", "remake"):
            kept, wanted = (
                octavo_jax.bytes_kept(recipe, shape, form, weight_codes=codes, backend=backend)
                for backend in (VALUES, CODES)
            )
            assert kept == wanted, (form, codes)


@pytest.mark.parametrize("policy", ["no policy", "planes", "columns", "planes and y"])
def test_nothing_is_quantized_more_often(policy: str) -> None:
    """Saved codes are not quantized again for the sake of their values, and every plane is named before it is read."""
    x, kernels = jnp.ones((M, K), jnp.bfloat16), jnp.ones((3, G, K, K), jnp.bfloat16)

    def runs(backend: str) -> Any:
        def loss(x: Array, kernels: Array) -> Array:
            under = _layer(MXFP8(), backend, POLICIES[policy])
            return jnp.sum(jax.lax.scan(lambda x, kernel: (under(x, kernel), None), x, kernels)[0].astype(jnp.float32))

        return count_runs(jax.grad(loss, argnums=(0, 1)), x, kernels)

    assert runs(VALUES) == runs(CODES)
    assert unnamed_planes(_layer(MXFP8(), VALUES), x, kernels[0]) == ()
