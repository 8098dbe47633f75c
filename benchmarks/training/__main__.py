"""Held-out loss of each recipe beside bf16's: a MoE model with 64 experts, 2000 steps of real text, 3 paired seeds.

    python benchmarks/training --output training.json                         # on a GPU; a step is one CUDA graph
    python benchmarks/training --quick --device cpu --output training.json    # tiny: does everything work?

All recipes of a seed start from the same parameters and see the same batches. The text is the sources of Python's
standard library, cut into chunks of 4096 bytes, every tenth of which is held out; `--text FILE` takes another. The file
is written after every run, and a run that it has already is not repeated: the same command goes on with what
`--seconds` or a crash has left.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import platform
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

import octavo_torch
from octavo_cli.train.config import BASELINE, TrainConfig, parse_recipes
from octavo_cli.train.data import Corpus
from octavo_cli.train.models.model import learning_rate
from octavo_cli.train.report.results import Evaluation, Run, gap_at

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parent.parent))
from decoder import BETAS, Trainer
from library_text import read_text

FULL = TrainConfig(
    steps=2000, seeds=3, experts=64, top_k=8, width=1024, hidden=512, layers=2, batch=8, context=512,
    evaluations=10, held_out=128, learning_rate=6e-4,
)  # fmt: skip
QUICK = TrainConfig(
    steps=8, seeds=1, experts=4, top_k=2, width=64, hidden=32, batch=2, context=32, evaluations=2, held_out=4,
)  # fmt: skip
RECIPES = "bf16,fp8-delayed,fp8-current,fp8-row,fp8-block,mxfp8,mxfp4,nvfp4"
"""MXFP8 with folded products has the bits of fp8-block."""
WINDOW = 20
"""Steps whose mean loss is one number of the file."""


def train(trainer: Trainer, batches: Tensor, held_out: Tensor) -> dict[str, Any]:
    """One run on batches [steps, batch, context + 1], judged by held-out tokens [held_out, context + 1]."""
    config, device = trainer.config, batches.device
    losses = torch.zeros(config.steps, device=device)
    evaluations: list[tuple[int, Tensor]] = []
    times: list[float] = []
    wait(device)
    start, first = time.perf_counter(), 1  # the first step captures the graph
    for step, tokens in enumerate(batches):
        trainer.lr.fill_(learning_rate(config, step))
        trainer.step(tokens)
        losses[step].copy_(trainer.loss)
        if step == 0:
            wait(device)
            start = time.perf_counter()
        if step + 1 in config.evaluation_steps:
            wait(device)
            if step >= first:
                times.append((time.perf_counter() - start) / (step + 1 - first))
            evaluations.append((step + 1, trainer.evaluate(held_out)))
            wait(device)
            start, first = time.perf_counter(), step + 1
    means = losses.view(-1, min(WINDOW, config.steps)).mean(1)
    return {
        "ms_per_step": round(float(np.median(times)) * 1e3, 4),
        "train_loss": [number(value) for value in means.tolist()],
        "held_out": [{"step": step, "loss": number(float(each.mean()))} for step, each in evaluations],
        "held_out_sequences": [number(value) for value in evaluations[-1][1].tolist()],
    }


def number(value: float) -> float | None:
    """Six decimals; None for a number that JSON does not have."""
    return round(value, 6) if math.isfinite(value) else None


def wait(device: torch.device) -> None:
    """Waits for the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def batches_of(corpus: Corpus, config: TrainConfig, seed: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """A seed's batches, and the held-out tokens, which all seeds share."""
    drawn = np.stack([corpus.batch(seed, step, config.batch, config.context) for step in range(config.steps)])
    held_out = corpus.evaluation(config.held_out, config.context)
    return torch.from_numpy(drawn).to(device).long(), torch.from_numpy(held_out).to(device).long()


def summary(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The gap of each recipe to bf16 after the last step, over the seeds that both have finished."""
    finished = [row for row in rows if None not in row["held_out_sequences"]]
    runs = [
        Run(row["recipe"], row["seed"], evaluations=[Evaluation(0, np.array(row["held_out_sequences"]))])
        for row in finished
    ]
    seeds = {run.seed for run in runs if run.recipe == BASELINE}
    names = dict.fromkeys(run.recipe for run in runs if run.recipe != BASELINE and run.seed in seeds)
    return [gap_at(runs, name).as_dict() for name in names]


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="a JSON file; runs that it has are not repeated")
    parser.add_argument("--quick", action="store_true", help="a tiny model and a few steps: does everything work?")
    parser.add_argument("--recipes", default=RECIPES, help="names with commas; bf16 always runs, and first")
    parser.add_argument("--steps", type=int)
    parser.add_argument("--seeds", type=int)
    parser.add_argument("--text", type=Path, help="a file to learn instead")
    parser.add_argument("--seconds", type=float, default=math.inf, help="start no run that would end later")
    parser.add_argument("--device", default="cuda")
    options = parser.parse_args()
    given = {name: getattr(options, name) for name in ("steps", "seeds") if getattr(options, name) is not None}
    config = TrainConfig(**{**(QUICK if options.quick else FULL).as_dict(), **given})
    device, began, longest, left = torch.device(options.device), time.perf_counter(), 0.0, 0
    corpus = read_text(options.text, config.context)
    record: dict[str, Any] = {
        "schema_version": 1,
        "command": "python benchmarks/training --output FILE",
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "machine": torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine(),
        "versions": {
            "python": platform.python_version(), "torch": torch.__version__, "octavo-torch": octavo_torch.__version__,
        },
        "text": {
            "source": corpus.source, "sha256": corpus.sha256, "bytes": len(corpus.train) + len(corpus.held_out),
            "unigram_loss": round(corpus.unigram_loss(corpus.evaluation(config.held_out, config.context)), 6),
        },
        "config": {**config.as_dict(), "betas": BETAS, "loss_window": WINDOW},
        "gaps": [],
        "runs": [],
    }  # fmt: skip
    if options.output.exists():
        kept = json.loads(options.output.read_text())
        same = all(json.dumps(kept[name]) == json.dumps(record[name]) for name in ("text", "config"))
        if not same:
            parser.error(f"{options.output} has runs of another text or configuration; give another file")
        record["runs"] = kept["runs"]
    done = {(row["recipe"], row["seed"]) for row in record["runs"]}
    for seed in config.all_seeds:
        data = None
        for name, recipe in parse_recipes(options.recipes).items():
            if (name, seed) in done:
                continue
            if time.perf_counter() - began + longest >= options.seconds:
                left += 1
                continue
            data = batches_of(corpus, config, seed, device) if data is None else data
            start = time.perf_counter()
            trainer = Trainer(config, recipe, len(corpus.vocabulary), seed, device)
            row = {"recipe": name, "seed": seed, "machine": record["machine"], **train(trainer, *data)}
            del trainer
            gc.collect()
            if device.type == "cuda":
                torch.cuda.empty_cache()
            row["seconds"] = round(time.perf_counter() - start, 2)
            longest = max(longest, row["seconds"])
            record["runs"].append(row)
            record["gaps"] = summary(record["runs"])
            options.output.write_text(json.dumps(record, indent=1, allow_nan=False) + "\n")
            held = row["held_out"][-1]["loss"]
            print(
                f"{name:14} seed {seed}  held out {held}  {row['ms_per_step']} ms per step  {row['seconds']} s",
                flush=True,
            )
    if left:
        print(f"{left} runs are left; the same command goes on with them")
    for gap in record["gaps"]:
        print(f"{gap['recipe']:14} gap {gap['percent']:+.3f} % ± {gap['spread_percent']:.3f} over {gap['spread_over']}")


if __name__ == "__main__":
    main()
