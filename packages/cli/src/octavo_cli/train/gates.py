"""The training gates: held-out loss of each recipe against bf16 over paired seeds, with a limit on the mean gap.

    python -m octavo_cli.train.gates --out benchmarks/results/training-gates.json

A gate sees gross faults only: paired seeds spread by some tenths of a per cent, so it cannot see missing stochastic
rounding, a missing Hadamard transform or a wrong rounding rule; the bit-for-bit suite does. Faults that it must see
are planted (`planted`) and have to fail. Runs in torch on the CPU.
"""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import typer

from octavo import Recipe
from octavo_cli.train.config import BASELINE, TrainConfig, parse_recipes
from octavo_cli.train.data import read_corpus
from octavo_cli.train.demo import model_factory, versions
from octavo_cli.train.loop import ModelFactory, train_one
from octavo_cli.train.models.model import Model
from octavo_cli.train.planted import FAULTS, planted
from octavo_cli.train.report.live import RunLines
from octavo_cli.train.report.results import Gap, gap_at
from octavo_registry.cli.files import check_writable, write_whole

LIMITS: dict[str, float] = {
    **dict.fromkeys(("fp8-block", "fp8-block-square-columns", "fp8-block-wgrad-high-precision"), 1.0),
    **dict.fromkeys(("mxfp8", "mxfp8-folded"), 1.0),
    **dict.fromkeys(("bf16, lean", "fp8-block, lean"), 1.0),
    **dict.fromkeys(("mxfp4", "nvfp4"), 2.0),
}
"""Largest mean gap to bf16 in per cent, by preset; "lean": with experts that keep fc1's result as codes (`moe_mlp`)."""

CONFIG = TrainConfig(steps=200, seeds=3, experts=8, top_k=2, width=128, hidden=256)
FAULTY_RECIPE = "fp8-block"
LEAN: Literal["lean"] = "lean"


def measure(
    config: TrainConfig = CONFIG, recipes: Sequence[str] = tuple(LIMITS), faults: Sequence[str] = tuple(FAULTS)
) -> dict[str, Any]:
    """Train everything and judge it; the result is what the file holds. `passed` is the verdict on all of it."""
    corpus = read_corpus(None, config.context)
    jobs = [_Job.of(name) for name in dict.fromkeys([BASELINE, *recipes])]
    jobs += [_Job.of(FAULTY_RECIPE)._replace(label=fault, around=partial(planted, fault)) for fault in faults]
    runs = []
    for seed in config.all_seeds:
        for job in jobs:
            with job.around():
                runs.append(train_one(config, job.label, job.recipe, seed, corpus, job.make, RunLines()))
    gates = [_judged(gap_at(runs, name), LIMITS[name], must_pass=True) for name in recipes]
    caught = [_judged(gap_at(runs, name), LIMITS[FAULTY_RECIPE], must_pass=False) for name in faults]
    return {
        "schema_version": 1,
        "command": "python -m octavo_cli.train.gates",
        "date": datetime.now(UTC).date().isoformat(),
        "machine": {"system": platform.system(), "processor": platform.machine(), "cores": os.cpu_count()},
        "versions": versions(("torch",)),
        "text": {"source": corpus.source, "sha256": corpus.sha256},
        "config": config.as_dict(),
        "passed": all(row["as_expected"] for row in [*gates, *caught]),
        "gates": gates,
        "planted_faults": caught,
        "runs": [
            {
                "recipe": run.recipe,
                "seed": run.seed,
                "held_out_loss": round(run.final.loss, 6),
                "held_out": [round(item.loss, 6) for item in run.evaluations],
                "seconds": round(run.seconds, 1),
            }
            for run in runs
        ],
    }


class _Job(NamedTuple):
    """What is trained from each seed, inside of the context that `around` makes."""

    label: str
    recipe: Recipe
    make: ModelFactory
    around: Callable[[], AbstractContextManager[None]] = nullcontext

    @classmethod
    def of(cls, label: str) -> _Job:
        """The job of a preset's name, or of that name and "lean"."""
        name, _, form = label.partition(", ")
        return cls(label, parse_recipes(name)[name], _lean_model if form == LEAN else model_factory("torch", "cpu"))


def _lean_model(config: TrainConfig, recipe: Recipe, vocabulary: int, seed: int) -> Model:
    from octavo_cli.train.models.torch_model import TorchModel

    return TorchModel(config, recipe, vocabulary, seed, "cpu", LEAN)


def _judged(gap: Gap, limit: float, *, must_pass: bool) -> dict[str, Any]:
    within = abs(gap.percent) <= limit
    return {**gap.as_dict(), "limit_percent": limit, "within": within, "as_expected": within is must_pass}


def main(out: Annotated[Path, typer.Option(help="JSON file to write.")]) -> None:
    """Run the training gates and write their numbers; exit code 1 where one is not as expected."""
    out.parent.mkdir(parents=True, exist_ok=True)
    check_writable("--out", out, "training-gates.json")
    result = measure()
    write_whole(out, json.dumps(result, indent=1, allow_nan=False) + "\n")
    for row in [*result["gates"], *result["planted_faults"]]:
        typer.echo(
            f"{row['recipe']:<14} gap {row['percent']:+.2f} % ± {row['spread_percent']:.2f} over {row['spread_over']}, "
            f"limit {row['limit_percent']} %: {'as expected' if row['as_expected'] else 'NOT AS EXPECTED'}"
        )
    raise typer.Exit(0 if result["passed"] else 1)


if __name__ == "__main__":
    typer.run(main)
