"""Forms of what a MoE layer keeps: the bits of permute, grouped_mlp and combine, and every byte predicted."""

from __future__ import annotations

import itertools
import math
import re
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import octavo
import octavo_jax
import octavo_numerics
from octavo_jax import MoeShape, bytes_kept, moe
from octavo_jax.moe import experts
from octavo_jax.moe.layer import autograd
from octavo_jax.moe.layer.forms import FORMS, keep_rows, kept_rows
from octavo_jax.moe.layer.residuals import MoeResiduals
from octavo_registry.contract.cards import GATED

pytestmark = pytest.mark.filterwarnings("ignore:a layer with delayed scaling")  # its scales are given and stay

T, C, G, K, F, N = 21, 3, 4, 32, 48, 40
BACKEND = "jax-reference"
SHAPE = MoeShape(T, C, G, K, F, N)
RECIPES: dict[str, octavo.Recipe | None] = {
    "bf16": None,
    "mxfp8": octavo.MXFP8(),
    "fp8-delayed": octavo.DelayedScaling(history=2),
    "fp8-block": octavo.BlockScaling(),
    "nvfp4": octavo.NVFP4(),
    "fp8-current": octavo.CurrentScaling(),
    "quantized backward": octavo.MXFP8(fprop="high_precision"),
    "quantized wgrad": octavo.MXFP8(fprop="high_precision", dgrad="high_precision"),
    "delayed, quantized backward": octavo.DelayedScaling(history=2, fprop="high_precision"),
}
AT_ONCE = ("mxfp8", "delayed, quantized backward")
EVERY_WAY = tuple(itertools.product(FORMS, ("keep", "remake")))
WEIGHTS_ON = ("output", "activation")
Given = dict[str, Any]


def _given(rng: np.random.Generator, activation: str = "swiglu") -> Given:
    """Arguments of routed_mlp, and their routing: some choices go nowhere, and the last expert gets none."""
    width = F * (2 if activation in GATED else 1)
    shapes = {"x": (T, K), "wi": (G, K, width), "wo": (G, F, N), "bi": (G, width), "bo": (G, N)}
    given: Given = {
        name: jnp.asarray(rng.standard_normal(shape) * shape[-2] ** -0.5, jnp.bfloat16)
        for name, shape in shapes.items()
    }
    chosen = np.stack([rng.permutation(G - 1)[:C] for _ in range(T)])
    chosen[rng.random(chosen.shape) < 0.2] = -1
    return {**given, "weights": jnp.asarray(rng.random((T, C)), jnp.float32), "chosen": jnp.asarray(chosen)}


def _states(recipe: octavo.Recipe | None, rng: np.random.Generator) -> Any:
    """States with scales other than 1, where the recipe has some."""
    if not isinstance(recipe, octavo.DelayedScaling):
        return None
    scaled = jax.tree.map(
        lambda leaf: leaf if leaf.ndim == 2 else jnp.asarray(rng.uniform(0.5, 1.5, leaf.shape), jnp.float32),
        octavo_jax.init_delayed(recipe, G),
    )
    return scaled, scaled


def _routed(given: Given, state: Any, **how: Any) -> Any:
    routing = moe.arrange(given["chosen"], given["weights"], G)
    rest = {name: one for name, one in given.items() if name not in ("x", "weights", "chosen")}
    return moe.routed_mlp(given["x"], routing, **rest, state=state, backend=BACKEND, **how)


def _composed(given: Given, state: Any, weights_on: str, **how: Any) -> Any:
    routing = moe.arrange(given["chosen"], given["weights"], G)
    rest = {name: one for name, one in given.items() if name not in ("x", "weights", "chosen")}
    probs = None if weights_on == "output" else moe.row_weights(routing)
    result = octavo_jax.grouped_mlp(
        moe.permute(given["x"], routing, backend=BACKEND),
        group_sizes=routing.group_sizes,
        probs=probs,
        bo_scales=probs,
        state=state,
        backend=BACKEND,
        **rest,
        **how,
    )
    rows, *later = result if state is not None else (result,)
    y = moe.combine(rows, routing, weighted=probs is None, preferred_element_type=given["x"].dtype, backend=BACKEND)
    return (y, *later) if later else y


def _results(run: Any, given: Given, state: Any, dy: Any) -> Any:
    """y, gradients by name, and what the state becomes."""
    arrays = {name: one for name, one in given.items() if name != "chosen"}

    def y_and_state(arrays: Given, state: Any) -> Any:
        result = run({**arrays, "chosen": given["chosen"]}, state)
        return result if state is not None else (result, None)

    (y, later), pull = jax.vjp(y_and_state, arrays, state)
    gradients, after = pull((dy, jax.tree.map(jnp.zeros_like, later)))
    return {"y": y, **gradients, **{f"state {i}": leaf for i, leaf in enumerate(jax.tree.leaves((later, after)))}}


def _assert_same_bits(made: Given, wanted: Given, but: tuple[str, ...] = ()) -> None:
    assert made.keys() == wanted.keys()
    for name, value in made.items():
        if name not in but:
            assert value.dtype == wanted[name].dtype, name
            assert np.array_equal(np.asarray(value), np.asarray(wanted[name])), name


@pytest.mark.slow
@pytest.mark.parametrize("name", RECIPES)
def test_bits_of_permute_grouped_mlp_and_combine(name: str, rng: np.random.Generator) -> None:
    """y, all gradients and delayed scaling's states, in two ways of keeping that each run draws: programs that quantize
    take long to compile."""
    weights_on: Any = str(rng.choice(["output", "activation"]))
    recipe, activation = RECIPES[name], str(rng.choice(["swiglu", "gelu"]))
    given, state = _given(rng, activation), _states(recipe, rng)
    dy = jnp.asarray(rng.standard_normal((T, N)), jnp.bfloat16)
    how = {"recipe": recipe, "weights_on": weights_on, "activation": activation, "seed": 7}
    wanted = _results(partial(_composed, **how), given, state, dy)
    for number in rng.permutation(len(EVERY_WAY))[:2]:
        form, weight_codes = EVERY_WAY[number]
        print(weights_on, activation, form, weight_codes)  # shown by pytest where the test fails
        made = _results(partial(_routed, form=form, weight_codes=weight_codes, **how), given, state, dy)
        if form == "lean":
            assert np.array_equal(made["y"], wanted["y"])
            assert all(np.isfinite(np.asarray(one, np.float32)).all() for one in made.values())
        else:
            _assert_same_bits(made, wanted)


@pytest.mark.parametrize("weights_on", WEIGHTS_ON)
def test_bits_in_high_precision(weights_on: Any, rng: np.random.Generator) -> None:
    """The same in bf16, which compiles sooner: in the default, and with weights on the activation and on fc2's bias."""
    given, dy = _given(rng), jnp.asarray(rng.standard_normal((T, N)), jnp.bfloat16)
    wanted = _results(partial(_composed, recipe=None, weights_on=weights_on), given, None, dy)
    _assert_same_bits(_results(partial(_routed, recipe=None, weights_on=weights_on), given, None, dy), wanted)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_lean_rows_are_their_definition(dtype: str, rng: np.random.Generator) -> None:
    """What the backward pass reads of kept codes is octavo_numerics.keep_rows, bit for bit, and zero past the sum."""
    wide = rng.standard_normal((9, 200)) * np.exp2(rng.integers(-12, 12, (9, 1)))
    rows = wide.astype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)
    rows[0, :3] = np.array([ml_dtypes.finfo(rows.dtype).max, ml_dtypes.finfo(rows.dtype).smallest_normal, 0])
    sizes = jnp.array([3, 0, 4])
    kept = keep_rows(jnp.asarray(rows), sizes, BACKEND)
    assert sum(leaf.nbytes for leaf in jax.tree.leaves(kept)) == 9 * 200 + 9 * 2 * 4
    read = np.asarray(kept_rows(kept, sizes, rows.dtype, BACKEND))
    assert read.dtype == rows.dtype
    assert np.array_equal(read[:7], octavo_numerics.keep_rows(rows[:7]))
    assert not read[7:].any()


@pytest.mark.parametrize("weights_on", [pytest.param("output", marks=pytest.mark.slow), "activation"])
def test_lean_gradients_are_those_of_its_definition(weights_on: Any, rng: np.random.Generator) -> None:
    """Of the lean form: the gradients that the standard one computes where fc1's result is what the definition keeps of
    it. They are not the standard form's own."""
    given, dy = _given(rng), jnp.asarray(rng.standard_normal((T, N)), jnp.bfloat16)
    kept = {form: _kept(given, form, weights_on) for form in ("standard", "lean")}
    h = np.asarray(kept["standard"].h)
    rows = int(jnp.sum(kept["standard"].context.group_sizes))
    defined = np.concatenate([octavo_numerics.keep_rows(h[:rows]), np.zeros_like(h[rows:])])
    by_definition = replace(kept["standard"], h=jnp.asarray(defined))
    backward = jax.jit(lambda kept: autograd._moe_bwd(kept.plan, kept, (dy, None))[0])
    lean, wanted, other = (backward(one) for one in (kept["lean"], by_definition, kept["standard"]))
    for name, value in lean._asdict().items():
        if value is not None:
            assert np.array_equal(value, getattr(wanted, name)), name
    assert not np.array_equal(lean.wi, other.wi)


def _kept(given: Given, form: Any, weights_on: str) -> MoeResiduals:
    """What the layer keeps in bf16."""
    found: list[MoeResiduals] = []

    def spy(*arguments: Any) -> Any:
        result, kept = jax.jit(autograd.moe_with_residuals, static_argnums=0)(*arguments)
        found.append(kept)
        return result[0], result[1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(experts, "octavo_moe", spy)
        _routed(given, None, recipe=None, form=form, weights_on=weights_on)
    return found[0]


def _residuals(recipe: Any, form: Any, weight_codes: Any, weights_on: Any, rng: np.random.Generator) -> int:
    """Bytes of the leaves of the function that jax.vjp returns, but for those of the parameters."""
    given, state = _given(rng), _states(recipe, rng)
    parameters = {(one.shape, one.dtype) for name, one in given.items() if name in ("wi", "wo", "bi", "bo")}
    routing = moe.arrange(given.pop("chosen"), given.pop("weights"), G)

    def pull(given: Given, routing: Any, state: Any) -> Any:
        def run(given: Given, weights: Any) -> Any:
            result = moe.routed_mlp(
                given["x"],
                replace(routing, weights=weights),
                *(given[name] for name in ("wi", "wo")),
                bi=given["bi"],
                bo=given.get("bo"),
                recipe=recipe,
                seed=7,
                state=state,
                form=form,
                weight_codes=weight_codes,
                weights_on=weights_on,
                backend=BACKEND,
            )
            return result[0] if state is not None else result

        return jax.vjp(run, given, routing.weights)[1]

    leaves = jax.tree.leaves(jax.eval_shape(pull, given, routing, state))
    return sum(
        math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in leaves if (leaf.shape, leaf.dtype) not in parameters
    )


@pytest.mark.parametrize(
    ("name", "places"),
    [*((name, 1) for name in AT_ONCE), *(pytest.param(name, 2, marks=pytest.mark.slow) for name in RECIPES)],
)
def test_every_byte_is_predicted(name: str, places: int, rng: np.random.Generator) -> None:
    """The residuals of jax.vjp are those that bytes_kept counts, in every form; with one place of the weights a way,
    each form and each treatment of codes meets both."""
    recipe = RECIPES[name]
    for number, (form, weight_codes) in enumerate(EVERY_WAY):
        first = (number + number // 2) % 2
        for weights_on in (*WEIGHTS_ON, *WEIGHTS_ON)[first : first + places]:
            how: Given = {"weight_codes": weight_codes, "weights_on": weights_on}
            predicted = bytes_kept(recipe, SHAPE, form, backend=BACKEND, **how)
            measured = _residuals(recipe, form, rng=rng, **how)
            assert predicted.total == measured, (form, how, predicted.arrays)


def test_rows_of_x_are_kept_for_who_reads_them() -> None:
    """What "keep_all" keeps of x for fc1's weight gradient: tokens where that reads them, and else operands by row."""
    kept = {
        name: bytes_kept(recipe, SHAPE, "keep_all", weights_on="activation", backend=BACKEND).arrays
        for name, recipe in {"bf16": None, "codes": octavo.BlockScaling()}.items()
    }
    assert kept["bf16"]["x"] == T * K * 2
    assert not any(name.startswith("x1") for name in kept["bf16"])
    assert "x" not in kept["codes"]
    assert sum(size for name, size in kept["codes"].items() if name.startswith("x1")) >= T * C * K


def test_forms_are_in_order() -> None:
    """Each form keeps less than the one before, and a standard one no more than SonicMoE's 2 K + 4 F k bytes and what a
    router's choices are."""
    shape = MoeShape(8192, 8, 128, 2048, 768)
    for recipe in (None, "mxfp8"):
        each = {
            form: bytes_kept(recipe, shape, form, weight_codes="remake", backend=BACKEND).per_token
            for form in ("keep_all", "standard", "lean", "recompute")
        }
        assert list(each.values()) == sorted(each.values(), reverse=True)
        routing, sizes = 8 * (4 + 4 + 4), 4 * 129 / 8192
        assert each["standard"] <= 2 * 2048 + 4 * 768 * 8 + routing + sizes
        assert each["lean"] <= 0.6 * (2 * 2048 + 4 * 768 * 8) + routing + sizes


def test_k_has_an_old_name() -> None:
    """`choices` gives the same shape with one warning, and is refused beside k."""
    old: Any = MoeShape
    sides = {"tokens": T, "experts": G, "in_features": K, "hidden_features": F, "out_features": N}
    with pytest.warns(DeprecationWarning, match="choices is called k now") as said:
        assert old(**sides, choices=C) == SHAPE
    assert [one.filename for one in said] == [__file__]
    assert SHAPE.choices == SHAPE.k == C
    with pytest.raises(TypeError, match="both were given; give k alone"):
        old(**sides, k=C, choices=C)


def test_messages() -> None:
    """Errors name the argument, what was given, and what is needed."""
    p = {"x": jnp.zeros((4, 8)), "router": jnp.zeros((8, 2)), "wi": jnp.zeros((2, 8, 8)), "wo": jnp.zeros((2, 4, 8))}
    with pytest.raises(ValueError, match="form is 'slim'; give one of keep_all, standard, lean, recompute"):
        moe.moe_mlp(**p, k=1, recipe=None, form="slim")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="weight_codes is True; give 'keep' or 'remake'"):
        moe.moe_mlp(**p, k=1, recipe=None, weight_codes=True)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"shape is a tuple; give an octavo_jax\.MoeShape"):
        bytes_kept(None, (1, 2, 3))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="tokens is 0; give an integer of at least 1"):
        bytes_kept(None, MoeShape(0, 1, 1, 1, 1))
    with pytest.raises(ValueError, match="weights_on is 'input'"):
        bytes_kept(None, SHAPE, weights_on="input")  # type: ignore[arg-type]


def test_mxfp8_with_folded_products_is_the_program_of_blocks(rng: np.random.Generator) -> None:
    """One program, forward and backward, for both recipes: whoever computes blocks computes folding, in every form."""
    given = _given(rng)
    routing = moe.arrange(given["chosen"], given["weights"], G)

    def program(recipe: octavo.Recipe) -> str:
        def loss(x: jax.Array, wi: jax.Array, wo: jax.Array) -> jax.Array:
            y = moe.routed_mlp(x, routing, wi=wi, wo=wo, recipe=recipe, form="standard", backend=BACKEND)
            return y.astype(jnp.float32).sum()

        traced = jax.make_jaxpr(jax.grad(loss, (0, 1, 2)))(given["x"], given["wi"], given["wo"])
        return re.sub("0x[0-9a-f]+", "", str(traced))

    blocks = program(octavo.BlockScaling())
    assert program(octavo.MXFP8(products="folded")) == blocks
