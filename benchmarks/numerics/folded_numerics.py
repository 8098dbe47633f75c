"""MXFP8 with folded products beside exact ones: operands, products and single features, by octavo_numerics on a CPU.

python benchmarks/numerics/folded_numerics.py OUTPUT COMMIT

Drawn data of seven kinds, and the operands of both expert layers in a step of a small language model that was trained
in bf16 before. Everything is compared with the input in float64, or with the exact products of MX values.
"""

from __future__ import annotations

import argparse
import json
import platform
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from unittest import mock

import ml_dtypes
import numpy as np
import torch

from octavo import HighPrecision, Recipe, recipe
from octavo.quantizer import Direction, Operand
from octavo_cli.train.config import TrainConfig
from octavo_cli.train.data import read_corpus
from octavo_cli.train.models import torch_model
from octavo_numerics import dequantize, folding_bound, quantize

Array = np.ndarray[Any, Any]
EXACT, FOLDED = recipe("mxfp8"), recipe("mxfp8-folded")
DIRECTIONS: tuple[Direction, ...] = ("rowwise", "columnwise")
ROWS, FEATURES, OUTPUTS, SEEDS = 512, 2048, 512, (0, 1, 2)
TRAINED = TrainConfig(steps=200, seeds=1, experts=8, top_k=2, width=256, hidden=512)


def drawn(kind: str, rng: np.random.Generator) -> Array:
    """[ROWS, FEATURES] values of one kind."""
    shape = (ROWS, FEATURES)
    normal = rng.standard_normal(shape)
    if kind == "normal":
        return normal
    if kind == "Student t3":
        return rng.standard_t(3, shape)
    if kind == "SwiGLU product":
        gate = rng.standard_normal(shape)
        return gate / (1 + np.exp(-gate)) * normal
    if kind == "1 % of channels x100":
        return normal * np.where(rng.random(FEATURES) < 0.01, 100.0, 1.0)
    if kind == "gradients, rows of 2^N(0, 4)":
        return normal * np.exp2(4 * rng.standard_normal((ROWS, 1)))
    if kind == "features of 2^N(0, 4)":
        return normal * np.exp2(4 * rng.standard_normal(FEATURES))
    assert kind == "one channel in 128 of 2^16"
    return normal * np.where(np.arange(FEATURES) % 128 == 0, 2.0**16, 1.0)


KINDS = (
    *("normal", "Student t3", "SwiGLU product", "1 % of channels x100", "gradients, rows of 2^N(0, 4)"),
    *("features of 2^N(0, 4)", "one channel in 128 of 2^16"),
)


def trained() -> Iterator[tuple[str, Operand, Array, Array | None]]:
    """(layer, operand, values, group sizes) of the last step of the training run."""
    kept: list[tuple[str, Operand, Array, Array | None]] = []

    class Keeping(torch_model.Watch):
        def look(self, name: str, recipe: Any, state: Any, operands: Any, y: torch.Tensor) -> None:
            sizes = operands["x"][1]
            for operand, (value, own) in operands.items():
                self.keep(name, operand, value, own)
            y.register_hook(lambda dy: self.keep(name, "dy", dy, sizes))

        def keep(self, name: str, operand: Operand, value: torch.Tensor, sizes: torch.Tensor | None) -> None:
            kept.append((name, operand, value.detach().float().numpy(), None if sizes is None else sizes.numpy()))

    corpus = read_corpus(None, TRAINED.context)
    model = torch_model.TorchModel(TRAINED, HighPrecision(), len(corpus.vocabulary), 0, "cpu")
    with mock.patch.object(torch_model, "Watch", Keeping):
        for step in range(TRAINED.steps):
            tokens = corpus.batch(0, step, TRAINED.batch, TRAINED.context)
            model.step(tokens, step, observe=step == TRAINED.steps - 1)
    yield from kept


def decibels(values: Array, error: Array, axis: int | None = None) -> Array:
    """Signal over noise; infinite without noise."""
    signal, noise = (values**2).sum(axis), (error**2).sum(axis)
    with np.errstate(divide="ignore", invalid="ignore"):
        return 10 * np.log10(signal / noise)


def of_operand(operand: Operand, values: Array, sizes: Array | None) -> dict[str, Any]:
    """Both planes of one operand, quantized by either recipe."""
    x = values.astype(ml_dtypes.bfloat16)
    plain = x.astype(np.float64)
    found: dict[str, Any] = {}
    for direction in DIRECTIONS:
        exact, folded = (
            dequantize(quantize(x, how.quantizer(operand), sizes), direction).astype(np.float64)  # type: ignore[arg-type]
            for how in (EXACT, FOLDED)
        )
        bound = folding_bound(quantize(x, FOLDED.quantizer(operand), sizes), direction)  # type: ignore[arg-type]
        assert (np.abs(folded - exact) <= bound).all()
        flat, of_exact, of_folded = (part.reshape(-1, part.shape[-1]) for part in (plain, exact, folded))
        by_feature = [decibels(flat, part - flat, 0) for part in (of_exact, of_folded)]
        used = (flat != 0).any(0)
        found[direction] = {
            "differing": float(np.mean(exact != folded)),
            "exact_db": float(decibels(plain, exact - plain)),
            "folded_db": float(decibels(plain, folded - plain)),
            "difference": float(np.linalg.norm(folded - exact) / np.linalg.norm(exact)),
            "features_least_exact_db": float(by_feature[0][used].min()),
            "features_least_folded_db": float(by_feature[1][used].min()),
            "features_below_20_db": [float(np.mean(each[used] < 20)) for each in by_feature],
        }
    return found


def of_product(x: Array, w: Array) -> dict[str, float]:
    """fprop of x with quantized weights: folded over exact, and both over the unquantized product."""
    a, b = x.astype(ml_dtypes.bfloat16), w.astype(ml_dtypes.bfloat16)
    plain = a.astype(np.float64) @ b.astype(np.float64).T

    def product(how: Recipe) -> Array:
        left, right = (
            dequantize(quantize(value, how.quantizer(name))).astype(np.float64)  # type: ignore[arg-type]
            for name, value in (("x", a), ("w", b[None]))
        )
        return left @ right[0].T

    exact, folded = product(EXACT), product(FOLDED)
    size = np.linalg.norm
    return {
        "folded_from_exact": float(size(folded - exact) / size(exact)),
        "exact_from_input": float(size(exact - plain) / size(plain)),
        "folded_from_input": float(size(folded - plain) / size(plain)),
    }


def measure(commit: str) -> dict[str, Any]:
    """The content of the file."""
    rows: list[dict[str, Any]] = []
    for kind in KINDS:
        for seed in SEEDS:
            rng = np.random.default_rng(seed)
            values = drawn(kind, rng)
            w = rng.standard_normal((OUTPUTS, FEATURES)) * FEATURES**-0.5
            sizes = np.array([100, 0, 28, 200, 184])
            row: dict[str, Any] = {"data": kind, "seed": seed}
            row["x"] = of_operand("x", values, sizes)
            row["w"] = of_operand("w", values[None], None)
            row["product"] = of_product(values, w)
            # what quiet features are worth where the weights have learned to weigh them as much as loud ones
            loudness = np.sqrt((values**2).mean(0))
            row["product of features that count alike"] = of_product(values, w / loudness)
            rows.append(row)
            print(json.dumps(row), flush=True)
    for layer, operand, values, sizes in trained():
        rows.append({"data": f"trained, {layer}", operand: of_operand(operand, values, sizes)})
        print(json.dumps(rows[-1]), flush=True)
    return {
        "schema_version": 1,
        "command": "python benchmarks/numerics/folded_numerics.py OUTPUT COMMIT",
        "commit": commit,
        "date": datetime.now(UTC).date().isoformat(),
        "machine": {"system": platform.system(), "processor": platform.machine()},
        "versions": {"python": platform.python_version(), "numpy": np.__version__, "torch": torch.__version__},
        "shape": {"rows": ROWS, "features": FEATURES, "outputs": OUTPUTS},
        "trained": TRAINED.as_dict(),
        "rows": rows,
    }


def main() -> None:
    """Write the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path)
    parser.add_argument("commit")
    arguments = parser.parse_args()
    arguments.output.write_text(json.dumps(measure(arguments.commit), indent=1) + "\n")


if __name__ == "__main__":
    main()
