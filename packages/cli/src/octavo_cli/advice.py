"""What `octavo advise` knows of a recipe for one layer: SQNR, bytes, and a time that was measured or a bound on it."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from octavo import GroupedTensorSpec, Recipe
from octavo.quantizer import Direction, Operand
from octavo_cli.errors import InputError, check_version
from octavo_cli.inspection.files import each_tensor, matrices, open_source, why_not
from octavo_cli.inspection.study import sample_of, verdict

Array = NDArray[Any]
GEMMS = ("fprop", "dgrad", "wgrad")
OPERANDS: tuple[Operand, ...] = ("x", "w", "dy")
_KEPT: tuple[Operand, ...] = ("x", "w")  # from forward to backward
_VALUES = "high_precision"
_SCALE_BYTES = {"fp32": 4, "e8m0": 1, "e4m3": 1}


@dataclass(frozen=True, slots=True)
class Shape:
    """A grouped layer: G weights [N, K], and M rows in all."""

    groups: int
    k: int
    n: int
    m: int

    @classmethod
    def of(cls, text: str) -> Shape:
        """From "G,K,N,M"; InputError for anything else."""
        try:
            sides = [int(part) for part in text.split(",")]
        except ValueError:
            sides = []
        if len(sides) != 4 or min(sides, default=0) < 1:
            raise InputError(f"--shape is {text!r}; give four positive numbers G,K,N,M, such as 32,7168,4096,32768")
        return cls(*sides)

    @property
    def key(self) -> list[int]:
        """As result files have it."""
        return [self.groups, self.k, self.n, self.m]

    def sides(self, operand: Operand) -> tuple[int, ...]:
        """Of x [M, K], dy [M, N] or w [G, N, K]."""
        return (self.groups, self.n, self.k) if operand == "w" else (self.m, self.k if operand == "x" else self.n)


@dataclass(frozen=True, slots=True)
class Chip:
    """Peak rates of the vendor's data sheet: dense TFLOP/s, and TB/s of memory.

    products   what multiplies codes of each scaling: "fp8", or "bf16" where the chip has no such product and exact
               bf16 copies are multiplied
    """

    name: str
    bf16: float
    fp8: float
    memory: float
    products: Mapping[str, str]


_HOPPER = {"mxfp8": "bf16", "nvfp4": "bf16"}
CHIPS = {
    "h100": Chip("NVIDIA H100 SXM", 989.4, 1978.9, 3.35, _HOPPER),
    "h200": Chip("NVIDIA H200", 989.4, 1978.9, 4.8, _HOPPER),
}
"""NVIDIA's data sheets, without sparsity. Hopper multiplies MXFP8, unless its products are folded, and NVFP4 as bf16
copies: decisions 13 and 42."""


@dataclass(frozen=True, slots=True)
class Advice:
    """One recipe for one layer.

    sqnr_db    of the weights, of the expert that loses most; infinite where the recipe does not quantize them
    bytes      that the weights' and x's codes and scales take, of both planes where backward reads them
    us         of the three GEMMs; `measured` says whether it is a median of a result file, else it is a roofline: no
               kernel can be faster, and real ones reach a part of it
    quantizing_us   that making the codes takes at least
    """

    recipe: str
    sqnr_db: float
    bytes: int
    us: float
    measured: bool
    quantizing_us: float

    @property
    def total_us(self) -> float:
        """Of a micro-batch."""
        return self.us + self.quantizing_us


def weights_for(shape: Shape, path: Path | None, *, trust: bool, rows: int, seed: int) -> tuple[Array, str]:
    """Matrices [G, N, K] to judge recipes by, and what they are.

    path   a checkpoint, of which every matrix with K columns is taken; None: normally distributed values
    """
    if path is None:
        draw = np.random.default_rng(seed)
        count = min(shape.n, rows or 256)
        values = draw.standard_normal((min(shape.groups, 4), count, shape.k), dtype=np.float32)
        judged = "normally distributed values, of which all FP8 recipes keep about the same; --weights judges by yours"
        return values.astype(ml_dtypes.bfloat16), judged
    parts, names = [], []
    source = open_source(path, trust=trust)
    for name, values in each_tensor(source):
        stack = None if why_not(source, name, values) else matrices(values, source.weight)
        if stack is not None and stack.shape[-1] == shape.k:
            parts += [sample.astype(np.float32)[None] for sample in sample_of(stack, rows)]
            names.append(name)
    if not parts:
        raise InputError(f"--weights {path}: no matrix has K = {shape.k} columns; give the layer's own --shape G,K,N,M")
    least = min(part.shape[1] for part in parts)
    stacked = np.concatenate([part[:, :least] for part in parts]).astype(ml_dtypes.bfloat16)
    return stacked, f"{len(names)} of the tensors in {path}: those with K = {shape.k}"


def advice_on(
    name: str,
    recipe: Recipe,
    shape: Shape,
    weights: Array,
    chip: Chip,
    measured: Mapping[tuple[str, str], float],
    micro_batches: int = 1,
) -> Advice:
    """What is known of one recipe.

    measured       what measured_us has found at this shape
    micro_batches  that share the weights' codes
    """
    quantized = recipe.quantizer("w") is not None
    judged = verdict(weights, recipe).worst_sqnr if quantized else math.inf
    us, quantizing = _measured(recipe, measured), quantizing_us(recipe, shape, chip, micro_batches)
    is_measured, gemms = us is not None, roofline_us(recipe, shape, chip) if us is None else us
    return Advice(name, judged, bytes_of(recipe, shape), gemms, is_measured, quantizing)


def _measured(recipe: Recipe, measured: Mapping[tuple[str, str], float]) -> float | None:
    """Microseconds of the three GEMMs, each as the recipe computes it; None unless all of them were measured. Of a
    recipe that another one computes, that one's count."""
    quantized = recipe.computed_as.kind
    each = [
        measured.get((quantized if recipe.quantizes(gemm) else _VALUES, gemm))  # type: ignore[arg-type]
        for gemm in GEMMS
    ]
    known = [us for us in each if us is not None]
    return sum(known) if len(known) == len(each) else None


def bytes_of(recipe: Recipe, shape: Shape) -> int:
    """Bytes of x and the weights as a forward leaves them for backward; bf16 where an operand is not quantized."""
    return sum(_codes_bytes(recipe, shape, operand) or 2 * math.prod(shape.sides(operand)) for operand in _KEPT)


def quantizing_us(recipe: Recipe, shape: Shape, chip: Chip, micro_batches: int) -> float:
    """Microseconds that a micro-batch's quantizers take at least: x, dy and its share of the weights are read in bf16,
    and their codes and scales written, at the speed of the chip's memory."""
    total = 0.0
    for operand in OPERANDS:
        codes = _codes_bytes(recipe, shape, operand)
        moved = 2 * math.prod(shape.sides(operand)) + codes if codes else 0
        total += moved / (micro_batches if operand == "w" else 1)
    return total / (chip.memory * 1e12) * 1e6


def _codes_bytes(recipe: Recipe, shape: Shape, operand: Operand) -> int:
    """Of an operand's codes and scales in each direction that is read; 0 where it is not quantized."""
    spec = recipe.quantizer(operand)
    if spec is None:
        return 0
    layout = GroupedTensorSpec(
        shape=shape.sides(operand), groups=shape.groups, quantizer=spec, ragged_axis=None if operand == "w" else 0
    )
    ways: tuple[Direction, ...] = ("rowwise",) if spec.shares_codes else spec.directions
    return sum(
        math.prod(layout.payload_shape(way)) + _SCALE_BYTES[spec.scale_format] * math.prod(layout.scale_shape(way))
        for way in ways
    )


def copies_bf16(recipe: Recipe, chip: Chip) -> bool:
    """True where the chip has no product of such codes and multiplies bf16 copies: it takes longer than bf16 itself."""
    kind = recipe.computed_as.kind
    return chip.products.get(kind) == "bf16" and any(recipe.quantizes(gemm) for gemm in GEMMS)  # type: ignore[arg-type]


def roofline_us(recipe: Recipe, shape: Shape, chip: Chip) -> float:
    """Microseconds that the three GEMMs take at least: each at the chip's peak, or at its memory's speed."""
    flops = 2.0 * shape.m * shape.k * shape.n
    total = 0.0
    for gemm in GEMMS:
        quantized = recipe.quantizes(gemm)  # type: ignore[arg-type]
        spec = recipe.quantizer("w") or recipe.quantizer("x")
        product = "bf16" if not quantized or spec is None else chip.products.get(spec.scaling, "fp8")
        wide = 1 if product == "fp8" else 2
        x, w, y = shape.m * shape.k, shape.groups * shape.n * shape.k, shape.m * shape.n
        read, written = {"fprop": (x + w, y), "dgrad": (y + w, x), "wgrad": (x + y, w)}[gemm]
        rate = chip.fp8 if product == "fp8" else chip.bf16
        total += max(flops / (rate * 1e12), (wide * read + 2 * written) / (chip.memory * 1e12))
    return total * 1e6


def measured_us(files: Iterable[Path], shape: Shape, chip: Chip) -> tuple[dict[tuple[str, str], float], list[str]]:
    """Microseconds by kind of recipe and GEMM, from `octavo bench gemm` on this chip at this shape.

    Also what was read, in sentences. InputError for a file that is not one.
    """
    found: dict[tuple[str, str], float] = {}
    notes = []
    for path in files:
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            rows = [{**row} for row in content["rows"]]
            gpu = str(content["machine"].get("gpu", content["machine"].get("processor", "")))
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            told = getattr(error, "strerror", None) or "it is no result of octavo bench"
            raise InputError(f"--results {path} cannot be read: {told}; name a file of octavo bench gemm") from None
        check_version(f"--results {path}", content)
        if chip.name.split()[1] not in gpu:
            notes.append(f"{path.name} was measured on {gpu or 'an unknown chip'}, not on {chip.name}: left out")
            continue
        used = 0
        for row in rows:
            if row.get("shape") == shape.key and row.get("gemm") in GEMMS and row.get("sizes", "even") == "even":
                kind = _VALUES if row.get("case") == "bf16" else str(row.get("case"))
                found[kind, row["gemm"]] = _median(path, row)
                used += 1
        notes.append(f"{path.name} ({gpu}, {content.get('date', 'no date')}): {used} rows of this shape")
    return found, notes


def _median(path: Path, row: Mapping[str, Any]) -> float:
    """Of a row's times; InputError where it has none."""
    times = row.get("us")
    median = times.get("median") if isinstance(times, Mapping) else None
    if isinstance(median, bool) or not isinstance(median, int | float) or not 0 < median < math.inf:
        raise InputError(
            f"--results {path}: the {row['gemm']} of {row.get('case')} has the median {median!r}, which is not a time; "
            "name a file of octavo bench gemm"
        )
    return float(median)


def best(advice: Iterable[Advice], least_sqnr: float) -> Advice | None:
    """The fastest recipe, its quantizers included, whose weights keep an SQNR of at least `least_sqnr`; of equally fast
    ones the smallest."""
    fitting = [one for one in advice if one.sqnr_db >= least_sqnr]
    return min(fitting, key=lambda one: (one.total_us, one.bytes), default=None)
