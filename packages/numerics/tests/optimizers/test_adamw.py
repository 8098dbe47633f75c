"""AdamW's step: within its bound of exact arithmetic, stochastic rounding without bias, 8-bit moments that follow."""

from __future__ import annotations

import secrets
from dataclasses import replace
from fractions import Fraction
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from octavo_numerics import (
    AdamWRule,
    AdamWState,
    BlockState,
    adamw_bound,
    adamw_step,
    bias_correction,
    block_state_bound,
    decode_blocks,
    encode_blocks,
    init_adamw,
    round_stochastic,
    rounding_bits,
)
from octavo_numerics.philox import philox4x32, split_seed

Array = np.ndarray[Any, Any]
FIVE_SIGMA = 5


@pytest.fixture
def rng() -> np.random.Generator:
    seed = secrets.randbits(32)
    print(f"seed {seed}")
    return np.random.default_rng(seed)


def wide_values(rng: np.random.Generator, *shape: int) -> Array:
    """fp32 of many magnitudes and both signs."""
    return (rng.standard_normal(shape) * np.exp2(rng.uniform(-12, 4, shape))).astype(np.float32)


def exact(master: Array, grad: Array, state: AdamWState, rule: AdamWRule) -> Array:
    """The step in float64, whose own error is 2^-29 of the bound."""
    p, g, m, v = (np.asarray(a, np.float64) for a in (master, grad, state.exp_avg, state.exp_avg_sq))
    (b1, b2), t = rule.betas, state.step + 1
    m, v = b1 * m + (1 - b1) * g, b2 * v + (1 - b2) * g * g
    update = m / (1 - b1**t) / (np.sqrt(v / (1 - b2**t)) + rule.eps)
    return p * (1 - rule.lr * rule.weight_decay) - rule.lr * update


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16, np.float16])
def test_a_step_is_within_its_bound_of_exact_arithmetic(dtype: Any, rng: np.random.Generator) -> None:
    """Early and late steps, large and small learning rates, gradients of each dtype."""
    reached = 0.0
    for step in (0, 1, 6, 1022, 99_999):
        rule = AdamWRule(10.0 ** rng.uniform(-6, -1), (0.9, 0.999), 1e-8, 0.1)
        master, grad = wide_values(rng, 4, 33), wide_values(rng, 4, 33).astype(dtype)
        state = AdamWState(step, wide_values(rng, 4, 33), np.square(wide_values(rng, 4, 33)))
        if step == 0:
            state = init_adamw(master.shape)
        new, after = adamw_step(master, grad, state, rule)
        error = np.abs(new.astype(np.float64) - exact(master, grad.astype(np.float32), state, rule))
        bound = adamw_bound(master, grad, state, rule)
        assert (error <= bound).all()
        reached = max(reached, float((error / bound).max()))
        assert after.step == step + 1
    assert reached > 0.01  # a bound that nothing comes near to would see nothing


@pytest.mark.parametrize("beta", [0.9, 0.95, 0.98, 0.999, 0.9999])
def test_the_bias_correction_is_that_of_exact_powers(beta: float, rng: np.random.Generator) -> None:
    """Within 4 * 2^-24 for each set bit of the step, of rational arithmetic."""
    for step in (1, 2, 3, 255, 1000, *rng.integers(1, 3000, 10)):
        true = 1 - Fraction(beta) ** int(step)
        error = abs(Fraction(float(bias_correction(beta, int(step)))) / true - 1)
        assert error <= Fraction(4 * int(step).bit_count(), 2**24)
    assert bias_correction(beta, 1 << 24) == bias_correction(beta, (1 << 24) - 1) == 1


def test_bits_depend_on_position_seed_step_tensor_and_stream(rng: np.random.Generator) -> None:
    """Element (r, c) takes its word of the counter (r, c // 8, step, 2^31 + 4 tensor + stream), whatever the shape."""
    seed, step, tensor = int(rng.integers(1 << 62)), int(rng.integers(1, 1 << 20)), int(rng.integers(1 << 20))
    bits = rounding_bits((3, 5, 21), 2, seed=seed, step=step, tensor=tensor)
    for r, c in ((0, 0), (7, 9), (14, 20), (3, 15)):
        counter = tuple(np.array([word], np.uint32) for word in (r, c // 8, step, (1 << 31) + 4 * tensor + 2))
        word = int(philox4x32(counter, split_seed(seed))[(c % 8) // 2][0])  # type: ignore[arg-type]
        assert bits.reshape(15, 21)[r, c] == (word >> 16 if c % 2 else word & 0xFFFF)
    how = {"seed": seed, "step": step, "tensor": tensor}
    for other in ({**how, "seed": seed + 1}, {**how, "step": step + 1}, {**how, "tensor": tensor + 1}):
        assert (rounding_bits((3, 5, 21), 2, **other) != bits).any()
    assert (rounding_bits((3, 5, 21), 1, **how) != bits).any()
    assert rounding_bits((), 0, **how) == rounding_bits((1, 1), 0, **how)[0, 0]
    with pytest.raises(ValueError, match="tensor is 536870912"):
        rounding_bits((1,), 0, seed=0, step=1, tensor=1 << 29)


def test_stochastic_rounding_to_bf16_is_exhaustively_unbiased(rng: np.random.Generator) -> None:
    """Over all 2^16 draws the mean is the value itself, of both signs and subnormals; what is bf16 stays."""
    draws = np.arange(1 << 16, dtype=np.uint16)
    for value in (*wide_values(rng, 6), np.float32(1e-40), np.float32(-3.3e38)):
        rounded = round_stochastic(np.full(draws.shape, value, np.float32), draws).astype(np.float64)
        assert rounded.mean() == np.float64(value)
        assert len(np.unique(rounded)) == 2
    kept = wide_values(rng, 50).astype(ml_dtypes.bfloat16)
    bits = rng.integers(0, 1 << 16, 50, dtype=np.uint16)
    assert (round_stochastic(kept.astype(np.float32), bits) == kept).all()
    odd = np.array([np.inf, -np.inf, np.nan], np.float32)
    odd.view(np.uint32)[2] = 0xFFFFFFFF  # a carry would make it 0
    result = round_stochastic(odd, np.full(3, 0xFFFF, np.uint16))
    assert result[0] == np.inf
    assert result[1] == -np.inf
    assert result.view(np.uint16)[2] == 0x7FC0


def test_a_bf16_master_moves_by_learning_rates_that_it_cannot_hold(rng: np.random.Generator) -> None:
    """Steps of 2^-6 of half a bf16 step: nearest rounding stays for ever, and this one arrives, within five sigma.

    Each step moves an element by a whole step u of bf16 with probability p = d / u, so n steps have mean n d and
    variance at most n p (1 - p) u^2.
    """
    size, steps, spacing = 4096, 64, 2.0**-8  # bf16 below 1, where all masters stay
    rule = AdamWRule(spacing / 128, (0.0, 0.0), 0.0, 0.0)  # a step of exactly lr against the gradient's sign
    master = np.full((32, size // 32), 0.75, ml_dtypes.bfloat16)
    state, seed = init_adamw(master.shape), int(rng.integers(1 << 62))
    for _ in range(steps):
        before = master
        master, state = adamw_step(master, np.ones(master.shape, np.float32), state, rule, seed=seed)
        assert (np.abs(before.astype(np.float64) - master.astype(np.float64)) <= spacing).all()
    moved = 0.75 - master.astype(np.float64)
    p = rule.lr / spacing
    sigma = spacing * np.sqrt(steps * p * (1 - p) / size)
    assert abs(moved.mean() - steps * rule.lr) <= FIVE_SIGMA * sigma
    assert np.unique(moved).size > 1


@pytest.mark.parametrize("signed", [True, False])
def test_8_bit_moments_are_unbiased_within_a_step_of_the_code(signed: bool, rng: np.random.Generator) -> None:
    """The mean over seeds is the value; each is within the bound; tops are exact; partial last blocks."""
    values = wide_values(rng, 3, 200)
    values = values if signed else np.square(values)
    bound, repeats, total = block_state_bound(values, signed), 400, np.zeros(values.shape)
    for seed in range(repeats):
        state = encode_blocks(values, signed, rounding_bits(values.shape, 1, seed=seed, step=1, tensor=0))
        decoded = decode_blocks(state).astype(np.float64)
        assert (np.abs(decoded - values) <= bound).all()
        total += decoded - values
    # a bounded variable's deviation is at most its range / 2; 600 elements are looked at, so six sigma
    off = np.abs(total / repeats) - (6 * (bound / 2) / np.sqrt(repeats) + bound * 2**-16)
    held = np.abs(values) / 8 == bound  # others are below the block's least code
    assert held.mean() > 0.5
    assert (off[held] <= 0).all()
    again = encode_blocks(decode_blocks(state), signed, rounding_bits(values.shape, 1, seed=9, step=1, tensor=0))
    assert (decode_blocks(again) == decode_blocks(state)).all()  # what is stored is kept by a step that adds nothing


@pytest.mark.parametrize("signed", [True, False])
def test_the_bound_of_8_bit_moments_holds_below_the_least_code(signed: bool) -> None:
    """Of a largest value at each place between two powers of two; a positive second moment reaches it."""
    reached = 0.0
    for largest in np.nextafter(np.linspace(1, 2, 65, dtype=np.float32), np.float32(4)):
        for small in (2.0**-60, 2.0**-16.5, 2.0**-32.5):
            values = np.array([[largest, small]], np.float32)
            for draw in (0, 0xFFFF):
                decoded = decode_blocks(encode_blocks(values, signed, np.full(values.shape, draw, np.uint16)))
                error, bound = np.abs(decoded.astype(np.float64) - values), block_state_bound(values, signed)
                assert (error <= bound).all()
                reached = max(reached, float((error / bound)[0, 1]))
    assert signed or reached > 0.999


def test_small_and_special_values_of_8_bit_moments() -> None:
    """A positive second moment is never 0, a tiny first one is; zero stays; a block that overflows is NaN alone."""
    values = np.zeros((1, 300), np.float32)
    values[0, :3] = 1.0, 1e-30, 3.0e-5
    values[0, 200] = np.inf
    never = np.zeros(values.shape, np.uint16)
    second, first = (decode_blocks(encode_blocks(values, signed, never)) for signed in (False, True))
    assert 0 < second[0, 1] < 2.0**-31
    assert first[0, 1] == 0
    assert first[0, 2] == second[0, 2] > 0
    assert (second[0, 3:128] == 0).all()
    assert np.isnan(second[0, 128:256]).all()
    assert (second[0, 256:] == 0).all()
    minus = encode_blocks(-values[:, :128], True, never[:, :128])
    assert (decode_blocks(minus) == -first[:, :128]).all()
    largest = np.full((1, 2), np.finfo(np.float32).max, np.float32)
    assert np.isfinite(decode_blocks(encode_blocks(largest, False, never[:, :2]))).all()


def test_8_bit_second_moments_follow_gradients_that_shrink(rng: np.random.Generator) -> None:
    """1 000 steps after gradients shrank to a hundredth, the mean of v is that of fp32 states; nearest E4M3 would stay.

    A v stored with a rounding error of at most v / 8 in each step has, in equilibrium, a variance of at most
    (1 - beta2) v * v / 8 / (2 (1 - beta2)) = v^2 / 16, so the mean over n elements deviates by at most v / 4 / sqrt(n).
    """
    rule, shape = AdamWRule(0.0, (0.9, 0.99), 1e-8, 0.0), (8, 128)
    master = np.zeros(shape, np.float32)
    wide, coded = init_adamw(shape), init_adamw(shape, state_bits=8)
    for step in range(1200):
        grad = rng.standard_normal(shape).astype(np.float32) * np.float32(1.0 if step < 200 else 0.01)
        _, wide = adamw_step(master, grad, wide, rule)
        _, coded = adamw_step(master, grad, coded, rule, seed=7)
    assert isinstance(coded.exp_avg_sq, BlockState)
    assert isinstance(wide.exp_avg_sq, np.ndarray)
    ratio = decode_blocks(coded.exp_avg_sq).astype(np.float64).mean() / wide.exp_avg_sq.astype(np.float64).mean()
    assert abs(ratio - 1) <= FIVE_SIGMA * 0.25 / np.sqrt(master.size)


def test_a_resumed_run_has_the_same_bits(rng: np.random.Generator) -> None:
    """Bits of step t need only the state after step t - 1 and the seed."""
    shape, rule = (5, 130), AdamWRule()
    master, state = wide_values(rng, *shape).astype(ml_dtypes.bfloat16), init_adamw(shape, state_bits=8)
    for _ in range(3):
        grad = wide_values(rng, *shape)
        once, twice = (adamw_step(master, grad, replace(state), rule, seed=1, tensor=2) for _ in range(2))
        assert (once[0] == twice[0]).all()
        assert (once[1].exp_avg.codes == twice[1].exp_avg.codes).all()  # type: ignore[union-attr]
        other, _ = adamw_step(master, grad, state, rule, seed=1, tensor=3)
        assert (other != once[0]).any()
        master, state = once


@pytest.mark.parametrize("shape", [(), (1,), (0, 3), (3, 0), (2, 1, 129)])
@pytest.mark.parametrize("state_bits", [32, 8])
def test_any_shape(shape: tuple[int, ...], state_bits: int) -> None:
    """Scalars, vectors, arrays without elements, and a last block of one element."""
    for dtype in (np.float32, ml_dtypes.bfloat16):
        master = np.ones(shape, dtype)
        new, state = adamw_step(master, master, init_adamw(shape, state_bits=state_bits), AdamWRule(lr=0.5), seed=3)
        moment = state.exp_avg.codes if isinstance(state.exp_avg, BlockState) else state.exp_avg
        assert new.shape == moment.shape == shape
        assert new.dtype == dtype
        assert (np.abs(new.astype(np.float32) - np.float32(0.495)) < 2.0**-8).all()


def test_what_does_not_fit_is_refused() -> None:
    """With the name, what was given, and what is needed."""
    master, state = np.zeros((2, 3), np.float32), init_adamw((2, 3))
    for changed, message in (
        ({"master": master.astype(np.float64)}, "master has dtype float64; give float32 or bfloat16"),
        ({"master": master.astype(np.float16)}, "master has dtype float16"),
        ({"grad": np.zeros((3, 2), np.float32)}, r"grad is float32 \[3, 2\] and the master \[2, 3\]"),
        ({"grad": np.zeros((2, 3), np.int8)}, "grad is int8"),
        ({"state": init_adamw((2, 4))}, r"state has moments of shapes \[\[2, 4\], \[2, 4\]\]"),
        ({"state": init_adamw((2, 3), state_bits=8)}, "seed is None and the moments are in 8 bits"),
        ({"master": master.astype(ml_dtypes.bfloat16)}, "seed is None and the master is bfloat16"),
        ({"master": master.astype(ml_dtypes.bfloat16), "seed": 1.5}, "seed=1.5 is not an integer"),
    ):
        given: dict[str, Any] = {"master": master, "grad": master, "state": state, "rule": AdamWRule(), **changed}
        with pytest.raises(ValueError, match=message):
            adamw_step(**given)
    for rule, message in (
        ({"lr": -1.0}, "lr is -1.0"),
        ({"eps": float("nan")}, "eps is nan"),
        ({"weight_decay": float("inf")}, "weight_decay is inf"),
        ({"betas": (0.9, 1.0)}, r"betas\[1\] is 1.0"),
    ):
        with pytest.raises(ValueError, match=message):
            AdamWRule(**rule)
    with pytest.raises(ValueError, match="state_bits is 16; give 32 or 8"):
        init_adamw((2,), state_bits=16)
