"""AdamW's kernel against octavo_numerics, bit for bit; and what it refuses."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from adamw_calls import BF16, Run, define, draw, planes, same, step
from devices import needs_device

import octavo_native as native
from octavo_native import layouts
from octavo_numerics import AdamWRule, AdamWState

SHAPES = (
    *((), (1,), (5,), (1027,), (3, 4), (2, 7, 131), (4, 130, 132), (1, 128), (300, 260), (2, 3, 0), (9, 1)),
    *((3, 8), (1, 264), (2, 129, 136), (300, 264), (17, 1032)),
)
"""Scalars, rows that are not whole fours, rows of whole fours and of whole eights, rows that end inside of a block,
tiles that are full and partly filled."""

MASTERS: tuple[Any, ...] = (np.float32, BF16)
GRADIENTS: tuple[Any, ...] = (np.float32, BF16, np.float16)


@needs_device
@pytest.mark.parametrize("state_bits", [32, 8])
@pytest.mark.parametrize("grad", GRADIENTS, ids=str)
@pytest.mark.parametrize("master", MASTERS, ids=str)
def test_steps_are_those_of_the_definition(master: Any, grad: Any, state_bits: int, rng: np.random.Generator) -> None:
    """Master, moments and values, of any shape; scalars from the host and from the device; other seeds and tensors."""
    for number, shape in enumerate(SHAPES):
        arrays = draw(rng, shape, master, grad, state_bits if len(shape) > 1 else 32)
        written: Any = (None, BF16, np.float16)[number % 3] if master is np.float32 else None
        rule = AdamWRule(float(rng.choice([0.0, 1e-3, 0.3])), (0.9, float(rng.choice([0.95, 0.999]))))
        run = Run(rule, int(rng.integers(1 << 62)) * 4, int(rng.integers(1 << 20)), number % 2 == 1, written)
        assert same(step(*arrays, run), define(*arrays, run)) == [], (shape, run)


@needs_device
@pytest.mark.parametrize("state_bits", [32, 8])
@pytest.mark.parametrize("master", MASTERS, ids=str)
def test_values_that_are_not_finite(master: Any, state_bits: int, rng: np.random.Generator) -> None:
    """Infinities, NaN, subnormals, the largest numbers, and an epsilon of 0 go through as IEEE has it."""
    odd = [np.inf, -np.inf, np.nan, 1e-40, -1e-45, 3.4e38, -3.4e38, 0.0, -0.0]
    for eps, columns in ((1e-8, 260), (0.0, 260), (1e-8, 264), (0.0, 264)):
        values, grad, state = draw(rng, (7, columns), master, np.float32, state_bits)
        grad = np.where(rng.random(grad.shape) < 0.02, rng.choice(odd, grad.shape), grad).astype(np.float32)
        grad[3] = rng.choice([1e-30, 1e-40, 0.0], columns)
        values = np.where(rng.random(values.shape) < 0.02, rng.choice(odd, values.shape), values).astype(master)
        run = Run(AdamWRule(eps=eps), values=BF16 if master is np.float32 else None)
        assert same(step(values, grad, state, run), define(values, grad, state, run)) == []


@needs_device
@pytest.mark.parametrize("grad", [np.float32, BF16], ids=str)
@pytest.mark.parametrize("master", MASTERS, ids=str)
def test_hyperparameters_outside_of_the_quick_range(master: Any, grad: Any, rng: np.random.Generator) -> None:
    """Rates, epsilons and gradients for which kernels do not approximate roots and quotients."""
    for lr, eps, size in (
        (1e-8, 1e-8, 1.0),
        (0.0, 1e-8, 1.0),
        (1e-3, 1e5, 1.0),
        (1e-3, 1e-8, 1e-14),
        (1e-3, 1e-8, 1e9),
    ):
        values, slopes, state = draw(rng, (9, 264), master, grad, 8)
        slopes = (slopes.astype(np.float32) * np.float32(size)).astype(grad)
        run = Run(AdamWRule(lr, (0.9, 0.999), eps))
        assert same(step(values, slopes, state, run), define(values, slopes, state, run)) == [], (lr, eps, size)


def _update_of_one(first: np.ndarray[Any, Any], second: np.ndarray[Any, Any], eps: float) -> Any:
    """-first / (sqrt(second) + eps), by a step whose other factors are 1."""
    zeros, rule = np.zeros_like(first), AdamWRule(1.0, (0.5, 0.5), eps, 0.0)
    return step(zeros, zeros, AdamWState(1 << 20, 2 * first, 2 * second), Run(rule)).master


@needs_device
def test_every_root_is_exact(rng: np.random.Generator) -> None:
    """All numbers from 1 to below 4, in any two binades: a root that was off would not be one part of itself."""
    squares = np.arange(0x3F800000, 0x40800000, dtype=np.uint32).view(np.float32)
    for exponent in (int(2 * rng.integers(-45, 9)), 0):
        second = np.ldexp(squares, exponent).reshape(-1, 4096)
        assert np.array_equal(_update_of_one(np.sqrt(second), second, 0.0), np.full_like(second, -1))


@needs_device
def test_quotients_by_the_divisor_that_is_hardest_to_invert(rng: np.random.Generator) -> None:
    """All mantissas over the one without a zero bit, and over a random one."""
    first = np.arange(0x3F800000, 0x40000000, dtype=np.uint32).view(np.float32).reshape(-1, 4096)
    for divisor in (np.float32(2 - 2**-23), np.float32(rng.uniform(1, 2))):
        found = _update_of_one(first, np.full_like(first, 1e-25), float(divisor))
        assert np.array_equal(found, -(first / divisor))


@needs_device
@pytest.mark.parametrize("state_bits", [32, 8])
def test_a_skipped_step_changes_nothing_and_gradients_are_unscaled(state_bits: int, rng: np.random.Generator) -> None:
    """What torch.amp.GradScaler asks for, read on the device."""
    arrays = draw(rng, (6, int(rng.choice([300, 304]))), np.float32, np.float32, state_bits)
    for run in (Run(skip=True), Run(skip=False, inverse_scale=2.0**-9 * 1.25, on_device=True)):
        assert same(step(*arrays, run), define(*arrays, run)) == []


@needs_device
@pytest.mark.parametrize("columns", [140, 144])
def test_rows_of_a_larger_tensor_get_its_bits(columns: int, rng: np.random.Generator) -> None:
    """A rank steps its part with the bits of the whole."""
    master, grad, state = draw(rng, (12, columns), BF16, np.float32, 8)
    whole = define(master, grad, state, Run())
    moments = [
        replace(moment, codes=moment.codes[5:], tops=moment.tops[5:]) for moment in (state.exp_avg, state.exp_avg_sq)
    ]
    part = step(master[5:], grad[5:], replace(state, exp_avg=moments[0], exp_avg_sq=moments[1]), Run(), first_row=5)
    assert np.array_equal(part.master.view(np.uint16), whole.master[5:].view(np.uint16))
    assert np.array_equal(part.state.exp_avg_sq.codes, whole.state.exp_avg_sq.codes[5:])


@needs_device
@pytest.mark.parametrize("layout", [layouts.PLAIN, layouts.NATIVE_COLUMNS])
@pytest.mark.parametrize("state_bits", [32, 8])
@pytest.mark.parametrize("master", MASTERS, ids=str)
def test_codes_are_those_of_the_quantizer(master: Any, state_bits: int, layout: str, rng: np.random.Generator) -> None:
    """Both planes and both scales, of matrices with partial tiles, a zero one, and one with an infinity."""
    for shape in ((1, 128, 128), (3, 130, 132), (2, 256, 260), (1, 16, 4), (3, 130, 136), (2, 256, 264), (1, 16, 8)):
        values, grad, state = draw(rng, shape, master, np.float32, state_bits)
        if shape[0] == 3:
            values[1], grad[1] = 0, 0
            grad[2, 5, 7] = np.inf
        wanted, held = define(values, grad, state, Run()), planes(shape, layout)
        assert same(step(values, grad, state, Run(), held.arguments), wanted) == []
        assert held.differs(wanted.master) == []


def _refused(**changed: Any) -> None:
    arrays = {"shape": (2, 4), "master": (64, 0), "grad": (64, 0), "moments": (64, 64), **changed.pop("arrays", {})}
    rule = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.1, **changed.pop("rule", {})}
    native.adamw_step(
        cuda=True, arrays=native.AdamWArrays(**arrays), rule=native.AdamWRule(**rule),
        draws=native.AdamWDraws(**changed.pop("draws", {})), **changed,
    )  # fmt: skip


@pytest.mark.skipif(not native.HAS_CUDA, reason="no CUDA kernels, whose checks come first")
@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"rule": {"lr": float("inf")}}, "lr, weight_decay or eps"),
        ({"rule": {"betas": (0.9, 1.5)}}, "a beta is outside"),
        ({"draws": {"tensor": 1 << 29}}, "tensor is past"),
        ({"draws": {"step": 0}}, "step is less than 1"),
        ({"arrays": {"master": (64, 1)}}, "master_dtype is not f32 or bf16"),
        ({"arrays": {"grad": (66, 0)}}, "master or grad is null or not aligned"),
        ({"arrays": {"tops": (64, 0)}}, "give both or none"),
        ({"arrays": {"values": (64, 0)}}, "values_dtype is not f16 or bf16"),
    ],
)
def test_what_does_not_fit_is_refused(changed: dict[str, Any], message: str) -> None:
    """Before anything is launched, in a sentence."""
    with pytest.raises(ValueError, match=message):
        _refused(**changed)


def test_there_is_no_kernel_for_cpus() -> None:
    """The front end composes it there."""
    with pytest.raises(ValueError, match="no kernel for CPUs"):
        native.adamw_step(
            cuda=False, arrays=native.AdamWArrays(shape=(0, 4), master=(0, 0), grad=(0, 0), moments=(0, 0)),
            rule=native.AdamWRule(lr=0.1, betas=(0.9, 0.9), eps=0.0, weight_decay=0.0), draws=native.AdamWDraws(),
        )  # fmt: skip
