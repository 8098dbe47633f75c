"""Figures of other libraries that this program does not run: recorded once, on one machine, and quoted as such.

Side by side on one H200, random data, medians: torch 2.11+cu130, CUDA 13.0, cuBLAS 13.1, TransformerEngine 2.20.2,
DeepGEMM 54e2261. Keys are (G, K, N, M).
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple, TypeVar

from octavo_bench.harness.shapes import DEEPGEMM, MODELS

LABEL = "recorded on an H200, not measured in this run"


T = TypeVar("T")


class DeepGemm(NamedTuple):
    """TFLOP/s with groups that the caller padded to 128 rows; wgrad with sizes on the host."""

    fprop_block: float
    fprop_bf16: float
    wgrad_fp8_accumulate: float
    wgrad_bf16: float


class Step(NamedTuple):
    """Milliseconds of forward and backward with even groups, weights quantized every step."""

    torch_bf16: float
    te_bf16: float
    te_delayed: float
    te_current: float
    te_block: float


class StepGoal(NamedTuple):
    """Most milliseconds of a step on an H200; `weights` is what reusing quantized weights takes off."""

    block: float
    delayed: float
    weights: float


def _table(rows: tuple[T, ...], keys: tuple[tuple[int, int, int, int], ...]) -> Mapping[tuple[int, ...], T]:
    return MappingProxyType(dict(zip(keys, rows, strict=True)))


DEEPGEMM_TFLOPS: Mapping[tuple[int, ...], DeepGemm] = _table(
    (
        DeepGemm(1332, 775, 583, 418),
        DeepGemm(1240, 737, 579, 427),
        DeepGemm(1339, 763, 574, 433),
        DeepGemm(1385, 667, 758, 536),
        DeepGemm(1267, 746, 579, 433),
        DeepGemm(1399, 772, 781, 619),
    ),
    tuple(shape.key for shape in DEEPGEMM),
)

STEP_MS: Mapping[tuple[int, ...], Step] = _table(
    (
        Step(17.36, 16.84, 11.15, 11.48, 12.86),
        Step(8.92, 9.23, 7.05, 8.15, 7.92),
        Step(4.78, 4.78, 4.26, 5.45, 4.53),
        Step(3.88, 3.91, 2.95, 3.46, 3.29),
        Step(5.49, 5.11, 4.64, 6.85, 5.14),
        Step(2.15, 5.97, 11.15, 16.69, 11.95),
    ),
    tuple(shape.key for shape in MODELS),
)

STEP_GOALS: Mapping[tuple[int, ...], StepGoal] = _table(
    (
        StepGoal(11.0, 11.0, 0.88),
        StepGoal(6.1, 6.1, 0.88),
        StepGoal(3.4, 3.4, 0.44),
        StepGoal(2.5, 2.5, 0.19),
        StepGoal(3.8, 3.8, 0.50),
        StepGoal(1.85, 1.8, 0.38),
    ),
    tuple(shape.key for shape in MODELS),
)

WGRAD_ACCUMULATE_US: Mapping[tuple[int, ...], float] = MappingProxyType({DEEPGEMM[0].key: 570.0})
"""Most microseconds of an FP8 wgrad into an fp32 accumulator on an H200."""
