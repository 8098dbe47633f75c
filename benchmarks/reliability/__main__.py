"""What the scoreboard counts and no other command writes down: `python benchmarks/reliability MEASURE --out FILE`.

    casts        every fp32 pattern through each cast of the definition
    properties   the definition's properties, and the examples that each was tried on
    vectors      the recorded vectors on every backend that is installed, byte for byte
    repeats      a layer's forward and backward a thousand times, by one thread and by eight
    batches      rows and tokens in a thousand random batches each, with the bits that they have at home
    graphs       a captured MoE layer replayed a thousand times with other routings, on a GPU
    malformed    recipes, sizes, calls and files that are damaged: refused or harmless, never a crash
    soak         ten thousand training steps in flat memory; processes killed on the way, and resumed to the same bits

Each but graphs runs on a CPU; repeats, batches and graphs run on a GPU (`--device cuda`). It prints its result, and
writes it with date, commit, machine and versions. Exit status 1: it found what must not be. `docs/scoreboard.md` shows
the files of benchmarks/results.
"""

from __future__ import annotations

import argparse
import json
import sys
from importlib import import_module
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from record import stamped

MEASURES = ("casts", "properties", "vectors", "repeats", "batches", "graphs", "malformed", "soak")
ON_GPUS = ("repeats", "batches", "graphs")


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("measure", choices=MEASURES)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--count", type=int, help="repeats, malformed inputs or steps; None: what the scoreboard has")
    parser.add_argument(
        "--device", choices=("cpu", "cuda"), default="cpu", help="repeats, batches and graphs: where they run"
    )
    options = parser.parse_args()
    if options.device != "cpu" and options.measure not in ON_GPUS:
        parser.error(f"{options.measure} runs on a CPU; {' and '.join(ON_GPUS)} take --device")
    if options.device == "cpu" and options.measure == "graphs":
        parser.error("graphs needs CUDA graphs; add --device cuda")
    where = {"device": options.device} if options.measure in ON_GPUS else {}
    found = import_module(options.measure).measure(options.count, **where)
    device = f" --device {options.device}" if options.device != "cpu" else ""
    content = stamped(f"python benchmarks/reliability {options.measure}{device} --out FILE", found)
    text = json.dumps(content, indent=1) + "\n"
    print(text, end="")
    options.out.write_text(text)
    return int(bool(found["faults"]))


if __name__ == "__main__":
    sys.exit(main())
