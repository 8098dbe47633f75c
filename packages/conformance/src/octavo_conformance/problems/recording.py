"""A small training run of the definition, recorded: what teacher-forced replay feeds to a backend."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from octavo import Recipe
from octavo.quantizer import Operand
from octavo.recipe_base import Gemm
from octavo_conformance.problems.inputs import DTYPES, Array, Rng, draw, offsets
from octavo_conformance.problems.operands import MAIN, READS, Problem, by_definition, padded_offsets, values

STEPS = 3
RATE = 0.05
"""Length of a step as a share of the weights' own."""
EXPERTS = MAIN[3]
TOKENS, WIDTH, HIDDEN = MAIN[0], MAIN[1], MAIN[2]


@dataclass(frozen=True)
class Step:
    """One recorded step: fc1 is [HIDDEN, WIDTH] an expert, fc2 [WIDTH, HIDDEN], whose input is positive;
    fc1's has a mean in one step."""

    index: int
    fc1: Problem
    fc2: Problem


def _multiply(problem: Problem, recipe: Recipe, gemm: Gemm) -> Array:
    """The GEMM of a recipe, in float64 on the definition's operands: [M, N], [M, K] or [G, N, K]."""
    operands: dict[Operand, Any] = {
        name: by_definition(problem, recipe, name) if recipe.quantizes(gemm) else None for name in READS[gemm]
    }
    planes = {name: values(problem, operands[name], name, direction) for name, direction in READS[gemm].items()}
    plain = offsets(problem.sizes)
    if gemm != "wgrad":
        name: Operand = "x" if gemm == "fprop" else "dy"
        out = np.zeros((len(problem.x), problem.w.shape[1 if gemm == "fprop" else 2]))
        for group in range(len(problem.sizes)):
            rows = slice(int(plain[group]), int(plain[group + 1]))
            matrix = planes["w"][group]
            out[rows] = planes[name][rows] @ (matrix.T if gemm == "fprop" else matrix)
        return out
    tensor = operands["x"]
    starts = plain if tensor is None else padded_offsets(problem.sizes, tensor.spec.row_alignment)
    dw = np.zeros(problem.w.shape)
    for group in range(len(problem.sizes)):
        rows = slice(int(starts[group]), int(starts[group + 1]))
        dw[group] = planes["dy"][rows].T @ planes["x"][rows]
    return dw


def _routed(rng: Rng, step: int) -> Array:
    """Sizes of a step: one expert without tokens, one with a single token, the others uneven, a tail."""
    share = rng.dirichlet(np.ones(EXPERTS - 2))
    sizes = np.concatenate([[0, 1], np.floor(share * (TOKENS - 20)).astype(np.int64)])
    return np.roll(sizes, step).astype(np.int32)


def record(rng: Rng, recipe: Recipe, dtype: Any) -> Iterator[Step]:
    """Two grouped layers with a squared ReLU between them learn to copy their input; yields each step's problems."""
    kind = DTYPES[dtype]
    w1 = rng.standard_normal((EXPERTS, HIDDEN, WIDTH)) / np.sqrt(WIDTH)
    w2 = rng.standard_normal((EXPERTS, WIDTH, HIDDEN)) / np.sqrt(HIDDEN)
    for index in range(STEPS):
        sizes = _routed(rng, index)
        total = int(sizes.sum())
        x = draw(rng, (TOKENS, WIDTH), dtype, "positive" if index == 1 else "gauss")
        x[total:] = 0
        fc1 = _problem(rng, x, w1.astype(kind), np.zeros((TOKENS, HIDDEN), dtype=kind), sizes)
        pre = _multiply(fc1, recipe, "fprop")
        hidden = (np.maximum(pre, 0) ** 2).astype(kind)
        fc2 = _problem(rng, hidden, w2.astype(kind), np.zeros((TOKENS, WIDTH), dtype=kind), sizes)
        error = _multiply(fc2, recipe, "fprop") - x.astype(np.float64)
        error[total:] = 0
        dy2 = (2 * error / np.sqrt(max(total, 1))).astype(kind)
        fc2 = _problem(rng, hidden, fc2.w, dy2, sizes)
        dhidden = _multiply(fc2, recipe, "dgrad")
        fc1 = _problem(rng, x, fc1.w, (2 * np.maximum(pre, 0) * dhidden).astype(kind), sizes)
        yield Step(index, fc1, fc2)
        for w, problem in ((w1, fc1), (w2, fc2)):
            gradient = _multiply(problem, recipe, "wgrad")
            w -= RATE * _size(w) / max(_size(gradient), 1e-30) * gradient


def _size(array: Array) -> float:
    """Root mean square."""
    return float(np.sqrt(np.mean(array**2)))


def _problem(rng: Rng, x: Array, w: Array, dy: Array, sizes: Array) -> Problem:
    scales = {
        name: np.full(len(sizes), 448 / max(float(np.abs(array.astype(np.float32)).max()), 1e-3), dtype=np.float32)
        for name, array in (("x", x), ("w", w), ("dy", dy))
    }
    bias = draw(rng, (len(sizes), w.shape[1]), "float32").astype(w.dtype)
    return Problem(x, w, dy, sizes, bias, scales)
