"""AdamW in JAX: the definition's bits under jit and over shards, as an optax transformation, and into codes."""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import cycle
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
from flax import nnx, serialization
from jax import lax
from jax.extend.core import Literal
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

import octavo_jax
import octavo_numerics as on
from octavo import BlockScaling
from octavo_jax.optimizers import AdamW, AdamWState, BlockState, adamw
from octavo_jax.traffic import collectives

SHAPES = {"bias": (5,), "experts": (2, 3, 130)}
FACTOR = on.AdamWRule(3e-3, (0.9, 0.999), 1e-8, 0.1)


@pytest.fixture
def rng() -> np.random.Generator:
    seed = secrets.randbits(32)
    print(f"seed {seed}")
    return np.random.default_rng(seed)


def drawn(rng: np.random.Generator, dtype: Any) -> dict[str, Any]:
    """Of magnitudes that keep squares normal: XLA:CPU takes subnormal numbers as zero."""
    return {
        name: (rng.standard_normal(shape) * 2.0 ** rng.integers(-10, 4)).astype(dtype) for name, shape in SHAPES.items()
    }


def same(values: Any, defined: Any) -> bool:
    """Bit for bit."""
    return np.asarray(values).tobytes() == np.asarray(defined).tobytes()


def same_moment(moment: Any, defined: Any) -> bool:
    if isinstance(moment, BlockState):
        return same(moment.codes, defined.codes) and same(moment.tops, defined.tops)
    return same(moment, defined)


class Defined:
    """The same training in octavo_numerics."""

    def __init__(self, masters: dict[str, Any], state_bits: int, seed: int) -> None:
        self.masters, self.seed = masters, seed
        bits = {name: state_bits if len(shape) > 1 else 32 for name, shape in SHAPES.items()}
        self.states = {name: on.init_adamw(shape, state_bits=bits[name]) for name, shape in SHAPES.items()}

    def step(self, grads: dict[str, Any], rule: on.AdamWRule = FACTOR) -> None:
        for number, name in enumerate(SHAPES):
            master, state = self.masters[name], self.states[name]
            self.masters[name], self.states[name] = on.adamw_step(
                master, grads[name], state, rule, seed=self.seed, tensor=number
            )

    def check(self, params: Any, state: AdamWState) -> None:
        for name, own in self.states.items():
            assert same(params[name], self.masters[name].astype(params[name].dtype)), name
            assert same_moment(state.mu[name], own.exp_avg), name
            assert same_moment(state.nu[name], own.exp_avg_sq), name


@pytest.mark.parametrize(("dtype", "state_bits"), [(np.float32, 32), (ml_dtypes.bfloat16, 8)])
def test_a_jitted_step_is_the_definitions(dtype: Any, state_bits: int, rng: np.random.Generator) -> None:
    """Parameters that are their own masters: no product is contracted into a sum, no quotient reordered."""
    seed = int(rng.integers(1 << 60))
    defined = Defined(drawn(rng, dtype), state_bits, seed)
    rule = AdamW(3e-3, weight_decay=0.1, master_dtype=dtype, state_bits=state_bits, seed=seed)
    params = jax.tree.map(jnp.asarray, defined.masters)
    state, step = rule.init(params), jax.jit(rule.step)
    for _ in range(3):
        grads = drawn(rng, dtype)
        defined.step(grads)
        params, state = step(grads, state, params)
        defined.check(params, state)


@pytest.mark.usefixtures("on_a_cpu")
@pytest.mark.parametrize("kept", ["made in the program", "closed over"])
def test_a_state_that_the_compiler_knows(kept: str, rng: np.random.Generator, as_users_have_it: dict[str, Any]) -> None:
    """The state of a step in a program that also makes it, or that has it as a constant: the number of the step is a
    constant there, and so was the word that keeps products from being contracted."""
    defined = Defined(drawn(rng, np.float32), 32, 0)
    rule = AdamW(3e-3, weight_decay=0.1)
    params = jax.tree.map(jnp.asarray, defined.masters)
    state = rule.init(params)

    @jax.jit
    def step(grads: Any, params: Any) -> Any:
        return rule.step(grads, state if kept == "closed over" else rule.init(params), params)

    grads = drawn(rng, np.float32)
    defined.step(grads)
    params, state = step.lower(grads, params).compile(as_users_have_it)(grads, params)
    defined.check(params, state)


def _inexact(jaxpr: Any, given: Sequence[Any], errors: Iterator[int]) -> list[Any]:
    """What the program computes where each quotient and root of floats is off by as many ulps as `errors` says next."""
    values = dict(zip([*jaxpr.jaxpr.constvars, *jaxpr.jaxpr.invars], [*jaxpr.consts, *given], strict=True))

    def read(variable: Any) -> Any:
        return variable.val if isinstance(variable, Literal) else values[variable]

    for equation in jaxpr.jaxpr.eqns:
        operands, primitive = list(map(read, equation.invars)), equation.primitive
        inner = equation.params.get("jaxpr", equation.params.get("call_jaxpr"))
        if inner is not None:
            made = _inexact(inner, operands, errors)
        else:
            made = primitive.bind(*operands, **equation.params)
            made = made if primitive.multiple_results else [made]
        if primitive.name in ("div", "sqrt") and made[0].dtype == jnp.float32:
            bits = lax.bitcast_convert_type(made[0], jnp.int32) + np.int32(next(errors))
            near = lax.bitcast_convert_type(bits, jnp.float32)
            made = [jnp.where(jnp.isfinite(made[0]) & (made[0] != 0), near, made[0])]
        values.update(zip(equation.outvars, made, strict=True))
    return list(map(read, jaxpr.jaxpr.outvars))


def test_a_device_whose_quotients_and_roots_are_not_the_nearest(rng: np.random.Generator) -> None:
    """XLA's on a GPU are off by an ulp or two, here by two either way: the step's bits are the definition's."""
    if jax.default_backend() != "cpu":
        pytest.skip("this device's own quotients are off, and two ulp more are more than a step mends")
    defined = Defined(drawn(rng, np.float32), 32, 0)
    rule = AdamW(3e-3, weight_decay=0.1)
    params = jax.tree.map(jnp.asarray, defined.masters)
    state = rule.init(params)
    traced = jax.make_jaxpr(rule.step)(params, state, params)
    tree = jax.tree.structure((params, state))
    used: list[int] = []

    @jax.jit
    def step(*given: Any) -> Any:
        errors = (used.append(error) or error for error in cycle((2, -2, 1, -1)))  # type: ignore[func-returns-value]
        return jax.tree.unflatten(tree, _inexact(traced, jax.tree.leaves(given), errors))

    for _ in range(2):
        grads = drawn(rng, np.float32)
        defined.step(grads)
        params, state = step(grads, state, params)
        defined.check(params, state)
    assert len(used) > 4


def test_parameters_are_rounded_masters_and_codes_those_of_the_parameters(rng: np.random.Generator) -> None:
    """bf16 parameters with fp32 masters; the kernel's codes are made in the same program: quantize(cast(master))."""
    defined = Defined(drawn(rng, np.float32), 8, 1)
    rule = AdamW(3e-3, weight_decay=0.1, state_bits=8, seed=1)
    params = jax.tree.map(lambda value: jnp.asarray(value, jnp.bfloat16), defined.masters)
    state = rule.init(params)
    state = state._replace(master=jax.tree.map(jnp.asarray, defined.masters))  # a checkpoint's
    spec = BlockScaling().quantizer("w")
    assert spec is not None

    @jax.jit
    def step(grads: Any, state: Any, params: Any) -> Any:
        params, state = rule.step(grads, state, params)
        return params, state, octavo_jax.quantize(params["experts"], spec, backend="jax-reference")

    for _ in range(2):
        grads = drawn(rng, np.float32)
        defined.step(grads)
        params, state, codes = step(grads, state, params)
        defined.check(params, state)
        expected = on.quantize(defined.masters["experts"].astype(ml_dtypes.bfloat16), spec)
        for plane in ("rowwise", "rowwise_scale", "columnwise", "columnwise_scale"):
            assert same(getattr(codes, plane), getattr(expected, plane)), plane


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
def test_as_an_optax_transformation(dtype: Any, rng: np.random.Generator) -> None:
    """In a chain with a schedule, a mask and jit: `apply_updates` gives `step`'s parameters where they are near
    the old ones, and is off by what the docstring says elsewhere."""
    schedule = optax.linear_schedule(3e-3, 1e-3, 3)
    seed, mask = int(rng.integers(1 << 30)), {"bias": False, "experts": True}
    chain = optax.chain(optax.scale(2.0), adamw(schedule, weight_decay=0.1, mask=mask, master_dtype=dtype, seed=seed))
    rule = AdamW(schedule, weight_decay=0.1, mask=lambda _: mask, master_dtype=dtype, seed=seed)
    params: Any = jax.tree.map(jnp.asarray, drawn(rng, dtype))
    state, own = chain.init(params), rule.init(params)

    @jax.jit
    def both(grads: Any, state: Any, own: Any, params: Any) -> Any:
        updates, state = chain.update(grads, state, params)
        return optax.apply_updates(params, updates), state, rule.step(jax.tree.map(lambda g: 2 * g, grads), own, params)

    for step in range(3):
        grads, before = drawn(rng, np.float32), params
        params, state, (exact, own) = both(grads, state, own, params)
        for name in SHAPES:
            new, old, got = (np.asarray(each[name]).astype(np.float64) for each in (exact, before, params))
            near = (old * new > 0) & (np.abs(old) <= 2 * np.abs(new)) & (np.abs(new) <= 2 * np.abs(old))
            tame = near if dtype is np.float32 else np.abs(old) <= 2**12 * np.abs(new)
            assert (got == new)[tame].all()
            coarse = 0.0 if dtype is np.float32 else 2.0**-8  # the sum is rounded to the parameter's dtype
            assert (np.abs(got - new) <= 2.0**-23 * (np.abs(old) + np.abs(new)) + coarse * np.abs(new)).all()
        rate = np.float32(schedule(step))
        decayed = on.AdamWRule(float(rate), weight_decay=0.0)
        if step == 0:
            bias, _ = on.adamw_step(
                np.asarray(before["bias"]), 2 * grads["bias"], on.init_adamw((5,)), decayed, seed=seed, tensor=0
            )
            assert same(exact["bias"], bias)
        params = exact


def test_shards_step_as_the_whole(rng: np.random.Generator) -> None:
    """XLA partitions the step: bits of stochastic rounding and 8-bit blocks are those of one device. Nothing moves,
    whichever axes but the last are cut, and moments stay where they are: rows were joined, and XLA gathered them."""
    if len(jax.devices()) < 4:
        pytest.skip("this process has too few devices")
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("ep", "fsdp"))
    rule = AdamW(3e-3, master_dtype=jnp.bfloat16, state_bits=8)
    params, grads = (jnp.asarray(rng.standard_normal((4, 4, 130)), kind) for kind in (jnp.bfloat16, jnp.float32))
    alone = jax.jit(rule.step)(grads, rule.init(params), params)
    place = NamedSharding(mesh, PartitionSpec("ep", "fsdp"))
    cut = jax.device_put(params, place)
    given = jax.device_put(grads, place), jax.jit(rule.init)(cut), cut
    program = jax.jit(rule.step).lower(*given).compile()
    sharded = program(*given)
    for one, other in zip(jax.tree.leaves(alone), jax.tree.leaves(sharded), strict=True):
        assert same(one, other)
    assert not collectives(program)
    assert all(leaf.sharding == place for leaf in jax.tree.leaves(sharded) if leaf.ndim)


@pytest.mark.parametrize("last", [None, "tp"])
def test_an_explicit_mesh_cuts_any_axis(last: str | None, rng: np.random.Generator) -> None:
    """Its types refuse most reshapes: a step of 8-bit moments, which took its blocks out of rows, was a
    ShardingTypeError. Bits are those of one device, and a state lies where `init` put it, as a scan's carry has to."""
    if len(jax.devices()) < 4:
        pytest.skip("this process has too few devices")
    kinds = (AxisType.Explicit,) * 2
    mesh = jax.make_mesh((2, 2), ("fsdp", "tp"), kinds, devices=jax.devices()[:4])
    rule = AdamW(3e-3, master_dtype=jnp.bfloat16, state_bits=8)
    place = NamedSharding(mesh, PartitionSpec("fsdp", None, last))
    params, grads = (jnp.asarray(drawn(rng, kind)["experts"]) for kind in (ml_dtypes.bfloat16, np.float32))
    alone = jax.jit(AdamW.step, static_argnums=0)(rule, grads, rule.init(params), params)  # one program for both
    cut = jax.device_put(params, place)
    with jax.set_mesh(mesh):
        state = rule.init(cut)
        sharded = jax.jit(rule.step)(jax.device_put(grads, place), state, cut)
    for one, other in zip(jax.tree.leaves(alone), jax.tree.leaves(sharded), strict=True):
        assert same(one, other)
    assert jax.tree.map(jax.typeof, sharded[1]) == jax.tree.map(jax.typeof, state)


def test_a_mask_may_be_a_prefix() -> None:
    """As optax's masks are: one boolean for a part of the parameters, also for one that optax.masked has left out."""
    ones = {"bias": jnp.ones(3), "experts": {"wi": jnp.ones((2, 3)), "wo": jnp.ones((2, 3))}}
    none = jax.tree.map(jnp.zeros_like, ones)
    decaying = partial(adamw, 0.5, weight_decay=0.5)
    for mask, steps, decays in (
        ({"bias": False, "experts": True}, True, [False, True, True]),
        (False, True, [False, False, False]),
        ({"bias": True, "experts": {"wi": True, "wo": False}}, {"bias": False, "experts": True}, [False, True, False]),
    ):
        chain = optax.masked(decaying(mask=mask), steps)
        updates, _ = chain.update(none, chain.init(ones), ones)
        assert [bool((update == -0.25).all()) for update in jax.tree.leaves(updates)] == decays
        assert all(
            (update == 0).all() for update, decay in zip(jax.tree.leaves(updates), decays, strict=True) if not decay
        )


def test_what_does_not_fit_is_refused() -> None:
    """With the name, what was given, and what is needed."""
    for changed, message in (
        ({"learning_rate": -1.0}, "learning_rate is -1.0"),
        ({"learning_rate": jnp.ones(2)}, r"learning_rate has shape \[2\]"),
        ({"b2": 1.0}, "b2 is 1.0; give a number from 0 to below 1"),
        ({"eps": float("nan")}, "eps is nan"),
        ({"weight_decay": "x"}, "weight_decay is 'x'"),
        ({"master_dtype": jnp.float16}, "master_dtype is float16; give float32 or bfloat16"),
        ({"master_dtype": "fp32"}, "master_dtype is 'fp32'; give float32 or bfloat16"),
        ({"master_dtype": None}, "master_dtype is None; give float32 or bfloat16"),
        ({"state_bits": 4}, "state_bits is 4; give 32 or 8"),
        ({"seed": 0.5}, "seed is 0.5"),
    ):
        with pytest.raises(ValueError, match=message):
            AdamW(**{"learning_rate": 1e-3, **changed})  # type: ignore[arg-type]
    rule, params = AdamW(1e-3), {"w": jnp.ones((2, 3))}
    state = rule.init(params)
    for function, message in (
        (lambda: rule.init({"w": jnp.ones(2, jnp.int32)}), r"params\['w'\] has dtype int32"),
        (lambda: rule.step({"v": jnp.ones((2, 3))}, state, params), "grads has another structure than params"),
        (lambda: rule.step({"w": jnp.ones((3, 2))}, state, params), r"grads\['w'\] is float32 \[3, 2\]"),
        (lambda: rule.step(params, rule.init({"v": jnp.ones(2)}), params), "state.mu has another structure"),
        (lambda: rule.transformation().update(params, state), "params is None; call update"),
        (lambda: rule.step(params, serialization.to_state_dict(state), params), "state is a dict; give the AdamWState"),
        (lambda: rule.step(params, optax.chain(adamw(1e-3)).init(params), params), "state is a tuple; give the AdamWS"),
        (lambda: rule.step({"w": None}, state, params), r"grads\['w'\] is None"),
        (lambda: AdamW(lambda count: jnp.ones(3)).step(params, state, params), r"returned an array of shape \[3\]"),
        (lambda: AdamW(1e-3, mask={"w": "no"}).step(params, state, params), r"mask\['w'\] is 'no'; give True or False"),
        (lambda: AdamW(1e-3, mask={"v": True}).step(params, state, params), "mask has another structure than params"),
        (
            lambda: AdamW(1e-3, master_dtype=jnp.bfloat16).init({"w": jnp.ones(2, jnp.float16)}),
            r"params\['w'\] is float16, which bfloat16 does not hold",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            function()


@pytest.mark.parametrize("of", ["rate", "params", "grads"])
@pytest.mark.parametrize("way", [jax.grad, jax.jacfwd])
def test_a_step_is_not_differentiated(of: str, way: Any) -> None:
    """A learned learning rate, or parameters to start from: exact products go through bits, so derivatives were zeros
    without a word. What stops the gradient steps on."""
    given = {"rate": jnp.float32(1e-3), "params": jnp.ones((2, 3)), "grads": jnp.ones((2, 3))}

    def loss(one: Any) -> Any:
        values = given | {of: one}
        tx = adamw(values["rate"])
        updates, _ = tx.update(values["grads"], tx.init(given["params"]), values["params"])
        return jnp.sum(values["params"] + updates)

    with pytest.raises(TypeError, match=r"a step of AdamW .*optax\.adamw"):
        jax.jit(way(loss))(given[of])
    jax.eval_shape(way(lambda one: loss(lax.stop_gradient(one))), given[of])


def test_a_state_of_another_rule_is_refused() -> None:
    """A step goes by what the state holds: one of an earlier configuration ran its rule, and broadcast its shape."""
    params = {"w": jnp.ones((4, 200)), "narrow": jnp.ones((2, 3), jnp.bfloat16)}
    rule = AdamW(1e-3)
    for state, message in (
        (AdamW(1e-3, state_bits=8).init(params), r"mu\['narrow'\] is 8-bit codes .*keeps float32 \[2, 3\]"),
        (
            AdamW(1e-3, master_dtype=jnp.bfloat16).init(params),
            r"master\['narrow'\] is nothing, .*keeps float32 \[2, 3\]",
        ),
        (rule.init(params | {"w": jnp.ones((1, 200))}), r"mu\['w'\] is float32 \[1, 200\], .*keeps float32 \[4, 200\]"),
    ):
        with pytest.raises(ValueError, match=rf"state\.{message}.*give a state that its init made"):
            jax.jit(rule.step)(params, state, params)


@pytest.mark.parametrize("state_bits", [32, 8])
def test_a_first_state_is_donated(state_bits: int) -> None:
    """Both moments of a parameter were one array, and JAX gives a program no buffer twice."""
    rule = AdamW(1e-3, state_bits=state_bits)
    params = {name: jnp.ones(shape) for name, shape in SHAPES.items()}
    pointers = [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(rule.init(params))]
    assert len(set(pointers)) == len(pointers)
    given, state = jax.tree.map(jnp.copy, params), rule.init(params)
    jax.jit(rule.step, donate_argnums=(1, 2))(params, state, given)
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves((state, given)))


def test_flax_writes_and_restores_moments_in_8_bits(rng: np.random.Generator) -> None:
    """A state that `flax.serialization` wrote steps on with the same bits; the kind of a moment is the target's."""
    rule, params = AdamW(1e-3, state_bits=8), drawn(rng, jnp.bfloat16)
    step = jax.jit(rule.step)
    params, state = step(params, rule.init(params), params)
    restored = serialization.from_bytes(rule.init(params), serialization.to_bytes(state))
    assert jax.tree.structure(restored) == jax.tree.structure(state)
    assert jax.tree.all(jax.tree.map(same, step(params, restored, params), step(params, state, params)))
    wide = serialization.to_state_dict(AdamW(1e-3).init(params))
    with pytest.raises(
        ValueError, match=r"the state dict of a BlockState is a .*Array.*give one that .*'codes', 'tops'"
    ):
        serialization.from_state_dict(state, wide)


def test_an_nnx_optimizer_steps_moments_in_8_bits(rng: np.random.Generator) -> None:
    """It takes a moment apart after each update, and gives the next one codes and tops by name. A new state has them
    by name, too: it was another tree than a later one, which no scan carries."""
    params = drawn(rng, jnp.bfloat16)
    model = nnx.Dict({name: nnx.Param(jnp.asarray(value)) for name, value in params.items()})
    rule = AdamW(1e-3, state_bits=8)
    transformation = rule.transformation()
    optimizer = nnx.Optimizer(model, transformation, wrt=nnx.Param)
    fresh = jax.tree.structure(nnx.state(optimizer))
    step, state = nnx.jit(lambda model, optimizer, grads: optimizer.update(model, grads)), rule.init(params)
    for _ in range(3):
        grads = drawn(rng, jnp.float32)
        step(model, optimizer, nnx.state(nnx.Dict({name: nnx.Param(jnp.asarray(g)) for name, g in grads.items()})))
        updates, state = jax.jit(transformation.update)(grads, state, params)
        params = optax.apply_updates(params, updates)
    assert jax.tree.all(jax.tree.map(same, nnx.to_pure_dict(nnx.state(model)), params))
    assert jax.tree.structure(nnx.state(optimizer)) == fresh
    masters = nnx.as_pure(optimizer.opt_state).master
    assert all(same(masters[name], master) for name, master in state.master.items())


def test_numbers_that_inject_hyperparams_makes_arrays() -> None:
    """A refusal that says which of them to leave as they are, after which a step has the same bits."""
    params = {"w": jnp.ones((2, 3))}
    with pytest.raises(ValueError, match=r"b1 is a jax\.Array; give a number.* static_args name: b1, b2, eps"):
        optax.inject_hyperparams(adamw)(learning_rate=1e-3).init(params)
    static = "b1", "b2", "eps", "weight_decay", "master_dtype", "state_bits", "seed"
    injected = optax.inject_hyperparams(adamw, static_args=static)(learning_rate=1e-3)
    updates, _ = jax.jit(injected.update)(params, injected.init(params), params)
    expected, _ = jax.jit(adamw(1e-3).update)(params, adamw(1e-3).init(params), params)
    assert same(updates["w"], expected["w"])


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_a_learning_rate_that_was_rounded(dtype: Any) -> None:
    """As inject_hyperparams rounds it to the parameters' dtype, unless it is told another."""
    params = {"w": jnp.ones((2, 3), dtype)}
    static = "b1", "b2", "eps", "weight_decay", "master_dtype", "state_bits", "seed"
    injecting = partial(optax.inject_hyperparams, adamw, static_args=static)
    with pytest.raises(ValueError, match=f"learning_rate is an array of {jnp.dtype(dtype)}.*hyperparam_dtype"):
        injecting()(learning_rate=1e-3).init(params)
    injected = injecting(hyperparam_dtype=jnp.float32)(learning_rate=1e-3)
    _, state = injected.update(params, injected.init(params), params)
    _, expected = AdamW(1e-3).step(params, AdamW(1e-3).init(params), params)
    assert same(state.inner_state.master["w"], expected.master["w"])


def test_numbers_may_be_numpys(rng: np.random.Generator) -> None:
    """A learning rate out of a sweep or a file is what a number of Python's is."""
    numbers = {"learning_rate": 0.25, "b1": 0.5, "b2": 0.75, "eps": 0.125, "weight_decay": 0.0625}
    params = drawn(rng, jnp.float32)
    kinds: tuple[Any, ...] = (float, np.float32, np.array)
    rules = [AdamW(**{name: kind(value) for name, value in numbers.items()}) for kind in kinds]
    steps = [rule.step(params, rule.init(params), params) for rule in rules]
    assert jax.tree.all(jax.tree.map(same, steps[0], steps[1]))
    assert jax.tree.all(jax.tree.map(same, steps[0], steps[2]))
    assert rules[0] == rules[1] == rules[2]
    with pytest.raises(ValueError, match=r"eps is nan; give a finite number"):
        AdamW(1e-3, eps=kinds[1]("nan"))


def test_a_parameter_may_be_a_number(rng: np.random.Generator) -> None:
    """A temperature that a model keeps as a number of Python's or numpy's steps as an array does, as in optax."""
    value, grad = (float(np.float32(drawing)) for drawing in rng.standard_normal(2))
    stepped = []
    for kind in (jnp.float32, float, np.float32):
        params, grads = {"t": kind(value)}, {"t": kind(grad)}
        new, state = AdamW(1e-2).step(params=params, grads=grads, state=AdamW(1e-2).init(params))
        updates, _ = adamw(1e-2).update(grads, adamw(1e-2).init(params), params)
        stepped.append((new, state, updates))
    for other in stepped[1:]:
        assert jax.tree.all(jax.tree.map(same, stepped[0], other))


def test_a_delayed_state_is_no_parameter() -> None:
    """A step would subtract from scales and histories what is their new value; masked, it is left alone."""
    params = {"kernel": jnp.ones((2, 3)), "state": octavo_jax.init_delayed("fp8-delayed", 2)}
    with pytest.raises(ValueError, match=r"params\['state'\] is a DelayedState, whose gradient is its new value"):
        AdamW(1e-3).init(params)
    state = optax.masked(adamw(1e-3), {"kernel": True, "state": False}).init(params)
    assert [leaf.shape for leaf in jax.tree.leaves(state)] == [(), (2, 3), (2, 3)]


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_values_that_a_parameter_is_given_are_stepped(dtype: Any, rng: np.random.Generator) -> None:
    """A checkpoint that is loaded after `init`, without its optimizer: the first step wrote the parameters back from
    the masters of before. Where nothing is written, masters keep what their parameters round away."""
    rule = AdamW(2.0**-12, weight_decay=0.0, b1=0.0, b2=0.0, eps=0.0)
    params = {"w": jnp.ones((2, 3), dtype)}
    grads, step = {"w": jnp.ones((2, 3))}, jax.jit(rule.step)
    params, state = step(grads, rule.init(params), params)
    for steps in (2, 3):
        assert same(state.master["w"], np.full((2, 3), 1 - (steps - 1) * 2.0**-12, np.float32))
        params, state = step(grads, state, params)
    loaded = {"w": params["w"].at[0].set(5)}
    params, state = step(grads, state, loaded)
    assert same(state.master["w"], np.float32([[5 - 2.0**-12] * 3, [1 - 4 * 2.0**-12] * 3]))
    assert same(params["w"], state.master["w"].astype(dtype))


def test_a_transformation_behind_it_is_not_undone() -> None:
    """Of a rate that another one divides, parameters of bf16 lagged behind masters that ran a thousand times as far."""
    chain = optax.chain(adamw(16.0, weight_decay=0.0), optax.scale(2.0**-8))
    params = {"w": jnp.ones((2, 3), jnp.bfloat16)}
    state, grads = chain.init(params), {"w": jnp.ones((2, 3))}
    for step in range(1, 4):
        updates, state = jax.jit(chain.update)(grads, state, params)
        params = optax.apply_updates(params, updates)
        # an ulp of bf16 below 1, of which each step is a multiple: Adam's own is 1 / (1 + eps) of it
        np.testing.assert_allclose(params["w"].astype(np.float32), 1 - step * 2.0**-4, atol=2.0**-8)


def test_conditions_of_optax_inside_an_nnx_optimizer() -> None:
    """It gives moments in 8 bits back by name; as they came back in another kind of tree, every such step was an
    error of JAX's about branches or trees that differ."""
    params, grads = {"w": jnp.ones((2, 130))}, {"w": jnp.full((2, 130), 0.5)}
    inner = adamw(1e-2, state_bits=8)
    step = jax.jit(inner.update)
    for wrapped, steps in (
        (optax.MultiSteps(inner, 2).gradient_transformation(), 1),
        (optax.apply_if_finite(inner, 2), 2),
    ):
        model = nnx.Dict({name: nnx.Param(value) for name, value in params.items()})
        optimizer = nnx.Optimizer(model, wrapped, wrt=nnx.Param)
        update = nnx.jit(lambda model, optimizer, grads: optimizer.update(model, grads))
        for _ in range(2):
            update(model, optimizer, nnx.state(nnx.Dict({name: nnx.Param(g) for name, g in grads.items()})))
        new, state = params, inner.init(params)
        for _ in range(steps):  # two equal gradients have their mean
            updates, state = step(grads, state, new)
            new = optax.apply_updates(new, updates)
        assert same(nnx.to_pure_dict(nnx.state(model))["w"], new["w"])
        assert not same(new["w"], params["w"])
