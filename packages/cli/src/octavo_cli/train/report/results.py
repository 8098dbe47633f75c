"""What a training run leaves: curves, held-out gaps with their spread, expert load; and its JSON form."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from octavo_cli.train.config import BASELINE, TrainConfig
from octavo_cli.train.models.bits import BitsReport
from octavo_cli.train.models.model import Health

SCHEMA_VERSION = 1

SEED_SPREAD = (0.07, 0.84)
"""Standard deviation of the gap over 3 paired seeds of 200 steps in per cent, smallest and largest over the recipes:
benchmarks/results/training-gates-2026-11-29.json, from `python -m octavo_cli.train.gates`."""


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Held-out cross entropy in nats per byte after `step` steps, sequence by sequence."""

    step: int
    sequences: NDArray[np.float64]

    @property
    def loss(self) -> float:
        """Mean over the sequences, which are equally long."""
        return float(self.sequences.mean())


@dataclass(frozen=True, slots=True)
class Observed:
    """What quantization did to the grouped layers' operands in step `step`, counted from 1."""

    step: int
    health: Health


@dataclass(slots=True)
class Run:
    """One recipe trained from one seed. `load` is [layers, experts]: share of routed rows in the last quarter.

    health   observed steps; none where the framework or the recipe has nothing to observe
    """

    recipe: str
    seed: int
    losses: list[float] = field(default_factory=list)
    balance: list[float] = field(default_factory=list)
    gradient_norms: list[float] = field(default_factory=list)
    evaluations: list[Evaluation] = field(default_factory=list)
    health: list[Observed] = field(default_factory=list)
    load: NDArray[np.float64] = field(default_factory=lambda: np.zeros((0, 0)))
    seconds: float = 0.0
    weights: dict[str, NDArray[np.float32]] = field(default_factory=dict, repr=False)

    @property
    def final(self) -> Evaluation:
        """The evaluation after the last step."""
        return self.evaluations[-1]

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON; the weights stay out."""
        return {
            "recipe": self.recipe,
            "seed": self.seed,
            "seconds": round(self.seconds, 3),
            "train_loss": [round(loss, 6) for loss in self.losses],
            "balance_loss": [round(loss, 6) for loss in self.balance],
            "gradient_norm": [rounded(norm) for norm in self.gradient_norms],
            "health": [
                {
                    "step": seen.step,
                    "layers": {
                        layer: {
                            operand: {name: rounded(value) for name, value in numbers.items()}
                            for operand, numbers in operands.items()
                        }
                        for layer, operands in seen.health.items()
                    },
                }
                for seen in self.health
            ],
            "held_out": [{"step": item.step, "loss": round(item.loss, 6)} for item in self.evaluations],
            "held_out_sequences": [round(float(loss), 6) for loss in self.final.sequences],
            "expert_load": np.round(self.load, 6).tolist(),
        }


def rounded(value: float) -> float | None:
    """Six digits for JSON, which has no NaN and no infinity: None."""
    return float(f"{value:.6g}") if math.isfinite(value) else None


@dataclass(frozen=True, slots=True)
class Gap:
    """How far a recipe's held-out loss is above the baseline's, in per cent of the baseline's.

    percent   mean over the seeds of the paired gap (same data, same initial parameters)
    spread    one standard deviation of the paired gap over the seeds; with one seed there is none, and it is the
              standard error of the gap over the held-out sequences, which says nothing about other seeds
    """

    recipe: str
    percent: float
    spread: float
    per_seed: tuple[float, ...]
    spread_over: str

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {
            "recipe": self.recipe,
            "percent": round(self.percent, 4),
            "spread_percent": round(self.spread, 4),
            "spread_over": self.spread_over,
            "per_seed_percent": [round(value, 4) for value in self.per_seed],
        }


def gap_at(runs: list[Run], recipe: str, index: int = -1) -> Gap:
    """The gap of `recipe` at one evaluation (the last one by default)."""
    pairs = [
        (base.evaluations[index].sequences, other.evaluations[index].sequences)
        for base in runs
        for other in runs
        if base.recipe == BASELINE and other.recipe == recipe and base.seed == other.seed
    ]
    per_seed = tuple(100 * float((other - base).mean() / base.mean()) for base, other in pairs)
    if len(pairs) > 1:
        spread, over = statistics.stdev(per_seed), f"{len(pairs)} paired seeds"
    else:
        base, other = pairs[0]
        count = len(base)
        deviation = float((other - base).std(ddof=1)) if count > 1 else 0.0
        spread, over = 100 * deviation / count**0.5 / float(base.mean()), f"{count} held-out sequences"
    return Gap(recipe, statistics.fmean(per_seed), spread, per_seed, over)


@dataclass(frozen=True, slots=True)
class Results:
    """Everything that the report files show.

    backends   names of the backends that ran, each with the operations that it served
    weights    what each recipe's quantizer does to the trained expert weights, by recipe and weight: numbers_of
    stopped    whether Ctrl-C ended the training before everything that was asked for had run
    missing    recipes that were asked for and are not here because of that
    """

    config: TrainConfig
    framework: str
    device: str
    recipes: Mapping[str, Mapping[str, Any]]
    versions: Mapping[str, str]
    text: Mapping[str, Any]
    unigram_loss: float
    runs: list[Run]
    bits: BitsReport
    backends: Mapping[str, tuple[str, ...]]
    weights: Mapping[str, Mapping[str, Mapping[str, float]]]
    seconds: float
    stopped: bool = False
    missing: tuple[str, ...] = ()

    @property
    def gaps(self) -> dict[str, Gap]:
        """The final gap of every recipe but the baseline."""
        return {name: gap_at(self.runs, name) for name in self.recipes if name != BASELINE}

    def of(self, recipe: str) -> list[Run]:
        """The runs of a recipe, one per seed."""
        return [run for run in self.runs if run.recipe == recipe]

    def held_out(self, recipe: str) -> float:
        """Final held-out loss, mean over the seeds."""
        return statistics.fmean(run.final.loss for run in self.of(recipe))

    def as_dict(self) -> dict[str, Any]:
        """The content of curves.json."""
        return {
            "schema_version": SCHEMA_VERSION,
            "framework": self.framework,
            "device": self.device,
            "backends": {name: list(operations) for name, operations in self.backends.items()},
            "versions": dict(self.versions),
            "config": self.config.as_dict(),
            "text": dict(self.text),
            "unigram_loss": round(self.unigram_loss, 6),
            "recipes": {name: dict(content) for name, content in self.recipes.items()},
            "held_out_loss": {name: round(self.held_out(name), 6) for name in self.recipes},
            "gaps": [gap.as_dict() for gap in self.gaps.values()],
            "weights": {
                name: {
                    weight: {what: rounded(value) for what, value in numbers.items()}
                    for weight, numbers in weights.items()
                }
                for name, weights in self.weights.items()
            },
            "bits": self.bits.as_dict(),
            "seconds": round(self.seconds, 2),
            "stopped": self.stopped,
            "missing": list(self.missing),
            "runs": [run.as_dict() for run in self.runs],
        }
