"""AdamW over masters: a rule with an exact step, and the optax transformation of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.typing import DTypeLike

from octavo_jax.arithmetic.widening import in_fp32
from octavo_jax.arrays.dtypes import DTYPES
from octavo_jax.arrays.exportable import exportable_tuple
from octavo_jax.arrays.flax_serialization import known_to_flax
from octavo_jax.arrays.optional_packages import absent
from octavo_jax.optimizers.arithmetic import Corrections, Rule, advance, corrections
from octavo_jax.optimizers.block_state import (
    BlockState,
    as_given,
    as_nnx_keeps,
    decode,
    encode,
    put_together,
    zero_blocks,
)
from octavo_jax.optimizers.checks import (
    NO_DERIVATIVE,
    check_constants,
    check_learning_rate,
    check_master_dtype,
    check_no_states,
    checked_gradient,
    decays_of,
)
from octavo_jax.optimizers.rounding import (
    FIRST_MOMENT,
    MASTER,
    SECOND_MOMENT,
    Draws,
    round_stochastic,
    rounding_bits,
)
from octavo_jax.quantizers.derivatives import undifferentiated
from octavo_jax.scaling.seeds import seed_words

try:
    import optax  # type: ignore[import-untyped]
except ModuleNotFoundError as error:
    raise absent(error, "optax", "octavo_jax.optimizers") from error

Tree = Any
"""A pytree of arrays, as optax takes it."""

LearningRate = float | Array | Callable[[Array], Any]


@exportable_tuple
class AdamWState(NamedTuple):
    """What AdamW keeps from step to step.

    count    finished steps, int32
    mu, nu   the moments, in trees like the parameters' of fp32 arrays or `BlockState`s
    master   such a tree of arrays of master_dtype, with `optax.MaskedNode()` for a parameter that is its own master
    """

    count: Array  # type: ignore[assignment]  # optax's name, which tuple has, too
    mu: Tree
    nu: Tree
    master: Tree


class _Leaf(NamedTuple):
    """One parameter's part of a state."""

    mu: Any
    nu: Any
    master: Any


@dataclass(frozen=True)
class AdamW:
    """AdamW (Loshchilov and Hutter, arXiv 1711.05101): `step` has the bits of `octavo_numerics.adamw_step`.

    learning_rate  a number, an fp32 scalar array, or a schedule: a function of the finished steps
    b1, b2, eps    decay rates of the moments; what is added to the root
    weight_decay   decoupled, multiplied by the learning rate
    mask           parameters that decay: a tree of booleans like the parameters, with one for a whole part of them if
                   need be, or a function that makes it from them
    master_dtype   float32, or bfloat16 with steps that are rounded stochastically. A parameter of this dtype, or of
                   float32, is its own master; any other parameter is its master rounded to nearest. Where it is not,
                   somebody wrote to it after the last step, and its value is the new master
    state_bits     32 or 8, for the moments of parameters with two axes or more; other parameters' have 32
    seed           of stochastic rounding. The random bits depend on it, on the step, on the parameter's number among
                   the tree's leaves and on the position, but not on the sharding; inside of `jax.shard_map` the
                   position is that in the shard. Transformations of parts of a model, as in optax.multi_transform,
                   number their own leaves: give each another seed

    Raises ValueError for what does not fit. XLA:CPU takes subnormal numbers as zero, which the definition keeps.
    """

    learning_rate: LearningRate
    b1: float = 0.9
    b2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 1e-2
    mask: Tree | Callable[[Tree], Tree] | None = None
    master_dtype: DTypeLike = jnp.float32
    state_bits: int = 32
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("learning_rate", "b1", "b2", "eps", "weight_decay"):
            value = getattr(self, name)
            if isinstance(value, np.generic | np.ndarray) and not value.ndim:
                object.__setattr__(self, name, value.item())  # a number of numpy's, as Python's
        check_learning_rate(self.learning_rate)
        check_constants(
            b1=self.b1, b2=self.b2, eps=self.eps, weight_decay=self.weight_decay, state_bits=self.state_bits
        )
        check_master_dtype(self.master_dtype)
        seed_words(self.seed)

    def init(self, params: Tree) -> AdamWState:
        """The state before the first step; ValueError for parameters of other dtypes than the three, and for states of
        delayed scaling."""
        known_to_flax(BlockState)
        check_no_states(params)
        paths, tree = _flattened(params)
        leaves = [self._new(jax.tree_util.keystr(path), leaf) for path, leaf in paths]
        mu, nu, master = (tree.unflatten(part) for part in zip(*leaves, strict=True)) if leaves else (params,) * 3
        mu, nu = as_nnx_keeps((mu, nu), params)
        return AdamWState(jnp.zeros((), jnp.int32), mu, nu, master)

    def step(self, grads: Tree, state: AdamWState, params: Tree) -> tuple[Tree, AdamWState]:
        """The parameters and the state after one more step, bit for bit.

        Raises ValueError for gradients whose tree, shapes or dtypes do not fit the parameters, and for a state that
        `init` would not have made for them, such as one of another master_dtype or other state_bits. TypeError where a
        derivative is taken through the step.
        """
        grads, state, params = undifferentiated((grads, state, params), NO_DERIVATIVE)
        paths, tree = _flattened(params)
        grads_of, states = self._flat(tree, grads, "grads"), self._states(paths, tree, state)
        decays = [True] * len(paths)
        if self.mask is not None:
            decays = decays_of(self.mask(params) if callable(self.mask) else self.mask, params)
        count = state.count + 1
        rate = self.learning_rate(state.count) if callable(self.learning_rate) else self.learning_rate
        if jnp.ndim(rate):
            raise ValueError(f"learning_rate has returned an array of shape {list(jnp.shape(rate))}; return a scalar")
        rate = jnp.asarray(undifferentiated(rate, NO_DERIVATIVE), jnp.float32)
        rule = Rule(self.b1, self.b2, self.eps, self.weight_decay)
        step, key = corrections(count, self.b1, self.b2), seed_words(self.seed)
        new, after = [], []
        for number, (path, leaf) in enumerate(paths):
            grad = checked_gradient(jax.tree_util.keystr(path), grads_of[number], leaf)
            draws = Draws(key, count.astype(jnp.uint32), number)
            own = rule if decays[number] else rule._replace(weight_decay=0.0)
            value, next_state = _advance(leaf, grad, states[number], rate, own, step, draws)
            new.append(value)
            after.append(next_state)
        if not paths:
            return params, state._replace(count=count)
        parts = zip(_Leaf._fields, zip(*after, strict=True), strict=True)
        kept = (map(as_given, part, self._flat(tree, getattr(state, name), name)) for name, part in parts)
        return tree.unflatten(new), AdamWState(count, *map(tree.unflatten, kept))

    def transformation(self) -> optax.GradientTransformationExtraArgs:
        """This rule for optax: an update is the new parameter minus the old one, in fp32.

        `optax.apply_updates` then gives the parameter of `step`, bit for bit, where the new one is between half of the
        old one and twice it, and in bf16 also where its magnitude is 2^-12 of the old one's or more. Elsewhere, for
        elements that pass zero, the sum is off by at most 2^-23 of both magnitudes. Masters in the state are exact; the
        next step takes a parameter's value for its master where such a sum, or a transformation behind this one, gave
        another than the master's.
        """

        def update(
            updates: Tree, state: AdamWState, params: Tree | None = None, **_: object
        ) -> tuple[Tree, AdamWState]:
            if params is None:
                raise ValueError("params is None; call update(grads, state, params): AdamW steps values")
            new, after = self.step(updates, state, params)
            return jax.tree.map(lambda n, p: in_fp32(n) - in_fp32(jnp.asarray(p)), new, params), after

        return optax.GradientTransformationExtraArgs(self.init, update)

    def _new(self, name: str, leaf: Array) -> _Leaf:
        wanted = jnp.dtype(self.master_dtype)
        if leaf.dtype not in DTYPES:
            raise ValueError(f"params{name} has dtype {leaf.dtype}; AdamW steps float32, bfloat16 and float16")
        if leaf.dtype == jnp.float16 and wanted == jnp.bfloat16:
            raise ValueError(f"params{name} is float16, which bfloat16 does not hold; make master_dtype float32")
        own = leaf.dtype in (jnp.dtype(jnp.float32), wanted)
        master = optax.MaskedNode() if own else in_fp32(leaf)
        if self.state_bits == 8 and leaf.ndim > 1:
            return _Leaf(zero_blocks(leaf, True), zero_blocks(leaf, False), master)
        # one array each: a program cannot be given one buffer twice, and states are donated
        return _Leaf(jnp.zeros_like(leaf, jnp.float32), jnp.zeros_like(leaf, jnp.float32), master)

    def _flat(self, tree: Any, other: Tree, name: str) -> list[Any]:
        try:
            return list(tree.flatten_up_to(other))
        except (ValueError, TypeError) as error:
            first = str(error).splitlines()[0]
            raise ValueError(f"{name} has another structure than params: {first}; give a tree like it") from None

    def _states(self, paths: list[tuple[Any, Any]], tree: Any, state: AdamWState) -> list[_Leaf]:
        if not isinstance(state, AdamWState):
            raise ValueError(
                f"state is a {type(state).__name__}; give the AdamWState that init made, or one from a file that was "
                "restored with that as its target: without a target its parts come back as dicts. The state of a chain "
                "of optax's belongs to the chain's update"
            )
        parts = (self._flat(tree, getattr(state, name), f"state.{name}") for name in _Leaf._fields)
        states = [
            _Leaf(put_together(mu, True), put_together(nu, False), master)
            for mu, nu, master in zip(*parts, strict=True)
        ]
        for (path, leaf), given in zip(paths, states, strict=True):
            name = jax.tree_util.keystr(path)
            needed = jax.eval_shape(partial(self._new, name), leaf)
            for part in _Leaf._fields:
                given_as, needed_as = _described(getattr(given, part)), _described(getattr(needed, part))
                if given_as != needed_as:
                    raise ValueError(
                        f"state.{part}{name} is {given_as}, and AdamW with master_dtype {jnp.dtype(self.master_dtype)} "
                        f"and state_bits {self.state_bits} keeps {needed_as} for this parameter; give a state that "
                        "its init made"
                    )
        return states


def adamw(
    learning_rate: LearningRate,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    weight_decay: float = 1e-2,
    mask: Tree | Callable[[Tree], Tree] | None = None,
    *,
    master_dtype: DTypeLike = jnp.float32,
    state_bits: int = 32,
    seed: int = 0,
) -> optax.GradientTransformationExtraArgs:
    """`AdamW(...).transformation()`, with optax.adamw's names: for optax.chain and the trainers that take it."""
    rule = AdamW(learning_rate, b1, b2, eps, weight_decay, mask, master_dtype, state_bits, seed)
    return rule.transformation()


def _flattened(params: Tree) -> tuple[list[tuple[Any, Any]], Any]:
    """Pairs of path and leaf, an array, and the structure."""
    paths, tree = jax.tree_util.tree_flatten_with_path(params)
    return [(path, jnp.asarray(leaf)) for path, leaf in paths], tree


def _described(part: Any) -> str:
    """The arrays of a moment or a master, in words that are equal where kinds, shapes and dtypes are."""
    if isinstance(part, optax.MaskedNode):
        return "nothing"
    arrays = [f"{jnp.result_type(leaf)} {list(jnp.shape(leaf))}" for leaf in jax.tree.leaves(part)]
    return f"{'8-bit codes ' * isinstance(part, BlockState)}{' and '.join(arrays) or 'nothing'}"


def _advance(
    leaf: Array, grad: Array, state: _Leaf, rate: Array, rule: Rule, step: Corrections, draws: Draws
) -> tuple[Array, _Leaf]:
    """One parameter and its state."""
    own = isinstance(state.master, optax.MaskedNode)
    master = leaf if own else _master_of(leaf, state.master)
    first, second = (decode(part) if isinstance(part, BlockState) else part for part in (state.mu, state.nu))
    new, first, second = advance(in_fp32(master), grad, first, second, rate, rule, step)
    coded, narrow = isinstance(state.mu, BlockState), master.dtype == jnp.bfloat16
    streams = (MASTER,) * narrow + (FIRST_MOMENT, SECOND_MOMENT) * coded
    bits = dict(zip(streams, rounding_bits(leaf, draws, streams), strict=True)) if streams else {}
    if narrow:
        new = round_stochastic(new, bits[MASTER])
    after = _Leaf(first, second, state.master if own else new)
    if coded:
        mu, nu = encode(first, True, bits[FIRST_MOMENT]), encode(second, False, bits[SECOND_MOMENT])
        after = _Leaf(mu, nu, after.master)
    return new.astype(leaf.dtype), after


def _master_of(leaf: Array, master: Array) -> Array:
    """fp32: `master` where the parameter is it, rounded to nearest, and elsewhere the parameter."""
    # by their bits: a compiler may compare the master as it was before it is rounded
    held, rounded = (lax.bitcast_convert_type(one, jnp.uint16) for one in (leaf, master.astype(leaf.dtype)))
    zeros = (held | rounded) & 0x7FFF == 0  # a sum that passes zero has a sign of its own
    return jnp.where((held == rounded) | zeros, master, in_fp32(leaf))
