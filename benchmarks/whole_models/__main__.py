"""Whole MoE models of transformers, trained through Octavo's adapter beside transformers' own grouped_mm.

    python benchmarks/whole_models speed qwen3-moe --layers 4 --output FILE
    python benchmarks/whole_models losses gpt-oss --output FILE
    python benchmarks/whole_models speed qwen3-moe --quick --device cpu --output FILE    # tiny: does everything work?

`speed` trains some layers of Qwen3-30B-A3B or gpt-oss-20b in their published sizes: tokens per second, the experts'
share of the step (forward and backward, by events on the stream), the peak of memory. One model serves all ways, which
take turns; `--way` names a recipe, RECIPE/FORM or RECIPE/FORM/WEIGHT_CODES, each with /linears behind it where the
projections of attention compute in the recipe, too, by `octavo_torch.Linear`, and with /norms where torch's `rms_norm`
computes the norms; `grouped_mm/norms` is transformers' with these norms. `--compiled` has `torch.compile` compile the
model's layers, in every way; what the experts take of a step is then not measured. `--optimizer octavo` adds rows with
`octavo_torch.AdamW` in 8 bits. `losses` trains small models of the same kinds on the sources of Python's standard
library, in each way and from each seed; its file is written after every run, and the same command goes on with what
`--seconds` has left. Needs transformers.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import shlex
import sys
import time
from pathlib import Path
from typing import Any

import torch
import transformers

import octavo_torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "docs" / "examples"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parent))
import loss_runs
import sinks
import throughput
from transformers_moe import MODELS
from ways import RECIPES

DEFAULTS: dict[str, dict[str, int]] = {
    "speed": {"layers": 4, "batch": 4, "length": 2048, "steps": 4},
    "losses": {"layers": 2, "batch": 16, "length": 256, "steps": 500},
}
QUICK = {"layers": 1, "batch": 2, "length": 32, "steps": 4}


def main() -> None:
    """Reads the command line, measures, prints a line per row and writes `--output`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=DEFAULTS)
    parser.add_argument("model", choices=MODELS)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--quick", action="store_true", help="a tiny model")
    parser.add_argument("--way", action="append", help="RECIPE[/FORM[/WEIGHT_CODES]][/linears][/norms], repeatable")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--batch", type=int, help="sequences of a step")
    parser.add_argument("--length", type=int, help="tokens of a sequence")
    parser.add_argument("--steps", type=int, help="steps of a run; of speed, distinct batches")
    parser.add_argument("--vocabulary", type=int, help="speed: tokens that there are, in place of the published number")
    parser.add_argument("--attention", help="default: scaled_dot_product_attention, with gpt-oss's sinks as keys")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--compiled", action="store_true", help="speed: layers compiled by torch.compile, in every way")
    parser.add_argument("--turns", type=int, default=4, help="speed: turns of each way")
    parser.add_argument("--calls", type=int, default=2, help="speed: steps of a turn, besides one that is not measured")
    parser.add_argument("--optimizer", action="append", choices=throughput.OPTIMIZERS, help="speed; default torch")
    parser.add_argument("--seeds", type=int, default=3, help="losses: runs of each way")
    parser.add_argument("--seconds", type=float, default=math.inf, help="losses: start no run that would end later")
    parser.add_argument("--lr", type=float, default=1e-3, help="losses: AdamW's rate")
    parser.add_argument("--text", type=Path, help="losses: a file to learn instead")
    options = parser.parse_args()
    for name, value in (QUICK if options.quick else DEFAULTS[options.what]).items():
        if getattr(options, name) is None:
            setattr(options, name, value)
    known = sinks.register()
    options.attention = options.attention or (known if options.model == "gpt-oss" else "sdpa")
    options.way, options.optimizer, options.seed = options.way or list(RECIPES), options.optimizer or ["torch"], 0
    chosen = {name: value for name, value in vars(options).items() if name not in ("output", "text", "seconds", "seed")}

    said = sys.argv[1:]
    place = next(place for place, word in enumerate(said) if word.startswith("--output"))
    said[place : place + 1 + ("=" not in said[place])] = ["--output", "FILE"]

    def save(found: dict[str, Any]) -> None:
        record = {
            "command": f"python benchmarks/whole_models {shlex.join(said)}",
            "date": time.strftime("%Y-%m-%d", time.gmtime()),
            "machine": torch.cuda.get_device_name() if options.device != "cpu" else platform.machine(),
            "versions": {
                "python": platform.python_version(), "torch": torch.__version__,
                "transformers": transformers.__version__, "octavo-torch": octavo_torch.__version__,
            },
            "options": chosen,
            **found,
        }  # fmt: skip
        options.output.write_text(json.dumps(record, indent=1) + "\n")

    if options.what == "speed":
        save(throughput.measure(options))
    else:
        rows = json.loads(options.output.read_text())["rows"] if options.output.exists() else []
        loss_runs.measure(options, rows, save)


if __name__ == "__main__":
    main()
