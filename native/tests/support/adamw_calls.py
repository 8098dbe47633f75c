"""AdamW's kernel on numpy arrays, and octavo_numerics on the same. Not tests."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
from router_calls import Held, hold, poisoned

import octavo_native as native
import octavo_numerics as numerics
from octavo import BlockScaling
from octavo_native import layouts
from octavo_numerics import AdamWRule, AdamWState
from octavo_numerics.optimizers.block_state import BlockState

Array = npt.NDArray[Any]
BF16 = np.dtype(ml_dtypes.bfloat16)


@dataclass(frozen=True)
class Run:
    """What steps are made of: the rule, and what random bits depend on.

    on_device      the learning rate and the step's number are read on the device
    values         dtype of the copy that is written from the master; None: none
    inverse_scale  of the gradient
    skip           what is said of skipping; None: nothing
    """

    rule: AdamWRule = field(default_factory=AdamWRule)
    seed: int = 7
    tensor: int = 3
    on_device: bool = False
    values: npt.DTypeLike | None = None
    inverse_scale: float | None = None
    skip: bool | None = None


@dataclass(eq=False)
class Made:
    """Arrays after a step."""

    master: Array
    state: AdamWState
    values: Array | None


def draw_state(rng: np.random.Generator, shape: tuple[int, ...], step: int, state_bits: int) -> AdamWState:
    """A state in the middle of a run, of moments over many binades, some of them zero."""
    zero = rng.random(shape) < 0.1
    first = np.where(zero, 0, rng.standard_normal(shape) * 2.0 ** rng.integers(-20, 3, shape)).astype(np.float32)
    second = np.where(zero, 0, np.abs(first) * 2.0 ** rng.integers(-30, 3, shape)).astype(np.float32)
    if state_bits == 32:
        return AdamWState(step, first, second)
    bits = [rng.integers(0, 1 << 16, shape).astype(np.uint16) for _ in range(2)]
    return AdamWState(
        step, numerics.encode_blocks(first, True, bits[0]), numerics.encode_blocks(second, False, bits[1])
    )


def draw(rng: np.random.Generator, shape: tuple[int, ...], master: Any, grad: Any, state_bits: int) -> tuple[Any, ...]:
    """A master, a gradient over many binades with zeros of both signs, and a state in the middle of a run."""
    values = rng.standard_normal(shape).astype(np.float32)
    slopes = rng.standard_normal(shape) * 2.0 ** rng.integers(-24, 4, shape)
    slopes = np.where(rng.random(shape) < 0.1, rng.choice([0.0, -0.0], shape), slopes)
    return values.astype(master), slopes.astype(grad), draw_state(rng, shape, int(rng.integers(0, 5000)), state_bits)


def _dtype(array: npt.DTypeLike) -> int:
    return native.DTYPES[np.dtype(array).name]


def _held(moment: Array | BlockState) -> tuple[Held, Held | None]:
    if isinstance(moment, BlockState):
        return hold("cuda", moment.codes), hold("cuda", moment.tops)
    return hold("cuda", moment), None


def _address(held: Held | None) -> int:
    return 0 if held is None else held.address


def step(master: Array, grad: Array, state: AdamWState, run: Run, codes: Any = None, **others: Any) -> Made:
    """One step by the kernel on a GPU; `codes`: AdamWCodes, which are written, too; `others`: of the call."""
    columns = master.shape[-1] if master.shape else 1
    held_master, held_grad = hold("cuda", master), hold("cuda", grad)
    (first, first_tops), (second, second_tops) = (_held(moment) for moment in (state.exp_avg, state.exp_avg_sq))
    values = None if run.values is None else poisoned("cuda", master.shape, run.values)
    number = hold("cuda", np.array(state.step + 1, np.float32))
    rate = hold("cuda", np.array(run.rule.lr, np.float32))
    scale = None if run.inverse_scale is None else hold("cuda", np.array(run.inverse_scale, np.float32))
    skip = None if run.skip is None else hold("cuda", np.array(run.skip))
    arrays = native.AdamWArrays(
        shape=(master.size // columns if columns else 0, columns),
        master=(held_master.address, _dtype(master.dtype)),
        grad=(held_grad.address, _dtype(grad.dtype)),
        moments=(first.address, second.address),
        tops=(_address(first_tops), _address(second_tops)),
        values=(_address(values), _dtype(run.values or BF16)),
    )
    rule = native.AdamWRule(
        lr=0.0 if run.on_device else run.rule.lr, betas=run.rule.betas, eps=run.rule.eps,
        weight_decay=run.rule.weight_decay, lr_device=rate.address if run.on_device else 0,
    )  # fmt: skip
    draws = native.AdamWDraws(
        seed=run.seed % (1 << 64), tensor=run.tensor, step=1 if run.on_device else state.step + 1,
        step_device=number.address if run.on_device else 0, **others,
    )  # fmt: skip
    native.adamw_step(
        cuda=True, arrays=arrays, rule=rule, draws=draws, codes=codes, inverse_scale=_address(scale),
        skip=_address(skip),
    )  # fmt: skip
    moments = [
        held.read() if tops is None else BlockState(held.read(), tops.read(), signed)
        for held, tops, signed in ((first, first_tops, True), (second, second_tops, False))
    ]
    read = None if values is None else values.read()
    return Made(held_master.read(), AdamWState(state.step + 1, *moments), read)


@dataclass(eq=False)
class Planes:
    """Where a step writes codes of stacked matrices, and what octavo_numerics has there."""

    shape: tuple[int, int, int]
    layout: str
    codes: tuple[Held, Held]
    scales: tuple[Held, Held]

    @property
    def arguments(self) -> Any:
        """For the call."""
        spec = BlockScaling().quantizer("w")
        return native.AdamWCodes(
            matrix_rows=self.shape[1],
            rowwise=native.PlaneArgs(self.codes[0].address, self.scales[0].address),
            columnwise=native.PlaneArgs(
                self.codes[1].address, self.scales[1].address, 0, int(self.layout != layouts.PLAIN)
            ),
            amax_epsilon=spec.amax_epsilon,
            power_of_two=spec.power_of_two,
        )

    def differs(self, master: Array) -> list[str]:
        """Names of what is not octavo_numerics' codes of this master."""
        expected = numerics.quantize(cast(master, BF16), BlockScaling().quantizer("w"))
        rows = expected.rowwise.view(np.uint8).reshape(self.shape)
        wanted = rows, rows if self.layout == layouts.PLAIN else panels(rows)
        scale = expected.rowwise_scale.view(np.uint32)
        found = [f"codes {i}" for i in range(2) if not np.array_equal(self.codes[i].read(), wanted[i])]
        return found + [
            f"scales {i}" for i in range(2) if not np.array_equal(self.scales[i].read().view(np.uint32), scale)
        ]


def planes(shape: tuple[int, int, int], layout: str) -> Planes:
    """Poisoned ones of weights [G, N, C], the columnwise one in this layout."""
    groups, height, columns = shape
    sides = {"rows": groups * height, "cols": columns, "matrix_rows": height, "groups": groups}
    of_columns = layouts.codes_shape(
        format="e4m3", scaling="block", square=True, hadamard=False, layout=layout, direction="columnwise", **sides
    )
    blocks = groups, layouts.ceil_div(height, 128), layouts.ceil_div(columns, 128)
    codes = poisoned("cuda", shape, np.uint8), poisoned("cuda", of_columns, np.uint8)
    return Planes(shape, layout, codes, (poisoned("cuda", blocks, np.float32), poisoned("cuda", blocks, np.float32)))


def panels(rows: Array) -> Array:
    """[G, N, C] codes as panels [P, C, 128], zeros past the last row of a matrix."""
    groups, height, columns = rows.shape
    each = layouts.ceil_div(height, 128)
    padded = np.zeros((groups, each * 128, columns), np.uint8)
    padded[:, :height] = rows
    whole: Array = padded.reshape(groups * each, 128, columns).transpose(0, 2, 1)
    return whole


def define(master: Array, grad: Array, state: AdamWState, run: Run) -> Made:
    """The same step by octavo_numerics."""
    if run.skip:
        return Made(master, replace(state, step=state.step + 1), None)
    if run.inverse_scale is not None:
        grad = grad.astype(np.float32) * np.float32(run.inverse_scale)
    new, made = numerics.adamw_step(master, grad, state, run.rule, seed=run.seed, tensor=run.tensor)
    return Made(new, made, None if run.values is None else cast(new, run.values))


def cast(values: Array, dtype: npt.DTypeLike) -> Array:
    """To nearest, as numpy has it."""
    with np.errstate(all="ignore"):
        rounded: Array = values.astype(np.float32).astype(dtype)
    return rounded


def same_values(one: Array, other: Array) -> bool:
    """Equal bits, but for NaNs, which are equal to each other."""
    wide = [array.astype(np.float32) for array in (one, other)]
    nan = [np.isnan(array) for array in wide]
    bits = [np.where(empty, 0, array.view(np.uint32)) for array, empty in zip(wide, nan, strict=True)]
    return one.dtype == other.dtype and np.array_equal(*nan) and np.array_equal(*bits)


def same(one: Made, other: Made) -> list[str]:
    """Names of what differs."""
    found = [] if same_values(one.master, other.master) else ["master"]
    for name in ("exp_avg", "exp_avg_sq"):
        first, second = (getattr(made.state, name) for made in (one, other))
        if isinstance(first, BlockState):
            equal = np.array_equal(first.tops, second.tops) and np.array_equal(first.codes, second.codes)
        else:
            equal = same_values(first, second)
        found += [] if equal else [name]
    if other.values is not None and not same_values(one.values, other.values):
        found.append("values")
    return found
