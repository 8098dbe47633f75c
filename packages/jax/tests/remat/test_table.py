"""The remat table: how often a training step quantizes and multiplies, against the ideal of what its policy saves.

7 recipes x layer forms x policies x (does the activation need y?) x how layers stand under `jax.checkpoint`. Only
traced. By default every pair of values of two columns occurs once or more; `--slow` runs the whole table.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import combinations, product
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import octavo
import octavo_jax
from octavo import Recipe
from octavo_jax import linen, policies
from octavo_jax.counting import Runs, count_runs
from octavo_jax.linear.dense import dense
from octavo_jax.linear.normalized_dense import layernorm_dense
from octavo_jax.mlp.mlp import layernorm_mlp

M, K, G = 32, 32, 2
SIZES = (20, 10)
SLOTS = ("fp8-row-wgrad-high-precision", "mxfp8-forward-only", "nvfp4-wgrad-high-precision")
RECIPES = ("bf16", "fp8-delayed", "fp8-current", "fp8-row", "fp8-block", "mxfp8", "nvfp4")

# The ideal: a layer as operations on values, each run as often as somebody needs what it makes and nobody has saved.


@dataclass(frozen=True)
class Operation:
    """kind    "quantize", "fprop", or "other" for what is not counted
    reads, makes   values by name"""

    kind: str
    reads: frozenset[str]
    makes: frozenset[str]


@dataclass
class Model:
    """Layers of a program: what the forward pass does, what the backward pass of each reads, what can be saved.

    needed      by layer: the values that its backward pass reads
    quantized   values by the names that `jax.checkpoint` sees, and products, which a dots policy sees
    """

    operations: list[Operation] = field(default_factory=list)
    needed: list[set[str]] = field(default_factory=list)
    inputs: list[str] = field(default_factory=list)
    savable: dict[str, set[str]] = field(default_factory=lambda: {"quantization": set(), "y": set(), "dots": set()})
    gradients: int = 0

    def do(self, kind: str, reads: set[str], makes: set[str]) -> None:
        self.operations.append(Operation(kind, frozenset(reads), frozenset(makes)))

    def linear(self, recipe: Recipe, x: str, w: str, y: str) -> None:
        """y = x @ w; the backward pass of the last layer reads what dgrad and wgrad multiply."""
        read = {}
        for operand, value in (("x", x), ("w", w)):
            spec = recipe.quantizer(operand)  # type: ignore[arg-type]
            planes = {direction: f"{y}.{operand}.{direction}" for direction in (spec.directions if spec else ())}
            if planes:
                self.do("quantize", {value}, set(planes.values()))
                self.savable["quantization"] |= set(planes.values())
            backward = "wgrad" if operand == "x" else "dgrad"
            read[operand] = planes["rowwise"] if recipe.quantizes("fprop") else value
            self.needed[-1].add(planes["columnwise"] if recipe.quantizes(backward) else value)  # type: ignore[arg-type]
        self.do("fprop", set(read.values()), {y})
        self.savable["y"].add(y)
        self.savable["dots"].add(y)
        self.gradients += recipe.quantizer("dy") is not None


def _run(model: Model, wanted: set[str], saved: set[str]) -> tuple[list[Operation], set[str]]:
    """The operations that make `wanted`, none that makes only what is saved; and the values that they start from."""
    makers = {value: operation for operation in model.operations for value in operation.makes}
    ran: dict[Operation, None] = {}
    start: set[str] = set()
    queue = list(wanted)
    while queue:
        value = queue.pop()
        if value in saved or value not in makers:
            start.add(value)
        elif makers[value] not in ran:
            ran[makers[value]] = None
            queue += makers[value].reads
    return list(ran), start


def ideal(model: Model, out: str, saves: set[str], nested: bool) -> tuple[int, int]:
    """(quantize, fprop) of one block: forward, what remat runs again, and the gradients' quantizers."""
    saved = set().union(*(model.savable[name] for name in saves))
    again: list[Operation] = []
    starts: set[str] = set()
    for needed, x in zip(model.needed, model.inputs, strict=True):
        ran, start = _run(model, needed, saved | {x})  # a layer's own remat: from its input and what is saved
        again += ran
        starts |= start
    if nested:  # the block's remat makes what the layers' own start from
        ran, starts = _run(model, starts, saved | {model.inputs[0]})
        again += ran
    ran, _ = _run(model, {out} | starts, set())
    kinds = [operation.kind for operation in ran + again]
    return kinds.count("quantize") + model.gradients, kinds.count("fprop")


# The program: forms of a layer, in the model and in octavo_jax.


@dataclass(frozen=True)
class Form:
    """A layer [M, K] to [M, K].

    model    adds the layer to a Model: (model, recipe, x, prefix of its values) to the name of y
    params   the shapes of its parameters
    apply    (params, x, recipe, state, names and backend) to y, or (y, state)
    groups   of its state, by linear layer
    """

    model: Callable[[Model, Recipe, str, str], str]
    params: dict[str, tuple[int, ...]]
    apply: Callable[..., Any]
    groups: tuple[int, ...] = (1,)

    def state(self, recipe: Recipe) -> Any:
        """Delayed scaling's: one, or one a linear layer; None for other recipes."""
        if not isinstance(recipe, octavo.DelayedScaling):
            return None
        states = tuple(octavo_jax.init_delayed(recipe, groups) for groups in self.groups)
        return states if len(states) > 1 else states[0]


def _linear(model: Model, recipe: Recipe, x: str, prefix: str) -> str:
    model.linear(recipe, x, f"{prefix}w", f"{prefix}y")
    return f"{prefix}y"


def _normalized_linear(model: Model, recipe: Recipe, x: str, prefix: str) -> str:
    model.do("other", {x}, {f"{prefix}normalized", f"{prefix}rstd"})
    model.needed[-1] |= {x, f"{prefix}rstd"}  # the gradient of a normalization
    return _linear(model, recipe, f"{prefix}normalized", prefix)


def _mlp(model: Model, recipe: Recipe, x: str, prefix: str) -> str:
    first = _normalized_linear(model, recipe, x, f"{prefix}1.")
    model.do("other", {first}, {f"{prefix}activated"})
    model.needed[-1].add(first)  # the gradient of the activation
    return _linear(model, recipe, f"{prefix}activated", f"{prefix}2.")


def _grouped_dense(p: Any, x: Any, *, name: str, **arguments: Any) -> Any:
    return octavo_jax.grouped_dense(x, p["kernel"], SIZES, output_checkpoint_name=name, **arguments)


def _dense(p: Any, x: Any, *, name: str, **arguments: Any) -> Any:
    return dense(x, p["kernel"], output_checkpoint_name=name, **arguments)


def _layernorm_dense(p: Any, x: Any, *, name: str, **arguments: Any) -> Any:
    return layernorm_dense(x, p["kernel"], p["gamma"], output_checkpoint_name=name, **arguments)


def _layernorm_mlp(p: Any, x: Any, *, name: str, **arguments: Any) -> Any:
    return layernorm_mlp(x, p["gamma"], p["wi"], p["wo"], output_checkpoint_names=(name, name), **arguments)


def _module(p: Any, x: Any, *, name: str, recipe: Recipe, state: Any, seed: int, backend: str) -> Any:
    layer: Any = linen.GroupedDense(G, K, recipe=recipe, output_checkpoint_name=name, backend=backend)
    variables = {"params": p, linen.STATE_COLLECTION: {} if state is None else {"state": state}}
    return layer.apply(variables, x, SIZES, seed=seed)


MATRIX = {"kernel": (K, K)}
NORM = {"gamma": (K,)}
FORMS = {
    "grouped_dense": Form(_linear, {"kernel": (G, K, K)}, _grouped_dense, (G,)),
    "dense": Form(_linear, MATRIX, _dense),
    "layernorm_dense": Form(_normalized_linear, {**MATRIX, **NORM}, _layernorm_dense),
    "layernorm_mlp": Form(_mlp, {"wi": (K, 2 * K), "wo": (K, K), **NORM}, _layernorm_mlp, (1, 1)),
    "GroupedDense": Form(_linear, {"kernel": (G, K, K)}, _module, (G,)),
}

NAMED = {"quantization", "y"}
POLICIES: dict[str, tuple[Any, set[str]]] = {
    "no policy": (None, set()),
    "save_quantized": (policies.save_quantized(), {"quantization"}),
    "output named": (policies.save_quantized(*NAMED), NAMED),
    "with dots": (
        policies.save_quantized(base=jax.checkpoint_policies.dots_saveable),
        {"quantization", "dots"},
    ),
}
STRUCTURES = ("scan", "unrolled", "nested", "maxtext")
NEEDS_Y = (True, False)
COLUMNS: tuple[tuple[Any, ...], ...] = (RECIPES, tuple(FORMS), tuple(POLICIES), NEEDS_Y, STRUCTURES)


def pairwise(columns: tuple[tuple[Any, ...], ...]) -> Iterator[tuple[Any, ...]]:
    """Rows in which any two values of two columns meet; the row with most new pairs comes next."""

    def pairs(row: tuple[Any, ...]) -> set[Any]:
        return set(combinations(enumerate(row), 2))

    rows = list(product(*columns))
    missing = set().union(*map(pairs, rows))
    while missing:
        best = max(rows, key=lambda row: len(pairs(row) & missing))
        missing -= pairs(best)
        yield best


def _program(form: Form, recipe: Recipe, policy: Any, needs_y: bool, structure: str, backend: str) -> Any:
    """loss(params, x, states) of four layers; the states of delayed scaling are differentiated as in training."""

    def layer(x: Any, params: Any, state: Any) -> Any:
        y = form.apply(params, x, name="y", recipe=recipe, state=state, seed=1, backend=backend)
        y = y[0] if isinstance(y, tuple) else y
        return jnp.tanh(y) if needs_y else y * 0.5

    def pair(x: Any, params: Any, state: Any) -> Any:
        for number in range(2):
            x = step(x, *jax.tree.map(lambda leaf, n=number: leaf[n], (params, state)))
        return x

    if structure == "maxtext":  # its decoder: nn.remat(layer, prevent_cse=False, policy=...) inside nn.scan
        by_name = jax.checkpoint_policies.save_only_these_names("quantization")
        policy = by_name if policy is None else jax.checkpoint_policies.save_from_both_policies(policy, by_name)
    step = jax.checkpoint(layer, policy=policy, prevent_cse=structure != "maxtext")

    def loss(params: Any, x: Any, states: Any) -> Any:
        if structure == "unrolled":
            for number in range(4):
                x = step(x, *jax.tree.map(lambda leaf, n=number: leaf[n], (params, states)))
            return jnp.sum(x)
        body = step
        if structure == "nested":
            params, states = jax.tree.map(lambda leaf: leaf.reshape(2, 2, *leaf.shape[1:]), (params, states))
            body = jax.checkpoint(pair, policy=policy)
        return jnp.sum(jax.lax.scan(lambda x, xs: (body(x, *xs), None), x, (params, states))[0])

    return loss


def _wanted(form: Form, recipe: Recipe, saves: set[str], needs_y: bool, structure: str) -> tuple[int, int]:
    model = Model()
    layers = 2 if structure == "nested" else 1
    out = "x0"
    for number in range(layers):
        model.inputs.append(out)
        model.needed.append(set())
        y = form.model(model, recipe, out, f"{number}.")
        if needs_y:
            model.needed[-1].add(y)
        out = f"x{number + 1}"
        model.do("other", {y}, {out})
    if structure == "maxtext":
        saves = saves | {"quantization"}
    quantize, fprop = ideal(model, out, saves, structure == "nested")
    return 4 // layers * quantize, 4 // layers * fprop


def _counted(form: Form, recipe: Recipe, policy: Any, needs_y: bool, structure: str, backend: str) -> Runs:
    params = {name: jnp.ones((4, *shape)) for name, shape in form.params.items()}
    state = jax.tree.map(lambda leaf: jnp.stack([leaf] * 4), form.state(recipe))
    loss = _program(form, recipe, policy, needs_y, structure, backend)
    return count_runs(jax.value_and_grad(loss, argnums=(0, 1, 2)), params, jnp.ones((M, K)), state)


def _check(row: tuple[Any, ...], probes: tuple[str, str]) -> None:
    """Where the model and the program agree, on a backend with plain quantizers and on one with fused ones."""
    for backend in probes if row[1].startswith("layernorm") else probes[:1]:
        _check_on(row, backend)


def _check_on(row: tuple[Any, ...], backend: str) -> None:
    kind, name, policy_name, needs_y, structure = row
    recipe = octavo.DelayedScaling(history=2) if kind == "fp8-delayed" else octavo.recipe(kind)
    policy, saves = POLICIES[policy_name]
    runs = _counted(FORMS[name], recipe, policy, needs_y, structure, backend)
    wanted = _wanted(FORMS[name], recipe, saves, needs_y, structure)
    assert (runs.quantize, runs.fprop) == wanted, f"{row} on {backend}"
    assert runs.dgrad == runs.wgrad, f"{row} on {backend}"


@pytest.mark.parametrize("row", list(pairwise(COLUMNS)), ids=str)
def test_runs_of_a_training_step_are_ideal(row: tuple[Any, ...], probes: tuple[str, str]) -> None:
    """Each operand is quantized once where the policy saves it, and a product is formed once where it saves y."""
    _check(row, probes)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", SLOTS)
def test_slots_of_high_precision(kind: str, form: str, probes: tuple[str, str]) -> None:
    """Where a GEMM multiplies unquantized operands, its planes are neither made again nor kept."""
    _check((kind, form, "save_quantized", True, "scan"), probes)


@pytest.mark.slow
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("form", FORMS)
def test_the_whole_table(form: str, policy: str, probes: tuple[str, str]) -> None:
    """Every cell, and the recipes with slots of high precision."""
    for kind, needs_y, structure in product(RECIPES + SLOTS, NEEDS_Y, STRUCTURES):
        _check((kind, form, policy, needs_y, structure), probes)
