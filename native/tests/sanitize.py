"""Every kernel once, on problems as small as it takes, each array allocated exactly, for compute-sanitizer to watch.

    compute-sanitizer --tool memcheck  python native/tests/sanitize.py
    compute-sanitizer --tool racecheck python native/tests/sanitize.py
    compute-sanitizer --tool initcheck python native/tests/sanitize.py --tail unwritten
    compute-sanitizer --tool synccheck python native/tests/sanitize.py

Results are compared with the CPU kernels bit for bit, in the regions that the layouts define. Outputs are filled
before each call; workspaces are not, since their content at entry is undefined. `--tail unwritten` leaves the rows
past the sum without a value, so that initcheck sees whoever reads them; otherwise they are NaN. `--device cpu`
compares three threads with one instead, where there is no GPU. `--only gemms --share 0/4` runs every fourth GEMM from
the first on, for a tool that is too slow for all of them in one run.

What is run is every scaling and format, row, column and both planes, both layouts, three dtypes, ragged and stacked
operands, MXFP4 and rounding to it, every prologue, dequantize, convert, swizzle, pack and plan, halves that take turns,
moved rows, routers, AdamW's steps, states of delayed scaling, and every tile of every GEMM, on values whose sums are
exact in any order; shapes, sizes and dtypes take turns rather than being multiplied out, so that a tool is done in
seconds. Sizes hold empty groups, tails, and values that are negative, past the rows or near the ends of int64.
"""

from __future__ import annotations

import os

# without it torch hands out parts of larger blocks, and an overrun hits memory that is allocated
os.environ.setdefault("PYTORCH_NO_CUDA_MEMORY_CACHING", "1")

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent / "support"))  # as native/conftest.py does for pytest
from problems import Place
from sanitizing import fused, quantized, rearranged, training
from sanitizing.comparison import Comparison

import octavo_native as native

SHOWN = 30
"""Faults that are printed."""

PARTS: dict[str, Callable[[Comparison], None]] = {
    "plans": rearranged.plans,
    "quantizers": quantized.quantizers,
    "one launch": quantized.in_turns,
    "kept rows": quantized.kept_rows,
    "indexed": quantized.indexed,
    "unchanged": quantized.unchanged,
    "stacks": quantized.stacks,
    "interleaved": quantized.interleaved,
    "packed": quantized.packed,
    "rounded": quantized.rounded,
    "prologues": fused.prologues,
    "values": fused.values,
    "reshuffles": rearranged.reshuffles,
    "turns": rearranged.turns,
    "moves": rearranged.moves,
    "routers": training.routers,
    "optimizers": training.optimizers,
    "states": training.states,
    "gemms": training.gemms,
}
"""What can be run alone, in the order in which everything runs."""


def _share(text: str) -> slice:
    """Every N-th from the I-th on, of "I/N"."""
    first, _, step = text.partition("/")
    if not (first.isdecimal() and step.isdecimal() and int(first) < int(step)):
        raise argparse.ArgumentTypeError(f"{text!r} is no share; give I/N with I below N, such as 0/4")
    return slice(int(first), None, int(step))


def main() -> int:
    """Run everything; 1 where something differs."""
    parser = argparse.ArgumentParser(description="Every native kernel once, compared with the CPU's.")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tail", choices=("nan", "unwritten"), default="nan")
    parser.add_argument(
        "--only", action="append", choices=tuple(PARTS), help="a part to run, instead of all; repeatable"
    )
    parser.add_argument("--share", type=_share, default=slice(None), metavar="I/N", help="every N-th GEMM from I on")
    chosen = parser.parse_args()
    if chosen.device == "cuda" and not (torch.cuda.is_available() and native.HAS_CUDA):
        print("sanitize: no CUDA device, or octavo-native was built without CUDA; use --device cpu", file=sys.stderr)
        return 2
    place = Place(True) if chosen.device == "cuda" else Place(False, threads=3)
    check = Comparison(place, Place(False), chosen.tail, chosen.share)
    for part in chosen.only or PARTS:
        PARTS[part](check)
        print(f"{part}: {check.equal} arrays equal, {len(check.faults)} faults so far", flush=True)
    for fault in check.faults[:SHOWN]:
        print(f"FAULT {fault}")
    for reason, count in check.refusals.items():
        print(f"refused by both, {count} times: {reason}")
    print(f"{check.equal} arrays equal to the CPU's, {len(check.faults)} faults")
    return 1 if check.faults else 0


if __name__ == "__main__":
    sys.exit(main())
