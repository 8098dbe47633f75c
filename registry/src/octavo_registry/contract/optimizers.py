"""The operation "adamw_step": one step of AdamW over a master weight, in place, and what is written from the master.

octavo_numerics.adamw_step defines every bit: the order of the operations, the random bits of stochastic rounding
(octavo_numerics.rounding_bits), and moments in 8 bits (encode_blocks). Codes are those of the request's quantizer for
the new master, cast to bf16.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeAlias

from octavo_registry.contract.arrays import A, Q, Q_contra
from octavo_registry.contract.bound import Bound


@dataclass(frozen=True, slots=True, eq=False)
class AdamWArrays(Generic[A]):
    """Arrays of one shape and device, without gaps, all but the gradient written in place.

    master      fp32, or bf16, which is rounded stochastically
    grad        fp32, bf16 or fp16
    exp_avg     fp32 moments; or uint8 codes, with int32 tops [..., ceil(last axis / 128)]
    exp_avg_sq  as exp_avg
    """

    master: A
    grad: A
    exp_avg: A
    exp_avg_sq: A
    exp_avg_tops: A | None = None
    exp_avg_sq_tops: A | None = None


@dataclass(frozen=True, slots=True, eq=False)
class AdamWStepRule(Generic[A]):
    """What the step depends on besides arrays.

    lr             a number, or fp32 of one element on the arrays' device
    betas, eps, weight_decay  numbers
    step           fp32 of no dimension, the step's number, 1 for the first: on the arrays' device, or in host memory
    seed           of stochastic rounding, modulo 2^64
    tensor         the parameter's number in its optimizer
    first_row      where the arrays are rows of a larger tensor, the number of their first row of the last axis in it
    inverse_scale  fp32 of one element on the device, which multiplies the gradient; None: 1
    skip           bool of one element on the device: where it is true, nothing is changed; None: False
    """

    lr: float | A
    betas: tuple[float, float]
    eps: float
    weight_decay: float
    step: A
    seed: int = 0
    tensor: int = 0
    first_row: int = 0
    inverse_scale: A | None = None
    skip: A | None = None


class AdamWStep(Protocol[A, Q_contra]):
    """One step, in place, without a host sync."""

    def __call__(self, arrays: AdamWArrays[A], rule: AdamWStepRule[A], out: A | Q_contra | None, /) -> None:
        """Steps the moments and the master, and writes `out` from the new master.

        out  None; or bf16 or fp16 of the arrays' shape: the master rounded to nearest, NaN canonical; or, where the
             request has a quantizer, a quantized operand in the request's layouts, both planes of which are written
        """


@dataclass(frozen=True, slots=True)
class BoundAdamWStep(Bound[AdamWStep[A, Q]], Generic[A, Q]):
    """The answer to a request for "adamw_step": the function alone."""


AnyBoundOptimizer: TypeAlias = BoundAdamWStep[Any, Any]
