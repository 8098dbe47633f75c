"""One step of AdamW, bit for bit.

Source: Loshchilov and Hutter, "Decoupled Weight Decay Regularization" (arXiv 1711.05101), algorithm 2, with epsilon
outside of the root and the decay multiplied by the learning rate, as in torch.optim.AdamW. The order of operations is
Octavo's: every product, sum, quotient and root is rounded to fp32, none is contracted, and no scalar is divided by
in an operation on arrays. IEEE arithmetic then has one result on a CPU, on a GPU, in numpy, in torch and in XLA.
"""

from __future__ import annotations

import math
import operator
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from octavo_numerics.casts import F32
from octavo_numerics.checks import check_subnormals, to_fp32
from octavo_numerics.optimizers.block_state import BlockState, decode_blocks, encode_blocks, zero_blocks
from octavo_numerics.optimizers.draws import FIRST_MOMENT, MASTER, SECOND_MOMENT, round_stochastic, rounding_bits

_MASTER_DTYPES = (np.dtype(np.float32), np.dtype(ml_dtypes.bfloat16))
_GRADIENT_DTYPES = (*_MASTER_DTYPES, np.dtype(np.float16))
_STEP_BITS = 24
_ONE = np.float32(1)


@dataclass(frozen=True, slots=True)
class AdamWRule:
    """Hyperparameters: the learning rate, decay rates of the moments, epsilon, decoupled weight decay.

    Raises ValueError unless all are finite, betas in [0, 1) and the others not negative.
    """

    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 1e-2

    def __post_init__(self) -> None:
        for name in ("lr", "eps", "weight_decay"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"{name} is {getattr(self, name)}; give a finite number of at least 0")
        for number, beta in enumerate(self.betas):
            if not 0 <= beta < 1:
                raise ValueError(f"betas[{number}] is {beta}; give a number from 0 to below 1")


@dataclass(frozen=True, slots=True, eq=False)
class AdamWState:
    """What AdamW keeps of a parameter: finished steps, and the moments, fp32 or in 8 bits."""

    step: int
    exp_avg: F32 | BlockState
    exp_avg_sq: F32 | BlockState


@dataclass(frozen=True, slots=True)
class AdamWScalars:
    """fp32 factors of a step. `first` and `second` are pairs: the factors of the old moment and of what is added."""

    decay: np.float32
    first: tuple[np.float32, np.float32]
    second: tuple[np.float32, np.float32]
    step_size: np.float32
    root_scale: np.float32
    eps: np.float32


def init_adamw(shape: tuple[int, ...], *, state_bits: int = 32) -> AdamWState:
    """The state before the first step, moments zero; ValueError for state_bits other than 32 and 8."""
    if state_bits == 8:
        return AdamWState(0, zero_blocks(shape, True), zero_blocks(shape, False))
    if state_bits != 32:
        raise ValueError(f"state_bits is {state_bits!r}; give 32 or 8")
    return AdamWState(0, np.zeros(shape, np.float32), np.zeros(shape, np.float32))


def bias_correction(beta: float, step: int) -> np.float32:
    """1 - beta^step in fp32 arithmetic alone, which every framework has.

    With the constants Q_i = fp32(1 - beta^(2^i)), powers by squaring in float64, and q = 0: for each bit i of
    min(step, 2^24 - 1) that is set, from the least, q = fl(q + fl(fl(1 - q) Q_i)). All terms are positive, so the
    relative error is at most 4 * 2^-24 for each of these bits.
    """
    q, power = np.float32(0), beta
    for bit in range(_STEP_BITS):
        if (min(step, (1 << _STEP_BITS) - 1) >> bit) & 1:
            q = q + (_ONE - q) * np.float32(1 - power)
        power *= power
    return np.float32(q)


@np.errstate(all="ignore")
def adamw_scalars(rule: AdamWRule, step: int) -> AdamWScalars:
    """The factors of step number `step`, the first being 1."""
    lr = np.float32(rule.lr)
    (b1, b2), (c1, c2) = rule.betas, (bias_correction(beta, step) for beta in rule.betas)
    return AdamWScalars(
        _ONE - lr * np.float32(rule.weight_decay),
        (np.float32(b1), np.float32(1 - b1)),
        (np.float32(b2), np.float32(1 - b2)),
        lr / c1,
        _ONE / np.sqrt(c2),
        np.float32(rule.eps),
    )


@np.errstate(all="ignore")
def adamw_step(
    master: npt.NDArray[Any],
    grad: npt.NDArray[Any],
    state: AdamWState,
    rule: AdamWRule,
    *,
    seed: int | None = None,
    tensor: int = 0,
) -> tuple[npt.NDArray[Any], AdamWState]:
    """The master weight and the state after one more step.

    master   fp32 or bf16, any shape. The step of a bf16 one is rounded stochastically from fp32, once
    grad     fp32, bf16 or fp16, of that shape
    seed     of stochastic rounding, needed for bf16 masters and 8-bit states; one seed for all steps
    tensor   the parameter's number in its optimizer

    m = fl(fl(b1 m) + fl((1 - b1) g)), v = fl(fl(b2 v) + fl((1 - b2) fl(g g))),
    master = fl(fl(master decay) - fl(fl(m / fl(fl(sqrt(v) r) + eps)) step_size)), with decay = fl(1 - fl(lr wd)),
    step_size = fl(lr / (1 - b1^t)) and r = fl(1 / fl(sqrt(1 - b2^t))). m and v are those before they are stored.
    Values that are not finite go through as IEEE has it.

    Raises ValueError for shapes and dtypes that do not fit, or a seed that is missing.
    """
    check_subnormals()
    random = _checked_seed(master, grad, state, seed)
    step = state.step + 1
    scalars = adamw_scalars(rule, step)
    g, m, v = to_fp32(grad).reshape(master.shape), _values(state.exp_avg), _values(state.exp_avg_sq)
    m = np.asarray(m * scalars.first[0] + g * scalars.first[1])
    v = np.asarray(v * scalars.second[0] + g * g * scalars.second[1])
    update = m / (np.sqrt(v) * scalars.root_scale + scalars.eps)
    new = np.asarray(to_fp32(master).reshape(master.shape) * scalars.decay - update * scalars.step_size, np.float32)

    def bits(stream: int) -> npt.NDArray[np.uint16]:
        return rounding_bits(master.shape, stream, seed=random, step=step, tensor=tensor)

    rounded = new if master.dtype == np.float32 else round_stochastic(new, bits(MASTER))
    if isinstance(state.exp_avg, BlockState):
        blocks = encode_blocks(m, True, bits(FIRST_MOMENT)), encode_blocks(v, False, bits(SECOND_MOMENT))
        return rounded, AdamWState(step, *blocks)
    return rounded, AdamWState(step, m, v)


def adamw_bound(
    master: npt.NDArray[Any], grad: npt.NDArray[Any], state: AdamWState, rule: AdamWRule
) -> npt.NDArray[np.float64]:
    """How far the fp32 master after a step may be from that of exact arithmetic, where nothing over- or underflows.

    It holds for every order of the operations, contracted or not, with scalars rounded to fp32, and also where the
    first moment is computed as m + (g - m) w; so two implementations differ by at most twice as much. With e = 2^-24,
    n the set bits of t and M = |m| + (1 - b1) |g|: m is off by 4 e M; v by 5 e v; the denominator and the quotient by
    10 e, relatively, and by 2 n e from the root of the bias correction; step_size by (3 + 4 n) e; and the decayed
    master by 4 e.
    """
    e, step = 2.0**-24, state.step + 1
    bits = min(step, (1 << _STEP_BITS) - 1).bit_count()
    (b1, b2), m, v = rule.betas, _wide(_values(state.exp_avg)), _wide(_values(state.exp_avg_sq))
    p, g = _wide(master), _wide(grad)
    first = np.abs(m) + (1 - b1) * np.abs(g)
    denominator = np.sqrt((b2 * v + (1 - b2) * g * g) / (1 - b2**step)) + rule.eps
    with np.errstate(divide="ignore", invalid="ignore"):
        update = rule.lr / (1 - b1**step) * np.where(denominator > 0, first / denominator, 0)
    bound: npt.NDArray[np.float64] = e * (update * (4 + 10 + 2 * bits + 3 + 4 * bits + 2) + 6 * np.abs(p))
    return bound * (1 + 64 * e)


def _wide(values: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
    return values.astype(np.float64)


def _values(moment: F32 | BlockState) -> F32:
    return decode_blocks(moment) if isinstance(moment, BlockState) else moment


def _checked_seed(master: Any, grad: Any, state: AdamWState, seed: Any) -> int:
    """The seed, or 0 where nothing is rounded stochastically."""
    if master.dtype not in _MASTER_DTYPES:
        raise ValueError(f"master has dtype {master.dtype}; give float32 or bfloat16")
    if grad.dtype not in _GRADIENT_DTYPES or grad.shape != master.shape:
        raise ValueError(
            f"grad is {grad.dtype} {list(grad.shape)} and the master {list(master.shape)}; give float32, bfloat16 or "
            "float16 of that shape"
        )
    moments = state.exp_avg, state.exp_avg_sq
    coded = [isinstance(moment, BlockState) for moment in moments]
    shapes = [moment.codes.shape if isinstance(moment, BlockState) else moment.shape for moment in moments]
    if coded[0] != coded[1] or any(shape != master.shape for shape in shapes):
        raise ValueError(
            f"state has moments of shapes {[list(shape) for shape in shapes]} and the master is {list(master.shape)}; "
            "give what init_adamw returned for that shape"
        )
    if master.dtype == np.float32 and not coded[0]:
        return 0
    if seed is None:
        what = "the moments are in 8 bits" if coded[0] else "the master is bfloat16"
        raise ValueError(f"seed is None and {what}, rounded stochastically; give an integer seed")
    try:
        return operator.index(seed)
    except TypeError:
        raise ValueError(f"seed={seed!r} is not an integer; give an integer (taken modulo 2^64)") from None
