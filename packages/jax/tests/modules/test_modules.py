"""Both flavours' modules are the functions of their parameters: results, names of parameters, checkpoint names."""

from __future__ import annotations

import inspect
import pickle
import warnings
from collections.abc import Callable
from copy import deepcopy
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx

import octavo
import octavo_jax
from octavo_jax import linen as octavo_linen
from octavo_jax import moe
from octavo_jax import nnx as octavo_nnx
from octavo_jax.counting import count_runs
from octavo_jax.linear.dense import dense
from octavo_jax.linear.grouped import grouped_dense
from octavo_jax.linear.normalized_dense import layernorm_dense
from octavo_jax.linen import moe as linen_moe
from octavo_jax.mlp.mlp import grouped_mlp, layernorm_mlp
from octavo_jax.nnx import moe as nnx_moe
from octavo_registry import UnknownBackendError

M, K, N, G, F = 32, 16, 8, 3, 4
SIZES = jnp.array([10, 0, 15])
DELAYED = octavo.DelayedScaling(history=2)
STATE = octavo_jax.init_delayed(DELAYED, 1)
GROUPED_STATE = octavo_jax.init_delayed(DELAYED, G)


def _grouped(x: Any, p: Any, **common: Any) -> Any:
    return grouped_dense(x, p["kernel"], SIZES, bias=p["bias"], **common)[0]


def _dense(x: Any, p: Any, **common: Any) -> Any:
    return dense(x, p["kernel"], bias=p["bias"], **common)[0]


def _layernorm_dense(x: Any, p: Any, **common: Any) -> Any:
    return layernorm_dense(x, p["kernel"], p["scale"], p["norm_bias"], norm="layer", bias=p["bias"], **common)[0]


def _grouped_mlp(x: Any, p: Any, **common: Any) -> Any:
    return grouped_mlp(x, p["wi"], p["wo"], SIZES, bi=p["wi_bias"], bo=p["wo_bias"], **common)[0]


def _layernorm_mlp(x: Any, p: Any, **common: Any) -> Any:
    return layernorm_mlp(x, p["scale"], p["wi"], p["wo"], activation="relu2", **common)[0]


def _moe(x: Any, p: Any, **common: Any) -> Any:
    return moe.moe_mlp(x, p["router"], p["wi"], p["wo"], k=2, **common)[0]


Case = tuple[Callable[..., Any], Callable[..., Any], Callable[..., Any], tuple[Any, ...], Any, dict[str, Any]]

CASES: dict[str, Case] = {
    "grouped": (
        partial(octavo_linen.GroupedDense, G, N, use_bias=True),
        partial(octavo_nnx.GroupedLinear, G, K, N, use_bias=True),
        _grouped,
        (SIZES,),
        GROUPED_STATE,
        {"kernel": (G, K, N), "bias": (G, N)},
    ),
    "dense": (
        partial(octavo_linen.DenseGeneral, N),
        partial(octavo_nnx.Linear, K, N),
        _dense,
        (),
        STATE,
        {"kernel": (K, N), "bias": (N,)},
    ),
    "layernorm_dense": (
        partial(octavo_linen.LayerNormDenseGeneral, N, norm="layer"),
        partial(octavo_nnx.LayerNormLinear, K, N, norm="layer"),
        _layernorm_dense,
        (),
        STATE,
        {"kernel": (K, N), "bias": (N,), "scale": (K,), "norm_bias": (K,)},
    ),
    "grouped_mlp": (
        partial(octavo_linen.GroupedMLP, num_groups=G, hidden=F, features=N, use_bias=True),
        partial(octavo_nnx.GroupedMLP, G, K, F, out_features=N, use_bias=True),
        _grouped_mlp,
        (SIZES,),
        (GROUPED_STATE, GROUPED_STATE),
        {"wi": (G, K, 2 * F), "wo": (G, F, N), "wi_bias": (G, 2 * F), "wo_bias": (G, N)},
    ),
    "layernorm_mlp": (
        partial(octavo_linen.LayerNormMLP, hidden=F, activation="relu2"),
        partial(octavo_nnx.LayerNormMLP, K, F, activation="relu2"),
        _layernorm_mlp,
        (),
        (STATE, STATE),
        {"scale": (K,), "wi": (K, F), "wo": (F, K)},
    ),
    "moe": (
        partial(octavo_linen.MoE, num_experts=G, hidden=F, k=2, form="keep_all"),
        partial(octavo_nnx.MoE, G, K, F, k=2, form="keep_all"),
        _moe,
        (),
        (GROUPED_STATE, GROUPED_STATE),
        {"router": (K, G), "wi": (G, K, 2 * F), "wo": (G, F, K)},
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_modules_are_the_functions(name: str, x: Any) -> None:
    """Equal bits from the same parameters, delayed scaling's state passed; parameters have Flax's names and shapes."""
    linen_module, nnx_module, function, arguments, state, shapes = CASES[name]
    x = x if arguments else jnp.nan_to_num(x)
    module = linen_module(recipe=DELAYED)
    variables = jax.jit(module.init)(jax.random.key(0), x, *arguments)
    assert jax.tree.map(jnp.shape, variables["params"]) == shapes
    assert jax.tree.structure(variables[octavo_linen.STATE_COLLECTION]["state"]) == jax.tree.structure(state)
    other = nnx_module(recipe=DELAYED, rngs=nnx.Rngs(0))
    for key, value in variables["params"].items():
        getattr(other, key).set_value(value)
    # Not inside one jit: the function's own is compiled once for the three of them.
    results = (
        module.apply(variables, x, *arguments),
        other(x, *arguments),
        function(x, variables["params"], recipe=DELAYED, state=state),
    )
    *made, wanted = [result[0] if isinstance(result, tuple) else result for result in results]
    for y in made:
        assert np.array_equal(y, wanted)
    assert np.asarray(wanted).any()


def test_both_flavours_take_their_sizes_in_one_order() -> None:
    """Groups or experts, then what linen does not see in x; what is left is given by name."""
    plain: Any = {"recipe": None}
    linen_block = octavo_linen.MoE(G, F, k=2, **plain)
    nnx_block = octavo_nnx.MoE(G, K, F, k=2, rngs=nnx.Rngs(0), **plain)
    assert (linen_block.num_experts, linen_block.hidden, linen_block.k) == (G, F, 2)
    assert nnx_block.wo.shape == (G, F, K)
    assert octavo_linen.GroupedMLP(G, F, **plain).hidden == octavo_linen.LayerNormMLP(F, **plain).hidden == F
    assert octavo_linen.GroupedDense(G, N, **plain).features == N
    for takes in (lambda: octavo_linen.MoE(G, F, 2), lambda: octavo_nnx.MoE(G, K, F, 2, rngs=nnx.Rngs(0))):  # type: ignore[call-arg, misc]
        with pytest.raises((TypeError, ValueError)):
            takes()


def test_renormalize_has_an_old_name() -> None:
    """`normalize` gives the same module with one warning, in a transformed class, too, and both are refused."""
    new: tuple[Any, ...] = (
        octavo_linen.MoE(G, F, k=2, recipe=None, renormalize=False),
        octavo_nnx.MoE(G, K, F, k=2, recipe=None, renormalize=False, rngs=nnx.Rngs(0)),
    )
    assert new[0].clone(k=1).renormalize is False
    linen_block: Any = octavo_linen.MoE
    nnx_block: Any = partial(octavo_nnx.MoE, rngs=nnx.Rngs(0))
    transformed: Any = nn.remat(octavo_linen.MoE)
    with pytest.warns(DeprecationWarning, match="normalize is called renormalize now") as said:
        old = [
            linen_block(G, F, k=2, normalize=False, recipe=None),
            nnx_block(G, K, F, k=2, normalize=False, recipe=None),
            transformed(G, F, k=2, normalize=False, recipe=None),
        ]
    assert [one.filename for one in said] == [__file__] * 3
    assert old[0] == new[0]
    assert nnx.graphdef(old[1]) == nnx.graphdef(new[1])
    for module in (*old, *new):
        assert module.normalize is module.renormalize is False
    for both in (
        lambda: linen_block(G, F, k=2, normalize=True, renormalize=True),
        lambda: nnx_block(G, K, F, k=2, normalize=True, renormalize=True),
        lambda: old[0].clone(normalize=True),
    ):
        with pytest.raises(TypeError, match="both were given; give renormalize alone"):
            both()
    shown = inspect.signature(octavo_nnx.MoE).parameters
    assert "renormalize" in shown
    assert "normalize" not in shown


def test_both_flavours_pass_on_how_a_block_chooses_and_what_it_keeps(monkeypatch: pytest.MonkeyPatch) -> None:
    """A module that dropped its form would keep more than its user planned for, one that dropped its router's rule
    would choose other experts, and say nothing."""
    seen: list[dict[str, Any]] = []

    def block(x: Any, *_: Any, **how: Any) -> Any:
        seen.append(how)
        return x, moe.RouterStats(jnp.zeros(G, jnp.int32), jnp.float32(0))

    monkeypatch.setattr(linen_moe, "moe_mlp", block)
    monkeypatch.setattr(nnx_moe, "moe_mlp", block)
    rule = {"k": 2, "score": "sigmoid", "groups": 2, "kept_groups": 1, "renormalize": False, "scale": 2.5}
    how: Any = {**rule, "form": "lean", "weight_codes": "remake", "weights_on": "output"}
    given: dict[str, Any] = {"mask": jnp.ones(M, bool), "choice_bias": jnp.ones(G), "replay": jnp.zeros((M, 2), int)}
    init = partial(octavo_linen.MoE(G, F, **how, recipe=None).init, jax.random.key(0), jnp.ones((M, K)))
    jax.eval_shape(partial(init, **given))
    octavo_nnx.MoE(G, K, F, rngs=nnx.Rngs(0), **how, recipe=None)(jnp.ones((M, K)), **given)
    for one in seen:
        assert {name: one[name] for name in how} == how
        assert all(one[name] is value for name, value in given.items())


@pytest.mark.parametrize("name", CASES)
def test_both_flavours_pass_their_room_on(name: str) -> None:
    """A module that dropped it would take all multiprocessors and say nothing; its function refuses what is no Room."""
    linen_module, nnx_module, _, arguments, _, _ = CASES[name]
    x, how = jnp.ones((M, K)), {"room": 16, "recipe": None}
    with pytest.raises(ValueError, match="room is 16; give an octavo_jax"):
        jax.eval_shape(linen_module(**how).init, jax.random.key(0), x, *arguments)
    with pytest.raises(ValueError, match="room is 16; give an octavo_jax"):
        nnx_module(rngs=nnx.Rngs(0), **how)(x, *arguments)


@pytest.mark.parametrize("name", [name for name in octavo_nnx.__all__ if name[0].isupper() and name[-5:] != "State"])
def test_an_nnx_module_shows_all_that_it_takes(name: str) -> None:
    """`help` and documentation tools read the signature, in which nothing hides behind **options."""
    shown = inspect.signature(getattr(octavo_nnx, name)).parameters
    if name not in ("QuantizedModule", "MLPModule"):
        assert {"recipe", "dtype", "sharding", "backend", "room", "rngs"} <= set(shown)
        assert not any(one.kind in (one.VAR_KEYWORD, one.VAR_POSITIONAL) for one in shown.values())
    if name in ("MoE", "GroupedMLP", "LayerNormMLP"):
        assert {"out_features", "activation", "use_bias", "wi_axes"} <= set(shown)


def test_an_nnx_module_says_which_argument_it_lacks() -> None:
    """With the module's own name, and the argument that was probably meant."""
    with pytest.raises(TypeError, match="MoE has no argument 'recepie'; did you mean 'recipe'"):
        octavo_nnx.MoE(2, K, F, k=1, recepie=None, rngs=nnx.Rngs(0))  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="GroupedLinear has no argument 'colour'; its arguments are num_groups, in_"):
        octavo_nnx.GroupedLinear(2, K, F, colour=1, rngs=nnx.Rngs(0))  # type: ignore[call-arg]
    with pytest.raises(TypeError, match=r"Linear was given no rngs; give rngs=nnx\.Rngs\(seed\)"):
        octavo_nnx.Linear(K, F)  # type: ignore[call-arg]
    for seed in (0, jax.random.key(0)):
        with pytest.raises(TypeError, match=r"MoE was given a seed or a key as rngs; give rngs=nnx\.Rngs\(seed\)"):
            octavo_nnx.MoE(2, K, F, k=1, recipe=None, rngs=seed)  # type: ignore[arg-type]


def test_a_misspelt_backend_is_refused_when_a_module_is_constructed() -> None:
    """With the error of a call; copies of a module that was made where the backend is installed pass."""
    constructors: tuple[Callable[[Any], Any], ...] = (
        lambda backend: octavo_linen.GroupedDense(2, 16, recipe=None, backend=backend),
        lambda backend: octavo_linen.GroupedMLP(2, 16, recipe=None, backend=backend),
        lambda backend: octavo_nnx.GroupedLinear(2, 16, 16, recipe=None, backend=backend, rngs=nnx.Rngs(0)),
        lambda backend: octavo_nnx.GroupedMLP(2, 16, 16, recipe=None, backend=backend, rngs=nnx.Rngs(0)),
    )
    for construct in constructors:
        for misspelt in ("jax-nativ", ["jax-reference", "jax-nativ"]):
            with pytest.raises(UnknownBackendError, match="there is no backend 'jax-nativ'; known names are "):
                construct(misspelt)
        construct(["jax-native", "jax-reference"])
    for construct in constructors:
        module = construct("jax-reference")
        object.__setattr__(module, "backend", "of-another-machine")
        assert deepcopy(module).backend == "of-another-machine"


def test_fields_that_are_no_names_are_refused() -> None:
    """A misspelt keyword raises TypeError in both flavours and is not swallowed on its way to the base class."""
    with pytest.raises(TypeError, match="recepie"):
        octavo_linen.MoE(num_experts=2, hidden=F, k=1, recepie=None)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="recepie"):
        octavo_nnx.MoE(2, K, F, k=1, recepie=None, rngs=nnx.Rngs(0))  # type: ignore[call-arg]
    with pytest.raises(ValueError, match="activation is 'tanh'; give one of silu"):
        octavo_nnx.GroupedMLP(2, K, F, activation="tanh", rngs=nnx.Rngs(0))  # type: ignore[arg-type]


@pytest.mark.parametrize("flavour", ["linen", "nnx"])
@pytest.mark.parametrize("name", CASES)
def test_modules_name_what_they_quantize(flavour: str, name: str) -> None:
    """quantization_checkpoint_name reaches every quantizer: under its policy nothing is quantized twice (promise 7).

    A MoE block's other forms quantize x and the activation again in the backward pass: that is what they are for.
    """
    recipe, x = octavo.CurrentScaling(), jnp.ones((M, K))
    linen_module, nnx_module, _, arguments, _, _ = CASES[name]
    argument: Any
    if flavour == "linen":
        module = linen_module(recipe=recipe, quantization_checkpoint_name="mine")
        argument = jax.eval_shape(partial(module.init, jax.random.key(0)), x, *arguments)
        apply = module.apply
    else:
        graph, argument = nnx.split(nnx_module(recipe=recipe, quantization_checkpoint_name="mine", rngs=nnx.Rngs(0)))

        def apply(values: Any, *arguments: Any) -> Any:
            return nnx.merge(graph, values)(*arguments)

    def call(values: Any) -> Any:
        y = apply(values, x, *arguments)
        return jnp.tanh(y[0] if isinstance(y, tuple) else y)

    forward = 4 if isinstance(CASES[name][4], tuple) else 2  # operands of two layers or of one
    for policy, count in (("mine", forward + forward // 2), ("quantization", 2 * forward + forward // 2)):
        kept = jax.checkpoint(call, policy=octavo_jax.policies.save_quantized(policy))
        runs = count_runs(jax.value_and_grad(lambda a, f=kept: jnp.sum(f(a)[:25])), argument)
        assert runs.quantize == count, policy


def test_pytrees_survive_pickle_and_flatten(rng: np.random.Generator) -> None:
    """GroupedTensor and QuantizerSet keep every field through flatten, pickle and tree.map to non-arrays."""
    spec = octavo.NVFP4().quantizer("x")
    assert spec is not None
    q = octavo_jax.quantize(rng.standard_normal((20, 16)).astype(np.float32), spec, [7, 9])
    leaves, structure = jax.tree.flatten(q)
    for copy in (jax.tree.unflatten(structure, leaves), pickle.loads(pickle.dumps(q))):
        assert copy.spec == q.spec
        assert np.asarray(copy.columnwise).tobytes() == np.asarray(q.columnwise).tobytes()
        assert np.asarray(copy.group_sizes).tolist() == [7, 9]
    shapes = jax.tree.map(lambda leaf: leaf.shape, q)
    assert shapes.rowwise == (20, 16)
    quantizers = octavo_jax.quantizer_set(octavo.NVFP4(), checkpoint_name="mine")
    assert pickle.loads(pickle.dumps(quantizers)) == quantizers


MADE: dict[str, Callable[..., Any]] = {
    "linen.GroupedDense": lambda **how: octavo_linen.GroupedDense(G, N, **how),
    "linen.MoE": lambda **how: octavo_linen.MoE(G, F, k=2, **how),
    "nnx.GroupedLinear": lambda **how: octavo_nnx.GroupedLinear(G, K, F, rngs=nnx.Rngs(0), **how),
    "nnx.MoE": lambda **how: octavo_nnx.MoE(G, K, F, k=2, rngs=nnx.Rngs(0), **how),
}


@pytest.mark.parametrize("which", MADE)
def test_a_recipe_that_nobody_gives_is_said(which: str) -> None:
    """Once, at the line that makes the module, as in torch: forgotten, it is high precision and looks as if it worked.
    None says that high precision is meant, and copies say nothing again."""
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        module = MADE[which]()
        if "linen" in which:
            module.clone().copy(name="again")
        MADE[which](recipe=None)
        MADE[which](recipe="mxfp8")
    assert [str(each.message).split(";")[0] for each in seen] == [
        f"{which.split('.')[1]} was created without a recipe and computes in high precision"
    ]
    assert seen[0].filename == __file__
    assert module.recipe is None


def test_scales_of_the_second_bias_reach_the_function(x: Any, rng: np.random.Generator) -> None:
    """GroupedMLP of linen and of nnx with `bo_scales`, and a bias that is not zero: the bits of grouped_mlp."""
    _, _, _, arguments, _, shapes = CASES["grouped_mlp"]
    parameters = {name: jnp.asarray(rng.standard_normal(shape), jnp.float32) for name, shape in shapes.items()}
    scales = jnp.asarray(rng.standard_normal(x.shape[:-1]), jnp.float32)
    options: dict[str, Any] = {"use_bias": True, "recipe": None}
    in_linen = octavo_linen.GroupedMLP(num_groups=G, hidden=F, features=N, **options)
    in_nnx = octavo_nnx.GroupedMLP(G, K, F, out_features=N, rngs=nnx.Rngs(0), **options)
    for name, value in parameters.items():
        getattr(in_nnx, name)[...] = value
    names = ("wi", "wo", "wi_bias", "wo_bias")
    wi, wo, bi, bo = (parameters[name] for name in names)
    wanted = grouped_mlp(x, wi, wo, *arguments, bi=bi, bo=bo, bo_scales=scales, recipe=None)
    for made in (
        in_linen.apply({"params": parameters}, x, *arguments, bo_scales=scales),
        in_nnx(x, *arguments, bo_scales=scales),
    ):
        assert np.array_equal(made, wanted)
