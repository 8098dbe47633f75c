"""Experts on several devices train as on one: held-out loss of both over paired seeds, in JAX.

    python -m octavo_cli.train.parallel --devices 4 --out parallel.json

The runs of a pair start from the same parameters and see the same batches; what differs is where experts and sequences
lie, and so the order of sums, which training amplifies as it does another seed. The mean gap has to stay within the
spread of the loss over seeds on one device.
"""

from __future__ import annotations

import json
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from octavo import Recipe
from octavo import recipe as preset
from octavo_cli.errors import InputError
from octavo_cli.train.config import TrainConfig
from octavo_cli.train.data import read_corpus
from octavo_cli.train.demo import versions
from octavo_cli.train.loop import train_one
from octavo_cli.train.report.live import RunLines
from octavo_cli.train.report.results import Run
from octavo_registry.cli.files import check_writable, write_whole


@dataclass(frozen=True, slots=True)
class Pairs:
    """Final held-out losses by seed, on one device and on several."""

    one: tuple[float, ...]
    many: tuple[float, ...]

    @property
    def spread_percent(self) -> float:
        """Standard deviation of one device's loss over the seeds, in per cent of its mean."""
        return 100 * statistics.stdev(self.one) / statistics.fmean(self.one)

    @property
    def gap_percent(self) -> float:
        """Mean of the paired gaps, in per cent of one device's mean loss."""
        gaps = (many - one for one, many in zip(self.one, self.many, strict=True))
        return 100 * statistics.fmean(gaps) / statistics.fmean(self.one)

    @property
    def within(self) -> bool:
        """Whether several devices train as one does."""
        return abs(self.gap_percent) <= self.spread_percent


def compare(config: TrainConfig, name: str, device: str, devices: int, payload: Recipe | None) -> dict[str, Any]:
    """Train every seed on one device and on `devices`; plain values for JSON, `within` the verdict."""
    import jax

    from octavo_cli.train.models.jax_model import JaxModel
    from octavo_cli.train.models.spread import Spread
    from octavo_jax.moe import Exchange

    corpus, recipe = read_corpus(None, config.context), preset(name)
    runs: dict[int, list[Run]] = {}
    for count in (1, devices):
        spread = Spread(count, Exchange(payload=payload))

        def make(config: TrainConfig, recipe: Recipe, vocabulary: int, seed: int, spread: Spread = spread) -> JaxModel:
            return JaxModel(config, recipe, vocabulary, seed, device, spread)

        label = f"{count} device{'s' if count > 1 else ''}"
        runs[count] = [train_one(config, label, recipe, seed, corpus, make, RunLines()) for seed in config.all_seeds]
    pairs = Pairs(*(tuple(run.final.loss for run in group) for group in runs.values()))
    return {
        "schema_version": 1,
        "command": "python -m octavo_cli.train.parallel",
        "device": jax.devices(device)[0].device_kind,
        "devices": devices,
        "recipe": name,
        "payload": None if payload is None else payload.kind,
        "versions": versions(("jax",)),
        "text": {"source": corpus.source, "sha256": corpus.sha256},
        "config": config.as_dict(),
        "held_out_one": [round(loss, 6) for loss in pairs.one],
        "held_out_many": [round(loss, 6) for loss in pairs.many],
        "gap_percent": round(pairs.gap_percent, 4),
        "spread_percent": round(pairs.spread_percent, 4),
        "within": pairs.within,
        "seconds": [round(run.seconds, 1) for group in runs.values() for run in group],
    }


def main(
    out: Annotated[Path, typer.Option(help="JSON file to write.")],
    devices: Annotated[int, typer.Option(help="Devices that share the experts.")] = 4,
    recipe: Annotated[str, typer.Option(help="A preset.")] = "mxfp8",
    payload: Annotated[str | None, typer.Option(help="A preset whose codes travel; none: tokens as they are.")] = None,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    steps: Annotated[int, typer.Option(help="Optimizer steps.")] = 200,
    seeds: Annotated[int, typer.Option(help="Paired seeds, two or more.")] = 3,
    quick: Annotated[bool, typer.Option("--quick", help="A smaller model: does everything work?")] = False,
) -> None:
    """Train on one device and on several and write both losses; exit code 1 where they differ by more than seeds do."""
    check_writable("--out", out, "parallel.json")
    import jax

    from octavo_cli.train.config import QUICK

    sizes = {**(QUICK if quick else {}), "steps": steps, "seeds": seeds}
    config = TrainConfig(**sizes)
    if seeds < 2:
        raise InputError(f"--seeds is {seeds}; the spread is that over two or more")
    available = len(jax.devices(device))
    if not 2 <= devices <= available or config.experts % devices or config.batch % devices:
        raise InputError(
            f"--devices is {devices}; JAX sees {available} here, and {config.experts} experts and {config.batch} "
            "sequences are cut evenly among two or more of them"
        )
    result = compare(config, recipe, device, devices, None if payload is None else preset(payload))
    write_whole(out, json.dumps(result, indent=1, allow_nan=False) + "\n")
    verdict = "within" if result["within"] else "NOT WITHIN"
    typer.echo(
        f"{recipe} on {devices} devices: gap {result['gap_percent']:+.3f} %, {verdict} the spread over {seeds} seeds, "
        f"{result['spread_percent']:.3f} %"
    )
    raise typer.Exit(0 if result["within"] else 1)


if __name__ == "__main__":
    typer.run(main)
