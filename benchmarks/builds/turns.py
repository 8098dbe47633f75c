"""Builds in processes of their own, which are asked for calls in turns: scripts of this folder use it.

Each build makes the same random operands in its process. The parent asks the processes in turn for a batch of calls, so
that all of them meet the same clocks; a ratio is the median over neighbouring batches.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Protocol


class Call(Protocol):
    """A call of a build with its arrays on the device."""

    def run(self) -> None:
        """Queue one call."""

    def digest(self) -> list[int]:
        """What tells its results from others."""


def digest(array: Any) -> list[int]:
    """Two sums over the words of a tensor of 1, 2 or 4 bytes per element."""
    import torch

    whole = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[array.element_size()]
    words = array.view(whole).reshape(-1)
    plain = weighted = 0
    for part in words.split(1 << 26):
        wide = part.to(torch.int64)
        plain += int(wide.sum())
        weighted += int((wide * (torch.arange(len(wide), device="cuda") % 65521 + 1)).sum())
    return [plain, weighted]


def serve(new_call: Callable[[dict[str, Any]], Call]) -> None:
    """Answers requests, one JSON document per line: {"case"} prepares and tells the bits, {"count"} times calls."""
    import torch

    call: Call | None = None
    for line in sys.stdin:
        request = json.loads(line)
        try:
            if "case" in request:
                call = None
                torch.cuda.empty_cache()
                call = new_call(request["case"])
                call.run()
                answer: Any = call.digest()
            else:
                assert call is not None
                torch.cuda.synchronize()
                start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                start.record()
                for _ in range(request["count"]):
                    call.run()
                end.record()
                torch.cuda.synchronize()
                answer = 1e3 * start.elapsed_time(end) / request["count"]
        except ValueError as error:
            answer = str(error)
        print(json.dumps(answer), flush=True)


class Build:
    """A process of `script`, with --serve and `arguments`, in which one build's folder comes first on the path."""

    def __init__(self, folder: Path, script: str, *arguments: str) -> None:
        path = os.pathsep.join(filter(None, (str(folder.resolve()), os.environ.get("PYTHONPATH", ""))))
        self._process = subprocess.Popen(
            [sys.executable, script, "--serve", *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": path},
        )

    def begin(self, **request: Any) -> None:
        """Sends a request."""
        assert self._process.stdin is not None
        print(json.dumps(request), file=self._process.stdin, flush=True)

    def answer(self) -> Any:
        """The answer; RuntimeError where the process has ended."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"a build's process ended with {self._process.wait()}; its error is above")
        return json.loads(line)

    def ask(self, **request: Any) -> Any:
        """Both."""
        self.begin(**request)
        return self.answer()

    def close(self) -> None:
        """Ends the process."""
        if self._process.stdin is not None:
            self._process.stdin.close()
        self._process.wait()


def digests_of(builds: list[Build], cases: list[dict[str, Any]]) -> list[Any]:
    """Of all builds, which work at the same time on a case each."""
    for build, case in zip(builds, cases, strict=True):
        build.begin(case=case)
    return [build.answer() for build in builds]


def in_turns(builds: list[Build], turns: int, batch_us: float) -> dict[str, Any]:
    """Medians in microseconds of what the builds have prepared, and each build's time over the first's."""
    once = max(build.ask(count=1) for build in builds)
    count = max(2, min(200, int(batch_us / once)))
    times: list[list[float]] = [[] for _ in builds]
    for turn in range(turns):
        for at in range(len(builds)):
            number = (at + turn) % len(builds)
            times[number].append(builds[number].ask(count=count))
    ratios = [sorted(b / a for a, b in zip(times[0], each, strict=True)) for each in times]
    return {
        "us": [round(statistics.median(each), 1) for each in times],
        "over_first": [round(statistics.median(each), 4) for each in ratios],
        "quartiles": [[round(each[len(each) // 4], 4), round(each[-1 - len(each) // 4], 4)] for each in ratios],
    }


def machine() -> dict[str, str]:
    """For a result file."""
    import torch

    return {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "python": platform.python_version()}


def options_of(description: str | None, shapes: Sequence[str], batch_ms: float) -> argparse.ArgumentParser:
    """What the command line of a comparison of builds of octavo-native takes in any case."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("builds", type=Path, nargs="*", help="folders with octavo_native; the first is compared with")
    parser.add_argument("--names", default="", help="of the builds in the result file, by commas")
    parser.add_argument("--output", type=Path, help="result file (JSON)")
    parser.add_argument("--shapes", default=",".join(shapes), help="by commas")
    parser.add_argument("--turns", type=int, default=9, help="batches of each build per case")
    parser.add_argument("--batch-ms", type=float, default=batch_ms, help="time of one batch")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    return parser


def finish(
    options: argparse.Namespace, bits: dict[str, Any], rows: list[dict[str, Any]], facts: dict[str, Any] | None = None
) -> int:
    """Writes `--output`, with `facts` beside the builds' names; the exit status: 1 where bits differ."""
    if options.output is not None:
        document = {
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "machine": machine(),
            "builds": options.names.split(","),
            **(facts or {}),
            "bits": bits,
            "rows": rows,
        }
        options.output.write_text(json.dumps(document, indent=1) + "\n")
    return 1 if bits["different"] or not all(row["equal_bits"] for row in rows) else 0
