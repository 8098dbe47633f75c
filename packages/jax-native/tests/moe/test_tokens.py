"""A MoE layer whose rows nobody writes: x and dy are quantized, or multiplied, where the tokens stand, with the bits of
permuted rows."""

from __future__ import annotations

import itertools
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import octavo
import octavo_jax
from octavo_jax import moe
from octavo_jax.linear import gemms
from octavo_jax.moe.layer import autograd, recomputed, tokens
from octavo_jax.moe.layer.forms import FORMS
from octavo_registry.contract import TokenRows

pytestmark = pytest.mark.filterwarnings("ignore:a layer with delayed scaling")  # its scales are given and stay

T, C, G, K, F, N = 45, 3, 4, 80, 48, 64
RECIPES: dict[str, octavo.Recipe] = {
    "delayed": octavo.DelayedScaling(history=2),
    "current": octavo.CurrentScaling(),
    "row": octavo.RowScaling(),
    "block": octavo.BlockScaling(),
    "mxfp8": octavo.MXFP8(),
    "nvfp4": octavo.NVFP4(),
    "no wgrad": octavo.BlockScaling(wgrad="high_precision"),
    "backward alone": octavo.MXFP8(fprop="high_precision"),
    "high precision": octavo.HighPrecision(),
    "no dgrad": octavo.BlockScaling(dgrad="high_precision"),
}
WIDTHS = {K: "x", N: "dy"}
WAYS = tuple(itertools.product(FORMS, ("keep", "remake"), ("output", "activation")))
Given = dict[str, Any]


def _given(rng: np.random.Generator, rows: int | None = None) -> tuple[Given, Any]:
    """x, weights and kernels, and the routing: some choices are nobody's, and the last expert gets none."""
    shapes = {"x": (T, K), "wi": (G, K, 2 * F), "wo": (G, F, N), "bi": (G, 2 * F), "bo": (G, N)}
    given = {name: jnp.asarray(rng.standard_normal(shape) / 6, jnp.bfloat16) for name, shape in shapes.items()}
    chosen = np.stack([rng.permutation(G - 1)[:C] for _ in range(T)])
    chosen[rng.random(chosen.shape) < 0.2] = -1
    return {**given, "weights": jnp.asarray(rng.random((T, C)), jnp.float32)}, jnp.asarray(chosen)


def _layer(given: Given, state: Any, chosen: Any, weights_on: Any, **how: Any) -> Any:
    routing = moe.arrange(chosen, given["weights"], G)
    experts = {name: given[name] for name in ("wi", "wo", "bi", "bo") if name in given}
    return moe.routed_mlp(given["x"], routing, **experts, state=state, weights_on=weights_on, **how)


def _in_parts(given: Given, state: Any, chosen: Any, weights_on: Any, **how: Any) -> Any:
    """The same from permute, grouped_mlp and combine, which write rows."""
    routing = moe.arrange(chosen, given["weights"], G)
    probs = None if weights_on == "output" else moe.row_weights(routing)
    rows = moe.permute(given["x"], routing)
    biases = {name: given[name] for name in ("bi", "bo") if name in given}
    how = {"group_sizes": routing.group_sizes, "probs": probs, "state": state, **biases, **how}
    how["bo_scales"] = probs if biases else None
    result = octavo_jax.grouped_mlp(rows, given["wi"], given["wo"], **how)
    rows, *later = result if state is not None else (result,)
    y = moe.combine(rows, routing, weighted=probs is None, preferred_element_type=given["x"].dtype)
    return (y, *later) if later else y


def _results(run: Any, given: Given, state: Any, dy: Any) -> list[Any]:
    """y, what becomes of the state, and gradients but those of the weights and of a router, which XLA sums: in another
    program in another order."""

    @jax.jit
    def step(given: Given, state: Any) -> Any:
        weights = given.pop("weights")

        def y_and_state(given: Given, state: Any) -> Any:
            result = run({**given, "weights": weights}, state)
            return result if state is not None else (result, None)

        (y, later), pull = jax.vjp(y_and_state, given, state)
        return y, later, pull((dy, jax.tree.map(jnp.zeros_like, later)))

    return jax.tree.leaves(step(given, state))


@pytest.mark.parametrize("name", RECIPES)
def test_the_bits_of_permuted_rows(name: str, rng: np.random.Generator) -> None:
    """y, gradients and delayed scaling's histories, in a way of keeping that each run draws. Where forward quantizes
    nothing that it multiplies, XLA's activation is what it multiplies, unless it keeps codes of it: y is then that of
    unquantized layers."""
    recipe, (form, codes, on) = RECIPES[name], WAYS[int(rng.integers(len(WAYS)))]
    given, chosen = _given(rng)
    state: Any = (octavo_jax.init_delayed(recipe, G),) * 2 if isinstance(recipe, octavo.DelayedScaling) else None
    dy = jnp.asarray(rng.standard_normal((T, N)), jnp.bfloat16)
    how = {"chosen": chosen, "weights_on": on, "recipe": recipe, "seed": 7, "backend": "jax-native"}
    print(f"form {form}, weight_codes {codes}, weights on the {on}")  # shown by pytest where the test fails
    made = _results(partial(_layer, form=form, weight_codes=codes, **how), given, state, dy)
    wanted = _results(partial(_in_parts, **how), given, state, dy)
    if name == "backward alone" and form != "keep_all":
        wanted[0] = _results(partial(_in_parts, **how | {"recipe": octavo.HighPrecision()}), given, state, dy)[0]
    same = [np.array_equal(np.asarray(a), np.asarray(b)) for a, b in zip(made, wanted, strict=True)]
    if form == "lean":  # gradients are those of the rounded h; y is the same
        assert same[0]
    else:
        assert all(same), same


@pytest.mark.parametrize(
    ("on", "name"),
    [("output", "block"), ("output", "high precision"), ("activation", "block"), ("activation", "no wgrad")],
)
def test_no_program_has_the_rows(on: str, name: str, rng: np.random.Generator) -> None:
    """What there is of [T k, K] and [T k, N] in a step's program are results of GEMMs: x is not permuted in either
    pass, nor is dy, unless the weights multiply it on the way. Without biases, whose gradients read rows of dy."""
    given, chosen = _given(rng)
    given = {name: array for name, array in given.items() if name not in ("bi", "bo")}

    def made_by_xla(layer: Any, width: int, **how: Any) -> int:
        """Arrays of this many columns and a row per choice that no kernel returned."""

        def loss(given: Given, chosen: Any) -> Any:
            y = layer(given, None, chosen, on, recipe=RECIPES[name], backend="jax-native", **how)
            return jnp.sum(y.astype(jnp.float32) ** 2)

        program = jax.jit(jax.grad(loss)).lower(given, chosen).compile().as_text()
        entry = program[program.index("ENTRY") :].splitlines()
        return sum(f" = bf16[{T * C},{width}]" in line and "custom-call(" not in line for line in entry)

    assert made_by_xla(_layer, K, form="recompute") == 0
    if on == "output":
        assert made_by_xla(_in_parts, K) > 0, "the text has them where there are any"
    assert (made_by_xla(_layer, N) == 0) is (on == "activation")


@pytest.mark.parametrize("name", ["delayed", "nvfp4", "high precision"])
def test_a_device_of_a_mesh_reads_its_tokens(
    name: str, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two experts on each of two devices, for two halves of the tokens: every bit of y, gradients and histories is that
    of rows, random bits and maxima over the mesh included."""
    recipe, (given, chosen) = RECIPES[name], _given(rng)
    dy, here = jnp.asarray(rng.standard_normal((T, N)), jnp.bfloat16), G // 2
    given, chosen, dy = jax.tree.map(lambda rows: rows[: T // 2 * 2] if len(rows) == T else rows, (given, chosen, dy))
    how: dict[str, Any] = {"recipe": recipe, "seed": 7, "weights_on": "activation", "backend": "jax-native"}
    roles, each = octavo_jax.MeshAxes(dp="dp", ep="ep"), P(("dp", "ep"))

    def step(given: Given, chosen: Any, dy: Any) -> Any:
        """Of a device; each result has a leading axis."""
        mine = chosen - here * jax.lax.axis_index("ep")
        state: Any = (octavo_jax.init_delayed(recipe, here),) * 2 if isinstance(recipe, octavo.DelayedScaling) else None

        weights = given.pop("weights")

        def layer(given: Given, state: Any) -> Any:
            routing = moe.arrange(mine, weights, here)
            result = moe.routed_mlp(routing=routing, **given, state=state, sharding=roles, **how)
            return result if state is not None else (result, None)

        (y, later), pull = jax.vjp(layer, given, state)
        return jax.tree.map(lambda leaf: leaf[None], (y, later, pull((dy, jax.tree.map(jnp.zeros_like, later)))))

    def on_mesh() -> list[Any]:
        mesh = jax.make_mesh((2, 2), ("dp", "ep"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
        lie = {name: P("dp") if name in ("x", "weights") else P("ep") for name in given}
        places = lie, P("dp"), P("dp")
        mapped = jax.shard_map(step, mesh=mesh, in_specs=places, out_specs=each, check_vma=False)
        return jax.tree.leaves(jax.jit(mapped)(given, chosen, dy))

    read: list[str] = []
    real, gathered = tokens.quantize_local_tokens, tokens.Tokens.gathered
    monkeypatch.setattr(tokens, "quantize_local_tokens", lambda *a: read.append(a[-1].operand) or real(*a))
    monkeypatch.setattr(tokens.Tokens, "gathered", lambda *a: read.append(WIDTHS[a[0].x.shape[1]]) or gathered(*a))
    made = on_mesh()
    assert set(read) == {"x", "dy"}
    monkeypatch.setattr(tokens, "has_local_rows", lambda *_: False)
    jax.clear_caches()
    read.clear()
    wanted = on_mesh()
    assert not read
    same = [np.array_equal(np.asarray(a), np.asarray(b)) for a, b in zip(made, wanted, strict=True)]
    assert all(same), same


@pytest.mark.parametrize(
    ("name", "form", "weights_on"),
    [
        *((name, "standard", "activation") for name in RECIPES),
        *((name, "keep_all", "output") for name in ("delayed", "block", "nvfp4", "no wgrad", "high precision")),
    ],
)
def test_explain_says_what_is_read_from_tokens(
    name: str, form: Any, weights_on: Any, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A line for each operand, against what a traced forward and backward quantizes and multiplies from tokens."""
    made: set[tuple[str, str]] = set()
    gathered: dict[tuple[str, str], str] = {}
    rows = gemms._rows

    def multiplying(layer: Any, gemm: str, codes: Any, values: Any) -> Any:
        if isinstance(values, TokenRows):
            is_array = isinstance(values.tokens, jax.Array)
            width = (values.tokens if is_array else values.tokens.spec).shape[-1]
            gathered[WIDTHS[width], gemm] = "values" if is_array else "codes"
        return rows(layer, gemm, codes, values)

    monkeypatch.setattr(gemms, "_rows", multiplying)
    for module in (autograd, recomputed):

        def noticing(*given: Any, own: Any = module.quantize_tokens, where: str = module.__name__) -> Any:
            made.add((where, given[2]))
            return own(*given)

        monkeypatch.setattr(module, "quantize_tokens", noticing)
    given, _ = _given(rng)
    x, router = given["x"], jnp.ones((K, G), jnp.bfloat16)
    how: dict[str, Any] = {"k": C, "recipe": RECIPES[name], "form": form, "weights_on": weights_on}
    told = dict(moe.explain(x, router, given["wi"], given["wo"], **how).tokens)
    made.clear()
    gathered.clear()
    recipe, state = RECIPES[name], None
    if isinstance(recipe, octavo.DelayedScaling):
        state = octavo_jax.init_delayed(recipe, G), octavo_jax.init_delayed(recipe, G)

    def loss(x: Any, wi: Any, wo: Any) -> Any:
        return moe.moe_mlp(x, router, wi, wo, seed=0, state=state, **how)[0].astype(jnp.float32).sum()

    jax.eval_shape(jax.grad(loss, (0, 1, 2)), x, given["wi"], given["wo"])
    lines = {
        "x in fprop": ((autograd, "x"), "fprop"),
        "x in wgrad": ((recomputed, "x"), "wgrad"),
        "dy": ((recomputed, "dy"), "dgrad"),
    }
    both = {gathered.get(("dy", gemm)) for gemm in ("dgrad", "wgrad")} == {"values"}
    for what, ((module, operand), gemm) in lines.items():
        said, kind = told[what], gathered.get((operand, gemm))
        once = f"jax-native quantizes each token once, and jax-native reads its codes in {gemm}"
        if kind == "values":
            alone = what == "dy" and not both  # the other product reads codes
            wanted = f"jax-native reads the tokens in {gemm}" if alone else "jax-native reads the tokens in its product"
            assert said.partition(";")[0] == wanted
        elif kind == "codes":
            assert said.partition(";")[0] == once
        elif (module.__name__, operand) in made:
            assert said == "jax-native quantizes the tokens"
        else:
            assert said.startswith(("rows are permuted", "kept"))
    of_wgrad = None if weights_on == "output" or recipe.quantizes("wgrad") else "values"
    assert gathered.get(("dy", "wgrad")) == of_wgrad
    assert ("; jax-native reads the tokens in wgrad" in told["dy"]) is (of_wgrad is not None and not both)
