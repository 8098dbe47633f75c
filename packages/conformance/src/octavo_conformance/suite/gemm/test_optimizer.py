"""A step of AdamW in place, against octavo_numerics, bit for bit."""

from __future__ import annotations

from typing import Any

import numpy as np

import octavo_numerics
from octavo_conformance.cards import variants
from octavo_conformance.cards.needs import needs
from octavo_conformance.oracles.checks import assert_same_bits
from octavo_conformance.problems.case import Case
from octavo_conformance.problems.inputs import DTYPES, Array, Rng
from octavo_registry.contract import AdamWArrays, AdamWStepRule

SHAPES = ((5, 260), (3, 131), (2, 130, 12))
SEED, TENSOR = 11, 3


def held(case: Case, moment: Any) -> tuple[Any, Any]:
    """A moment's array and its tops on the device; None where it has none."""
    if isinstance(moment, octavo_numerics.BlockState):
        return case.array(moment.codes), case.array(moment.tops)
    return case.array(moment), None


def assert_moment(case: Case, arrays: tuple[Any, Any], wanted: Any, what: str) -> None:
    """Equal codes and tops, or equal fp32."""
    array, tops = arrays
    if isinstance(wanted, octavo_numerics.BlockState):
        assert_same_bits(case.numpy(array), wanted.codes, f"codes of {what}")
        assert_same_bits(case.numpy(tops), wanted.tops, f"tops of {what}")
    else:
        assert_same_bits(case.numpy(array), wanted, what)


@needs("adamw_step", variants.unquantized)
def test_steps_of_adamw(case: Case, rng: Rng) -> None:
    """Two steps of a master and a gradient of the dtype, with moments in 32 and in 8 bits, rows that end inside of a
    block; the values that are written are the master's."""
    rule = octavo_numerics.AdamWRule(1e-2, (0.9, 0.99), 1e-8, 0.1)
    for shape in SHAPES:
        for state_bits in (32, 8):
            run = case.plan("adamw_step", k=shape[-1], state_bits=state_bits).run
            master: Array = rng.standard_normal(shape).astype(DTYPES[case.dtype])
            state = octavo_numerics.init_adamw(shape, state_bits=state_bits)
            array, moments = case.array(master), (held(case, state.exp_avg), held(case, state.exp_avg_sq))
            out = None if case.dtype == "bfloat16" else case.array(np.zeros(shape, DTYPES["bfloat16"]))
            for step in (1, 2):
                grad: Array = rng.standard_normal(shape).astype(DTYPES[case.dtype])
                (first, first_tops), (second, second_tops) = moments
                arrays = AdamWArrays(array, case.array(grad), first, second, first_tops, second_tops)
                number = case.array(np.array(step, np.float32))
                how = AdamWStepRule(1e-2, (0.9, 0.99), 1e-8, 0.1, number, seed=SEED, tensor=TENSOR)
                run(arrays, how, out)
                master, state = octavo_numerics.adamw_step(master, grad, state, rule, seed=SEED, tensor=TENSOR)
            assert_same_bits(case.numpy(array), master, "master")
            assert_moment(case, moments[0], state.exp_avg, "exp_avg")
            assert_moment(case, moments[1], state.exp_avg_sq, "exp_avg_sq")
            if out is not None:
                assert_same_bits(case.numpy(out), master.astype(DTYPES["bfloat16"]), "values")
