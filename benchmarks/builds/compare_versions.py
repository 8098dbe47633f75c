"""Two versions of Octavo's torch packages on one device, in turns: host time of a layer, steps of layers, MoE layers.

    pip install --target OLD ... && pip install --target NEW ...        # the two versions, each in a folder of its own
    python benchmarks/builds/compare_versions.py OLD NEW --output benchmarks/results/versions-MACHINE-DATE.json

Each version lives in a process of its own. Both hold their operands, and the parent asks them alternately for one batch
of calls, so that both meet the same clocks; what is reported is the median of the ratios of neighbouring batches. Two
whole runs one after the other differ by up to 16 % on a GPU whose power is limited.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from turns import Build

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from layers import LINEAR

Call = Callable[[], object]

EXPERTS = {  # name: (G, K, F, M, choices of a token) of a MoE layer
    "DSv3": (32, 7168, 2048, 32768, 8),
    "Qwen3-30B": (128, 2048, 768, 65536, 8),
}
KINDS = {"bf16": "bf16", "current": "fp8-current", "delayed": "fp8-delayed", "block": "fp8-block", "row": "fp8-row"}
HOST_KINDS = {**KINDS, "mxfp8": "mxfp8", "nvfp4": "nvfp4"}
HOST_SHAPE = (8, 256, 256, 1024)
SMALL = {"small": (4, 128, 256, 512)}
SMALL_EXPERTS = {"small": (4, 128, 64, 512, 2)}


def cases(quick: bool) -> list[dict[str, Any]]:
    """What is compared: {"what", "kind", "shape", "sides"} each."""
    shapes, experts = (SMALL, SMALL_EXPERTS) if quick else (LINEAR, EXPERTS)
    host = [{"what": "host", "kind": kind, "shape": "small", "sides": HOST_SHAPE} for kind in HOST_KINDS]
    steps = [{"what": "step", "kind": k, "shape": name, "sides": s} for name, s in shapes.items() for k in HOST_KINDS]
    moe = [{"what": "moe", "kind": k, "shape": name, "sides": s} for name, s in experts.items() for k in KINDS]
    return host + steps + moe


# ---- in the process of one version


def _linear(kind: str, sides: tuple[int, ...], device: str) -> Call:
    """Forward and backward of a GroupedLinear; with delayed scaling the update, too."""
    import torch

    import octavo
    import octavo_torch

    groups, k, n, rows = sides
    layer = octavo_torch.GroupedLinear(
        groups, k, n, recipe=octavo.recipe(HOST_KINDS[kind]), device=device, dtype=torch.bfloat16, seed=1
    )
    x = torch.randn(rows, k, device=device, dtype=torch.bfloat16).requires_grad_()
    dy = torch.randn(rows, n, device=device, dtype=torch.bfloat16)
    sizes = torch.full((groups,), rows // groups, device=device)

    def call() -> None:
        x.grad = layer.weight.grad = None
        layer(x, sizes).backward(dy)
        if kind == "delayed":
            octavo_torch.update_scales(layer)

    return call


def _moe(kind: str, sides: tuple[int, ...], device: str) -> Call:
    """permute, grouped_mlp with the router's weights, unpermute, and their backward."""
    import torch

    import octavo
    import octavo_torch

    groups, k, f, rows, choices = sides
    tokens = rows // choices
    mlp = octavo_torch.GroupedMLP(
        groups, k, f, recipe=octavo.recipe(KINDS[kind]), device=device, dtype=torch.bfloat16, seed=1
    )
    x = torch.randn(tokens, k, device=device, dtype=torch.bfloat16).requires_grad_()
    dy = torch.randn(tokens, k, device=device, dtype=torch.bfloat16)
    chosen = torch.arange(tokens * choices, device=device).view(tokens, choices) % groups
    weights = torch.rand(tokens, choices, device=device).requires_grad_()

    def call() -> None:
        x.grad = weights.grad = None
        for parameter in mlp.parameters():
            parameter.grad = None
        rows_of_experts, sizes, routing = octavo_torch.permute(x, chosen, groups)
        y = mlp(rows_of_experts, sizes, probs=routing.to_rows(weights))
        octavo_torch.unpermute(y, routing).backward(dy)
        if kind == "delayed":
            octavo_torch.update_scales(mlp)

    return call


def serve(backend: str) -> None:
    """Answers requests, one JSON document per line: {"case"} prepares calls, {"count"} times as many of them.

    Time is in microseconds per call: of the host for "host", else of everything until the device is idle.
    """
    import torch

    import octavo_registry

    octavo_registry.prefer(backend).__enter__()  # for the life of this process: no other backend steps in
    device = "cuda" if torch.cuda.is_available() else "cpu"
    done = torch.cuda.synchronize if device == "cuda" else lambda: None
    host_alone = False
    call: Call = lambda: None  # noqa: E731 (until the first case)
    for line in sys.stdin:
        request = json.loads(line)
        if "case" in request:
            case = request["case"]
            host_alone = case["what"] == "host"
            call = (_moe if case["what"] == "moe" else _linear)(case["kind"], tuple(case["sides"]), device)
            for _ in range(3):
                call()
            done()
            answer = 0.0
        else:
            done()
            start = time.perf_counter()
            for _ in range(request["count"]):
                call()
            if not host_alone:
                done()
            answer = 1e6 * (time.perf_counter() - start) / request["count"]
            done()
        print(json.dumps(answer), flush=True)


# ---- in the parent


def compare(old: Build, new: Build, case: dict[str, Any], turns: int, budget_us: float) -> dict[str, Any]:
    """One row: medians in microseconds, and new over old as the median of the ratios of neighbouring batches."""
    for version in (old, new):
        version.ask(case=case)
    once = max(version.ask(count=1) for version in (old, new))
    count = max(1, min(200, int(budget_us / once)))
    pairs = []
    for turn in range(turns):
        first, second = (old, new) if turn % 2 == 0 else (new, old)
        a, b = first.ask(count=count), second.ask(count=count)
        pairs.append((a, b) if turn % 2 == 0 else (b, a))
    ratios = sorted(b / a for a, b in pairs)
    return {
        **{name: case[name] for name in ("what", "kind", "shape")},
        "calls_per_batch": count,
        "old_us": statistics.median(a for a, _ in pairs),
        "new_us": statistics.median(b for _, b in pairs),
        "new_over_old": statistics.median(ratios),
        "quartiles": [ratios[len(ratios) // 4], ratios[-1 - len(ratios) // 4]],
    }


def _machine() -> dict[str, str]:
    import torch

    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "none"
    return {"gpu": gpu, "torch": torch.__version__, "python": platform.python_version(), "cpu": platform.machine()}


def main() -> None:
    """The command; `--help` says what it takes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old", type=Path, nargs="?", help="folder with the version to compare with")
    parser.add_argument("new", type=Path, nargs="?", help="folder with the version that is judged")
    parser.add_argument("--commits", default=",", help="OLD,NEW as the result file names them")
    parser.add_argument("--output", type=Path, help="result file (JSON)")
    parser.add_argument("--backend", default="torch-native", help="the one backend that may serve")
    parser.add_argument("--turns", type=int, default=11, help="batches of each version per case")
    parser.add_argument("--batch-ms", type=float, default=60.0, help="time of one batch")
    parser.add_argument("--seconds", type=float, default=1e9, help="no further case is begun after this time")
    parser.add_argument("--only", default="host,step,moe", help="which of host, step and moe")
    parser.add_argument("--quick", action="store_true", help="small shapes: what a CPU can do")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve(options.backend)
        return
    if options.old is None or options.new is None:
        parser.error("give two folders: the version to compare with and the version that is judged")
    old, new = (Build(folder, __file__, "--backend", options.backend) for folder in (options.old, options.new))
    start, rows = time.monotonic(), []
    for case in cases(options.quick):
        if case["what"] not in options.only.split(","):
            continue
        if time.monotonic() - start > options.seconds:
            print(f"time is up: {len(rows)} cases were compared", flush=True)
            break
        row = compare(old, new, case, options.turns, 1e3 * options.batch_ms)
        rows.append(row)
        low, high = row["quartiles"]
        print(
            f"{row['what']:5} {row['shape']:17} {row['kind']:8} {row['old_us']:10.1f} {row['new_us']:10.1f} us   "
            f"new / old {row['new_over_old']:.4f} ({low:.4f} to {high:.4f})",
            flush=True,
        )
    for version in (old, new):
        version.close()
    if options.output is not None:
        commits = dict(zip(("old", "new"), options.commits.split(",", 1), strict=True))
        date = datetime.now(UTC).isoformat(timespec="seconds")
        document = {"date": date, "machine": _machine(), "commits": commits, "rows": rows}
        options.output.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
