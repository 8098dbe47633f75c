"""A step of AdamW in place, against octavo_numerics, bit for bit."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

import octavo_numerics
from octavo_conformance.cards import selections
from octavo_conformance.cards.needs import needs
from octavo_conformance.oracles.checks import assert_same_bits
from octavo_conformance.oracles.keeping import Surrounded
from octavo_conformance.problems.case import Case
from octavo_conformance.problems.inputs import DTYPES, Array, Rng
from octavo_registry.contract import AdamWArrays, AdamWStepRule

SHAPES = ((5, 260), (3, 131), (2, 130, 12))
RULE = octavo_numerics.AdamWRule(1e-2, (0.9, 0.99), 1e-8, 0.1)


class Training:
    """A master and its moments on the device, and the definition's. Steps from a number with several bits, a seed of
    64 bits and any number of the tensor: what random bits and corrections depend on."""

    def __init__(self, case: Case, rng: Rng, shape: tuple[int, ...], state_bits: int) -> None:
        self.case, self.rng, self.shape = case, rng, shape
        self.seed, self.tensor = int(rng.integers(2**63)) * 2 + 1, int(rng.integers(1, 2**20))
        self.master: Array = rng.standard_normal(shape).astype(DTYPES[case.dtype])
        new = octavo_numerics.init_adamw(shape, state_bits=state_bits)
        self.state = replace(new, step=int(rng.integers(2**20)))
        self.hold()
        self.run = case.plan("adamw_step", k=shape[-1], state_bits=state_bits).run

    def hold(self, rows: slice = slice(None)) -> None:
        """Copies on the device of these rows, beside which a step may write nothing."""
        self.memory, master = Surrounded(self.case), self.master[rows]
        self.array = self.memory.array(master)
        self.moments = [
            held(self.memory, part_of(moment, rows)) for moment in (self.state.exp_avg, self.state.exp_avg_sq)
        ]
        values = np.zeros(master.shape, DTYPES["bfloat16"])
        self.out = None if self.case.dtype == "bfloat16" else self.memory.array(values)

    def gradient(self) -> Array:
        """Another one, of the case's dtype."""
        return np.asarray(self.rng.standard_normal(self.shape).astype(DTYPES[self.case.dtype]))

    def step(self, grad: Array, **how: Any) -> None:
        """One step of the backend's."""
        (first, first_tops), (second, second_tops) = self.moments
        arrays = AdamWArrays(self.array, self.case.array(grad), first, second, first_tops, second_tops)
        number = self.case.array(np.array(self.state.step + 1, np.float32))
        rule = AdamWStepRule(
            RULE.lr, RULE.betas, RULE.eps, RULE.weight_decay, number, seed=self.seed, tensor=self.tensor, **how
        )
        self.run(arrays, rule, self.out)

    def define(self, grad: Array) -> None:
        """The definition's."""
        self.master, self.state = octavo_numerics.adamw_step(
            self.master, grad, self.state, RULE, seed=self.seed, tensor=self.tensor
        )

    def check(self, rows: slice = slice(None)) -> None:
        """Equal bits, of these rows of the definition's, and nothing around them is written."""
        self.memory.assert_unwritten("adamw_step")
        assert_same_bits(self.case.numpy(self.array), self.master[rows], "master")
        for moment, name in zip(self.moments, ("exp_avg", "exp_avg_sq"), strict=True):
            assert_moment(self.case, moment, part_of(getattr(self.state, name), rows), name)
        if self.out is not None:
            assert_same_bits(self.case.numpy(self.out), self.master[rows].astype(DTYPES["bfloat16"]), "values")


def part_of(moment: Any, rows: slice) -> Any:
    """These rows of a moment."""
    if isinstance(moment, octavo_numerics.BlockState):
        return replace(moment, codes=moment.codes[rows], tops=moment.tops[rows])
    return moment[rows]


def held(memory: Surrounded, moment: Any) -> tuple[Any, Any]:
    """Copies of a moment's array and its tops on the device; None where it has none."""
    if isinstance(moment, octavo_numerics.BlockState):
        return memory.array(moment.codes), memory.array(moment.tops)
    return memory.array(moment), None


def assert_moment(case: Case, arrays: tuple[Any, Any], wanted: Any, what: str) -> None:
    """Equal codes and tops, or equal fp32."""
    array, tops = arrays
    if isinstance(wanted, octavo_numerics.BlockState):
        assert_same_bits(case.numpy(array), wanted.codes, f"codes of {what}")
        assert_same_bits(case.numpy(tops), wanted.tops, f"tops of {what}")
    else:
        assert_same_bits(case.numpy(array), wanted, what)


@needs("adamw_step", selections.unquantized)
def test_steps_of_adamw(case: Case, rng: Rng) -> None:
    """Two steps of a master and a gradient of the dtype, with moments in 32 and in 8 bits, rows that end inside of a
    block; the values that are written are the master's."""
    for shape in SHAPES:
        for state_bits in (32, 8):
            training = Training(case, rng, shape, state_bits)
            for _ in range(2):
                grad = training.gradient()
                training.step(grad)
                training.define(grad)
            training.check()


@needs("adamw_step", selections.unquantized)
def test_scaled_gradients_and_steps_that_are_skipped(case: Case, rng: Rng) -> None:
    """As a GradScaler has it: `inverse_scale` multiplies the gradient in fp32, and `skip` leaves every array alone."""
    scale = case.array(np.array([2.0**-5], np.float32))
    for state_bits in (32, 8):
        training = Training(case, rng, SHAPES[0], state_bits)
        grad = training.gradient()
        training.step(grad, inverse_scale=scale, skip=case.array(np.array([False])))
        training.define(grad.astype(np.float32) * np.float32(2.0**-5))
        training.check()
        overflow = np.full_like(training.gradient(), np.inf)
        training.step(overflow, inverse_scale=scale, skip=case.array(np.array([True])))
        training.check()


@needs("adamw_step", selections.unquantized)
def test_rows_of_a_larger_tensor(case: Case, rng: Rng) -> None:
    """A rank steps its rows with the random bits of the whole."""
    for state_bits in (32, 8):
        training = Training(case, rng, SHAPES[0], state_bits)
        rows = slice(2, SHAPES[0][0])
        training.hold(rows)
        grad = training.gradient()
        training.step(np.ascontiguousarray(grad[rows]), first_row=rows.start)
        training.define(grad)
        training.check(rows)
