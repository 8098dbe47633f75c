"""Quantizers as pytrees: whatever a program does with them, every field of every kind stays in its place."""

from __future__ import annotations

import copy
import dataclasses
import pickle
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any, get_args

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest

import octavo
import octavo_jax
import octavo_numerics
from octavo import QuantizerSpec
from octavo.quantizer import Operand, Orientation
from octavo_jax import Quantizer, QuantizerSet, quantizer_set
from octavo_jax.scaling.delayed_state import ScalingHistory

GROUPS = 3


def _state(number: int) -> ScalingHistory:
    """A state with its own values, an infinity and a NaN among them."""
    history = np.arange(4 * GROUPS, dtype=np.float32).reshape(4, GROUPS) + number
    history[1] = np.inf
    history[2, 0] = np.nan
    return ScalingHistory(jnp.asarray(history), jnp.full(GROUPS, 0.5 + number, jnp.float32))


def _quantizers() -> dict[str, Any]:
    """Every preset's operands in every orientation, each with a name of its own, and the sets of all recipes."""
    found: dict[str, Any] = {}
    for kind, operand, orientation in product(octavo.PRESETS, get_args(Operand), get_args(Orientation)):
        spec = octavo.recipe(kind).quantizer(operand, checkpoint_name=f"{kind}.{operand}")
        if spec is not None:
            turned = QuantizerSpec(**{**dict(spec), "orientation": orientation})
            state = _state(len(found)) if spec.scaling == "delayed" else None
            found[f"{kind}.{operand}.{orientation}"] = Quantizer(turned, state)
    found["unnamed"] = Quantizer(octavo.MXFP8().quantizer("x", checkpoint_name=None))  # type: ignore[arg-type]
    for kind in octavo.PRESETS:
        found[f"set of {kind}"] = quantizer_set(octavo.recipe(kind), groups=GROUPS)
    return found


EVERY = _quantizers()


def _through_json(quantizer: Any) -> Any:
    return type(quantizer).from_json(quantizer.to_json(), quantizer.arrays())


def _through_scan(tree: Any) -> Any:
    """As what is carried, and as what is scanned over and stacked."""
    stacked = jax.tree.map(lambda leaf: jnp.stack([leaf, leaf + 1]), tree)
    carried, made = jax.jit(lambda tree, xs: jax.lax.scan(lambda held, x: (held, x), tree, xs))(tree, stacked)
    first = jax.tree.map(lambda leaf: leaf[0], made)
    _assert_same(first, tree)
    return carried


def _through_vmap(tree: Any) -> Any:
    stacked = jax.tree.map(lambda leaf: jnp.stack([leaf, leaf + 1]), tree)
    return jax.tree.map(lambda leaf: leaf[0], jax.vmap(lambda tree: tree)(stacked))


TRIPS: dict[str, Callable[[Any], Any]] = {
    "flatten": lambda tree: jax.tree.unflatten(jax.tree.structure(tree), jax.tree.leaves(tree)),
    "tree.map": lambda tree: jax.tree.map(lambda leaf: leaf, tree),
    "jit": lambda tree: jax.jit(lambda tree: tree)(tree),
    "vmap": _through_vmap,
    "scan": _through_scan,
    "deepcopy": copy.deepcopy,
    "pickle": lambda tree: pickle.loads(pickle.dumps(tree)),
    "JSON": lambda tree: {name: _through_json(quantizer) for name, quantizer in tree.items()},
}


def _assert_same(found: Any, wanted: Any) -> None:
    """Equal in type, in every field of every dataclass and model in it, and in the bits of every array."""
    assert type(found) is type(wanted) or isinstance(wanted, jax.Array)
    if isinstance(wanted, dict):
        assert set(found) == set(wanted)  # jax.tree sorts keys
        for name, value in wanted.items():
            _assert_same(found[name], value)
    elif isinstance(wanted, QuantizerSpec):
        assert dict(found) == dict(wanted)
    elif dataclasses.is_dataclass(wanted):
        for field in dataclasses.fields(wanted):
            _assert_same(getattr(found, field.name), getattr(wanted, field.name))
    elif isinstance(wanted, jax.Array):
        assert (found.shape, found.dtype) == (wanted.shape, wanted.dtype)
        assert np.asarray(found).tobytes() == np.asarray(wanted).tobytes()
    else:
        assert found == wanted


@pytest.mark.parametrize("trip", TRIPS)
def test_a_round_trip_keeps_every_field(trip: str) -> None:
    """All quantizers and sets in one tree, so that a field of one cannot come back in another."""
    _assert_same(TRIPS[trip](EVERY), EVERY)


def test_orbax_keeps_every_field(tmp_path: Path) -> None:
    """Saved inside a training state, restored into what JSON gives without arrays, which a new process has."""
    parameters = {"kernel": jnp.ones((2, 3))}
    held = {name: quantizer for name, quantizer in EVERY.items() if quantizer.arrays()}
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "step", {"params": parameters, "quantizers": held})
        checkpointer.wait_until_finished()
        abstract = {name: type(quantizer).from_json(quantizer.to_json()) for name, quantizer in held.items()}
        target = {"params": jax.eval_shape(lambda: parameters), "quantizers": abstract}
        restored = checkpointer.restore(tmp_path / "step", target)
    _assert_same(restored["quantizers"], held)


def test_orbax_keeps_the_bits_of_quantized_tensors(tmp_path: Path, rng: np.random.Generator) -> None:
    """Codes are stored as they are, e4m3 above 240 and E8M0 too: nothing is quantized twice (faults.md 50)."""
    x, sizes = rng.standard_normal((20, 32)).astype(np.float32), np.array([7, 9])
    tensors = {}
    for kind in ("fp8-current", "mxfp8", "nvfp4"):
        q = octavo_numerics.quantize(x, octavo.recipe(kind).quantizer("x"), sizes)  # type: ignore[arg-type]
        planes = {name: getattr(q, name) for name in octavo_numerics.PLANES}
        tensors[kind] = octavo_jax.GroupedTensor(
            q.spec, jnp.asarray(sizes), **{name: None if a is None else jnp.asarray(a) for name, a in planes.items()}
        )
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "step", tensors)
        checkpointer.wait_until_finished()
        restored = checkpointer.restore(tmp_path / "step", jax.eval_shape(lambda: tensors))
    for name, q in tensors.items():
        assert restored[name].spec == q.spec
        pairs = zip(jax.tree.leaves(restored[name]), jax.tree.leaves(q), strict=True)
        assert all(np.asarray(a).tobytes() == np.asarray(b).tobytes() for a, b in pairs)


def test_trees_take_any_leaf() -> None:
    """Names, shapes, None and tracers stand where arrays stood: nothing is validated when a tree is put together."""
    quantizers = quantizer_set(octavo.DelayedScaling(history=2), groups=GROUPS)
    shapes = jax.tree.map(lambda leaf: leaf.shape, quantizers)
    assert shapes.x.state.scale == (GROUPS,)
    names = jax.tree_util.tree_map_with_path(lambda path, _: jax.tree_util.keystr(path), quantizers)
    assert names.grad.state.history == ".grad.state.history"
    emptied = jax.tree.map(lambda leaf: None, quantizers)
    assert emptied.kernel.spec == quantizers.kernel.spec
    assert emptied.kernel.state.scale is None


@pytest.mark.parametrize("kind", sorted(octavo.PRESETS))
def test_the_factory_follows_the_recipe(kind: str) -> None:
    """Planes, roles and states are those that the recipe's GEMMs read; no state without need."""
    recipe = octavo.recipe(kind)
    quantizers = quantizer_set(recipe, groups=GROUPS, checkpoint_name="mine")
    for operand, quantizer in zip(("x", "w", "dy"), vars(quantizers).values(), strict=True):
        spec = recipe.quantizer(operand, checkpoint_name="mine")  # type: ignore[arg-type]
        assert (None if quantizer is None else quantizer.spec) == spec
        if quantizer is not None:
            assert quantizer.spec.role == operand
            assert (quantizer.state is not None) == recipe.stateful
            assert quantizer.state is None or quantizer.state.history.shape == (recipe.history, GROUPS)  # type: ignore[attr-defined]


def test_a_stack_of_quantizers_quantizes_layer_by_layer(rng: np.random.Generator) -> None:
    """States of three layers and two groups, scanned over and batched: each call uses its own scales."""
    x = rng.standard_normal((8, 16)).astype(np.float32)
    spec = octavo.DelayedScaling(history=2).quantizer("x")
    assert spec is not None
    scales = jnp.asarray(2.0 ** rng.integers(0, 4, (3, 2)), jnp.float32)
    stack = Quantizer(spec, ScalingHistory(jnp.zeros((3, 2, 2)), scales))

    def payload(quantizer: Quantizer) -> Any:
        return quantizer(x, [3, 5], backend="jax-reference").rowwise

    batched = jax.jit(jax.vmap(payload))(stack)
    scanned = jax.jit(lambda stack: jax.lax.scan(lambda _, one: (None, payload(one)), None, stack)[1])(stack)
    rows = np.repeat(np.asarray(scales), [3, 5], axis=1)[..., None]
    wanted = (x * rows).astype(jnp.float8_e4m3fn)
    assert np.asarray(batched).tobytes() == np.asarray(scanned).tobytes() == wanted.tobytes()


def test_files_that_do_not_fit_are_told() -> None:
    """Another kind, another version, another field, missing, misshapen and left-over arrays: ValueError says which."""
    recipe = octavo.DelayedScaling(history=2)
    quantizers = quantizer_set(recipe, groups=GROUPS)
    text, arrays = quantizers.to_json(), quantizers.arrays()
    faults = {
        "not JSON": (lambda: QuantizerSet.from_json("{")),
        "the JSON holds 'list'": (lambda: QuantizerSet.from_json("[]")),
        "the JSON holds 'quantizer_set'": (lambda: Quantizer.from_json(text)),
        "schema_version is 2 and this octavo-jax reads 1": (
            lambda: QuantizerSet.from_json(text.replace('"schema_version":1', '"schema_version":2'))
        ),
        "rolle: there is no such field": (lambda: QuantizerSet.from_json(text.replace('"role"', '"rolle"'))),
        r"arrays\['x.history'\] is missing": (lambda: QuantizerSet.from_json(text, {})),
        r"arrays\['x.scale'\] has shape \[2\]": (
            lambda: QuantizerSet.from_json(text, {**arrays, "x.scale": jnp.ones(2)})
        ),
        "arrays holds y.scale": (lambda: QuantizerSet.from_json(text, {**arrays, "y.scale": jnp.ones(3)})),
        r"history has shape \[5, 2, 3\]": (lambda: jax.tree.map(lambda a: jnp.stack([a] * 5), quantizers).to_json()),
    }
    for message, fault in faults.items():
        with pytest.raises(ValueError, match=message):
            fault()


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"group_sizes": jnp.array([3, 2])}, r"group_sizes has shape \[2\] and the tensor's spec 3 groups"),
        ({"group_sizes": jnp.ones(GROUPS)}, "group_sizes has shape .* dtype float32"),
        ({"rowwise": jnp.zeros((4, 32), jnp.uint8)}, r"rowwise has shape \[4, 32\] .* must have shape \[8, 32\]"),
        ({"rowwise_scale": jnp.zeros((8, 2))}, "rowwise_scale has .* dtype float32; .* float8_e4m3fn"),
        ({"rowwise_global": jnp.ones(1)}, r"rowwise_global has shape \[1\] .* must have shape \[3\]"),
        ({"rowwise_global": None}, "rowwise_global has None"),
    ],
)
def test_dequantize_refuses_arrays_that_the_spec_does_not_describe(changed: dict[str, Any], message: str) -> None:
    """Such as those of another tensor, or some of its groups: the reference had read past their ends, in silence."""
    layout = octavo.GroupedTensorSpec(
        shape=(8, 32), groups=GROUPS, quantizer=QuantizerSpec(format="e2m1", scaling="nvfp4")
    )
    codes, scales = jnp.zeros((8, 32), jnp.uint8), jnp.zeros((8, 2), jnp.float8_e4m3fn)
    q = octavo_jax.GroupedTensor(layout, jnp.array([3, 2, 2]), codes, scales, jnp.ones(GROUPS))
    with pytest.raises(ValueError, match=message):
        octavo_jax.dequantize(dataclasses.replace(q, **changed), backend="jax-reference")


def test_dequantize_refuses_group_sizes_of_matrices() -> None:
    layout = octavo.GroupedTensorSpec(
        shape=(2, 4, 32), groups=2, quantizer=QuantizerSpec(format="e4m3", scaling="row"), ragged_axis=None
    )
    q = octavo_jax.GroupedTensor(layout, jnp.array([4, 4]), jnp.zeros((2, 4, 32), jnp.float8_e4m3fn), jnp.ones((2, 4)))
    with pytest.raises(ValueError, match=r"group_sizes was given with .* stacked matrices take None"):
        octavo_jax.dequantize(q, backend="jax-reference")
