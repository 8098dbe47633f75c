"""The MoE block against a dense float64 model, every recipe against its own pieces, remat, vmap, bad arguments."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from moe_cases import SUMS, assert_sums_agree

import octavo
import octavo_jax
from octavo_jax import moe
from octavo_jax.counting import count_runs
from octavo_jax.dispatch.device import DeviceKind
from octavo_jax.mlp.mlp import grouped_mlp
from octavo_jax.moe import experts
from octavo_jax.moe.router import logits
from octavo_jax.policies import save_quantized

T, K, F, N, E = 20, 16, 8, 12, 4
SHAPES = {"x": (T, K), "router": (K, E), "wi": (E, K, 2 * F), "wo": (E, F, N), "bi": (E, 2 * F), "bo": (E, N)}
BALANCE = 0.5

Arrays = dict[str, Any]


def _arrays(rng: np.random.Generator) -> Arrays:
    return {name: rng.standard_normal(shape) * shape[-2] ** -0.5 for name, shape in SHAPES.items()}


def _dense(p: Arrays, dy: np.ndarray, chosen: np.ndarray, mask: np.ndarray) -> float:
    """sum(y * dy) + the balance loss in float64: every expert sees every token, and weights pick."""
    logits = p["x"] @ p["router"]
    probabilities = np.exp(logits - logits.max(axis=1, keepdims=True))
    probabilities /= probabilities.sum(axis=1, keepdims=True)
    picked = np.zeros((T, E))
    np.put_along_axis(picked, chosen, 1.0, axis=1)
    picked *= mask[:, None]
    weights = picked * probabilities
    weights = weights / np.maximum(weights.sum(axis=1, keepdims=True), 1e-300)
    h = np.einsum("tk,ekc->etc", p["x"], p["wi"]) + p["bi"][:, None]
    gate, up = h[..., :F], h[..., F:]
    y = np.einsum("etf,efn->etn", gate / (1 + np.exp(-gate)) * up, p["wo"]) + p["bo"][:, None]
    share = picked.sum(axis=0) / picked.sum()
    balance = E * (share * (probabilities * mask[:, None]).sum(axis=0) / mask.sum()).sum()
    return float((np.einsum("te,etn->tn", weights, y) * dy).sum() + BALANCE * balance)


@partial(jax.jit, static_argnums=3)
def _gradients(p: Arrays, dy: Any, mask: Any, k: int) -> Any:
    def loss(p: Arrays) -> Any:
        y, stats = moe.moe_mlp(**p, k=k, recipe=None, mask=mask)
        return jnp.sum(y * dy) + BALANCE * stats.balance_loss, (y, stats.load)

    return jax.value_and_grad(loss, has_aux=True)(p)


@pytest.mark.parametrize(("k", "case"), [(2, "masked"), (2, "one expert"), (E, "masked")])
def test_values_and_gradients_are_the_dense_models(k: int, case: str, rng: np.random.Generator) -> None:
    """Loss and the gradients of x, router, both kernels and both biases; empty experts, k = E, padding full of NaN.

    Gradients are compared along random directions with central differences (faults.md 1-4, 9, 11). Each element may be
    off by `SUMS` of the largest one, and by as much again for each unit of the largest logit: float32 has that of
    it, and a softmax makes an error of a logit one of its result. The differences add 1e-9 of the loss.
    """
    p, dy = _arrays(rng), rng.standard_normal((T, N))
    mask = rng.random(T) < 0.8
    mask[0] = True
    if case == "one expert":  # nothing chooses the last two experts
        p["x"][:, 0], p["router"][0] = 1, [40, 30, -40, -50]
    chosen = np.argsort(-(p["x"] @ p["router"]), axis=1)[:, :k]
    given = {name: a.astype(np.float32) for name, a in p.items()}
    given["x"] = np.where(mask[:, None], given["x"], np.float32(np.nan))
    (loss, (y, load)), gradients = _gradients(given, dy.astype(np.float32), mask, k)
    off = SUMS * (1 + np.abs(p["x"] @ p["router"]).max())
    addends = np.abs(np.asarray(y, np.float64) * dy)[mask].sum() + BALANCE * E
    assert abs(float(loss) - _dense(p, dy, chosen, mask)) <= off * addends
    assert np.asarray(load).tolist() == np.bincount(chosen[mask].reshape(-1), minlength=E).tolist()
    assert not np.asarray(y)[~mask].any()
    assert not np.asarray(gradients["x"])[~mask].any()
    for name, actual in gradients.items():
        assert np.isfinite(actual).all(), name
        if name not in ("x", "router"):
            assert not np.asarray(actual)[np.asarray(load) == 0].any(), name
        direction = rng.standard_normal(p[name].shape)
        ends = [_dense({**p, name: p[name] + step * direction}, dy, chosen, mask) for step in (1e-6, -1e-6)]
        slope = (np.asarray(actual, np.float64) * direction).sum()
        allowed = off * np.abs(actual).max() * np.abs(direction).sum() + 1e-9 * addends
        assert abs(slope - (ends[0] - ends[1]) / 2e-6) <= allowed, name


def test_weights_on_the_activation(rng: np.random.Generator) -> None:
    """Weighing before wo, as by default, gives the same y and router gradient, and the backward pass reads no expert's
    output."""
    p = {name: jnp.asarray(a, jnp.float32) for name, a in _arrays(rng).items() if name != "bo"}
    dy = jnp.asarray(rng.standard_normal((T, N)), jnp.float32)

    def loss(p: Arrays, **how: Any) -> Any:
        return jnp.sum(moe.moe_mlp(**p, k=2, recipe=None, **how)[0] * dy)

    places: tuple[dict[str, Any], ...] = ({}, {"weights_on": "activation"}, {"weights_on": "output"})
    default, before, after = (jax.jit(jax.grad(partial(loss, **place)))(p) for place in places)
    for name in p:
        assert np.array_equal(default[name], before[name])
        assert_sums_agree(after[name], before[name], name)
    runs = [count_runs(jax.value_and_grad(jax.checkpoint(partial(loss, **place))), p).fprop for place in places]
    assert runs == [3, 3, 4]


RECIPES = {"fp8-delayed": octavo.DelayedScaling(history=3), "mxfp8": octavo.MXFP8(), "nvfp4": octavo.NVFP4()}


@pytest.mark.parametrize("name", ["fp8-delayed", "mxfp8", pytest.param("nvfp4", marks=pytest.mark.slow)])
def test_a_recipe_reaches_the_experts(name: str, rng: np.random.Generator) -> None:
    """y is the sum of what `grouped_mlp` makes of the sorted rows, rounded once: recipe, seed and state pass."""
    recipe, on_output = RECIPES[name], bool(rng.integers(2))
    print(f"weights on the output: {on_output}")  # shown by pytest where the test fails
    p = {key: jnp.asarray(a, jnp.bfloat16) for key, a in _arrays(rng).items()}
    state = (octavo_jax.init_delayed(recipe, E),) * 2 if isinstance(recipe, octavo.DelayedScaling) else None
    extra: Mapping[str, Any] = {"recipe": recipe, "seed": 5, "state": state, "bi": p["bi"], "bo": p["bo"]}

    @jax.jit
    def both(p: Arrays) -> Any:
        given = p["x"], p["router"], p["wi"], p["wo"]
        whole = moe.moe_mlp(*given, k=2, weights_on="output" if on_output else "activation", **extra)
        logits = jnp.matmul(p["x"], p["router"], preferred_element_type=jnp.float32)
        routing = moe.route(logits, 2)
        probs = None if on_output else moe.row_weights(routing)
        sorted_rows = p["x"][routing.order // 2], p["wi"], p["wo"], routing.group_sizes
        return whole, grouped_mlp(*sorted_rows, probs=probs, bo_scales=probs, **extra), routing

    whole, rows, routing = both(p)
    y, stats, *recorded = whole
    if state is not None:
        rows, wanted = rows
        assert jax.tree.all(jax.tree.map(np.array_equal, recorded[0], wanted))
        assert np.asarray(recorded[0][0].x.history).any()
    parts = np.asarray(rows, np.float64)[np.asarray(routing.position)]
    parts = parts * np.asarray(routing.weights)[:, :, None] if on_output else parts
    exact, size = parts.sum(1), np.abs(parts).sum(1)
    assert y.dtype == jnp.bfloat16
    # one rounding to bf16, and of each product and the sum to float32, fused or not
    assert np.all(np.abs(np.asarray(y, np.float64) - exact) <= 2.0**-8 * np.abs(exact) + 2 * 2.0**-24 * size)
    assert np.array_equal(stats.load, routing.group_sizes)


def test_every_argument_reaches_the_mlp(monkeypatch: pytest.MonkeyPatch) -> None:
    """What belongs to `grouped_mlp` arrives there unchanged, seed and names included; `dtype` casts what it says."""
    seen: Arrays = {}
    resolved = experts.resolve_call

    def call(arrays: Any, group_sizes: Any, options: Any, rows: int) -> Any:
        seen.update(arrays._asdict(), **options._asdict())
        return resolved(arrays, group_sizes, options, rows)

    monkeypatch.setattr(experts, "resolve_call", call)
    p = {key: jnp.zeros(shape) for key, shape in SHAPES.items()}
    given = {
        "activation": "geglu",
        "recipe": octavo.NVFP4(),
        "seed": 7,
        "checkpoint_name": "mine",
        "output_checkpoint_names": ("a", "b"),
        "backend": "jax-reference",
    }
    y, _ = jax.eval_shape(lambda: moe.moe_mlp(**p, k=2, dtype=jnp.bfloat16, **given))
    assert given.items() <= seen.items()
    assert all(seen[key].dtype == jnp.bfloat16 for key in ("x", "wi", "wo", "bi", "bo"))
    assert (seen["state"], seen["probs"], y.dtype) == (None, None, jnp.float32)


def test_a_scan_with_remat_quantizes_each_operand_once(rng: np.random.Generator) -> None:
    """Five layers, save_quantized: x, wi, activated, wo and two gradients, six runs a layer, whatever follows y.

    Without the policy the first four run twice; the routing is saved, so its search and sort run once a layer
    (faults.md 43). In the standard form the backward pass quantizes x and the activation for the gradients, two more.
    """
    p = {key: jnp.asarray(a, jnp.bfloat16) for key, a in _arrays(rng).items() if key not in ("x", "bi", "bo")}
    layers = jax.tree.map(lambda a: jnp.broadcast_to(a, (5, *a.shape)), {**p, "wo": p["wo"][..., :1].repeat(K, -1)})
    x = jnp.ones((T, K), jnp.bfloat16)

    def gradient(policy: Any, form: Any = "keep_all") -> Any:
        def layer(x: Any, p: Arrays) -> Any:
            how: Any = {"recipe": octavo.CurrentScaling(), "form": form, "backend": "jax-reference"}
            return jnp.tanh(moe.moe_mlp(x, **p, k=2, **how)[0]), None

        kept = jax.checkpoint(layer, policy=policy)
        return jax.grad(lambda layers: jnp.sum(jax.lax.scan(kept, x, layers)[0]))

    saved, plain = count_runs(gradient(save_quantized()), layers), count_runs(gradient(None), layers)
    assert (saved.quantize, plain.quantize) == (30, 50)
    assert count_runs(gradient(save_quantized(), "standard"), layers).quantize == 40
    assert (saved.dgrad, saved.wgrad) == (10, 10)
    text = str(jax.make_jaxpr(gradient(save_quantized()))(layers))
    assert [text.count(f" {name}[") for name in ("top_k", "sort")] == [1, 1]


def test_vmap_is_a_loop(rng: np.random.Generator) -> None:
    """A batch of blocks at once: the same results as one after the other."""
    p = {key: jnp.asarray(np.stack([_arrays(rng)[key] for _ in range(2)]), jnp.float32) for key in SHAPES}

    def run(p: Arrays) -> Any:
        return moe.moe_mlp(**p, k=2, recipe=None)[0]

    y = jax.jit(jax.vmap(run))(p)
    one = jax.jit(run)
    for index in range(2):
        assert_sums_agree(y[index], one(jax.tree.map(lambda a, i=index: a[i], p)))


def test_shapes_and_dtypes(rng: np.random.Generator) -> None:
    """Leading axes come back, y has x's dtype or the one asked for, the experts' dtype is their own; no tokens work."""
    p = {key: jnp.asarray(a, jnp.float32) for key, a in _arrays(rng).items()}
    p["x"] = p["x"].reshape(4, 5, K)
    y, stats = jax.eval_shape(partial(moe.moe_mlp, k=2, recipe=octavo.MXFP8(), dtype=jnp.bfloat16), **p)
    assert (y.shape, y.dtype, stats.load.shape) == ((4, 5, N), jnp.float32, (E,))
    half = partial(moe.moe_mlp, k=2, recipe=None, preferred_element_type=jnp.float16)
    assert jax.eval_shape(half, **p)[0].dtype == jnp.float16
    nothing = jax.jit(partial(moe.moe_mlp, k=2, recipe=None))(**{**p, "x": p["x"][:0]})
    assert nothing[0].shape == (0, 5, N)
    assert not np.asarray(nothing[1].load).any()


def test_results_are_a_plain_tuple() -> None:
    """With a state as without one: callers write such a tuple as a `jax.shard_map`'s out_specs, where the structures of
    two kinds of tuples differ."""
    p = {key: jnp.zeros(shape) for key, shape in SHAPES.items()}
    recipe = octavo.DelayedScaling(history=2)
    state = (octavo_jax.init_delayed(recipe, E),) * 2
    results = jax.eval_shape(partial(moe.moe_mlp, k=2, recipe=recipe, state=state), **p)
    assert type(results) is tuple
    assert jax.tree.structure(results[2]) == jax.tree.structure(state)


def test_bad_arguments() -> None:
    """Each sentence names the argument, its shape or value, and what is needed."""
    p = {key: jnp.zeros(shape) for key, shape in SHAPES.items()}
    cases: dict[str, Arrays] = {
        r"router \[16, 5\] has 5 experts and wi has shape \[4, 16, 16\]; give wi \[5, K, C\]": {
            "router": jnp.zeros((K, 5))
        },
        r"router \[15, 4\]; they are \[..., K\] and \[K, E\]": {"router": jnp.zeros((15, E))},
        r"router \[0, 4\]; .* of one or more": {"x": jnp.zeros((T, 0)), "router": jnp.zeros((0, E))},
        r"mask has shape \[5\] and dtype bool, and x \[20, 16\]; give bool \[20\]": {"mask": jnp.ones(5, bool)},
        "weights_on is 'input'": {"weights_on": "input"},
        "seed is None and the recipe rounds": {"recipe": octavo.NVFP4()},
        "state is .*None.* and the recipe scales by history": {"recipe": octavo.DelayedScaling()},
        "x has dtype int32; it must be": {"x": jnp.zeros((T, K), jnp.int32)},
        "router has dtype complex64; it must be": {"router": jnp.zeros((K, E), jnp.complex64)},
        "wi has dtype int8; it must be": {"wi": p["wi"].astype(jnp.int8), "dtype": jnp.bfloat16},
        "bo has dtype complex64; it must be": {"bo": jnp.zeros((E, N), jnp.complex64), "dtype": jnp.bfloat16},
    }
    for sentence, change in cases.items():
        with pytest.raises(ValueError, match=sentence):
            jax.eval_shape(lambda c=change: moe.moe_mlp(**{**p, "k": 2, "recipe": None, **c}))
    with pytest.raises(ValueError, match=r"x has shape \[2, 10, 16\]; it is \[T, K\]"):
        jax.eval_shape(
            lambda: moe.routed_mlp(
                jnp.zeros((2, 10, K)), moe.route(jnp.zeros((T, E)), 2), p["wi"], p["wo"], recipe=None
            )
        )


@pytest.mark.parametrize(
    ("dtype", "asked", "used"),
    [("float32", None, "HIGHEST"), ("float32", "tensorfloat32", "HIGH"), ("bfloat16", None, None)],
)
def test_a_routers_product_is_no_tf32_unless_it_is_asked_for(
    dtype: str, asked: str | None, used: str | None, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On GPUs JAX multiplies float32 in TF32 by default, which rounds a router's weights to 11 bits in silence. The
    product, and both of its gradient, say which precision they have. test_router_logits.py has bf16 tokens there."""
    monkeypatch.setattr(logits, "device_of", lambda x: DeviceKind("cpu", None))
    p = {name: jnp.asarray(a, dtype) for name, a in _arrays(rng).items()}
    experts = {name: p[name] for name in ("wi", "wo")}

    def loss(x: Any, router: Any) -> Any:
        return jnp.sum(moe.moe_mlp(x, router, **experts, k=2, recipe=None)[0])

    with jax.default_matmul_precision(asked):
        traced = jax.make_jaxpr(jax.grad(loss, (0, 1)))(p["x"], p["router"])
    products = [
        eqn
        for eqn in traced.eqns
        if eqn.primitive.name == "dot_general" and E in {*eqn.invars[0].aval.shape, *eqn.invars[1].aval.shape}
    ]
    assert len(products) == 3, traced
    for eqn in products:
        wanted = None if used is None else (lax.Precision[used],) * 2
        assert eqn.params["precision"] == wanted
