"""`octavo bench remat`: what each policy of jax.checkpoint runs again, and the goals that follow."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from octavo_bench.harness.shapes import Shape
from octavo_bench.harness.timing import Times
from octavo_bench.remat.benchmark import KEPT, NOTHING, PEER, PLAIN, POLICIES, ROWS, RematRow

MAIN = [sys.executable, "-c", "from octavo_registry.cli import main; main()", "bench", "remat", "--device", "cpu"]


def _row(kind: str, policy: str, ms: float, gain: float | None = None, compile_s: float = 3.0) -> RematRow:
    times = Times(1e3 * ms, 1e3 * ms, 1e3 * ms)
    shape = Shape("own", 4, 64, 64, 128)
    return RematRow(shape, "even", kind, policy, (), times, 1.0, compile_s, None, 0, 0, over_plain=gain)


def test_goals(judged: Any, described: Any) -> None:
    """1.1 of plain remat and ten of ragged_dot, both on a GPU alone; twenty seconds to compile, tracing included."""
    rows = [_row("block", NOTHING, 9.0), _row("block", PLAIN, 11.0), _row("block", KEPT, 10.0, 1.1)]
    rows.append(_row(PEER, PLAIN, 99.0))
    told = [described(judged("remat", row, rows)) for row in rows]
    compiles = "20 s to compile: pass"
    assert told == [[], [compiles], [compiles, "1.1 of plain remat: pass", "10 of ragged_dot bf16: MISS"], []]
    slow = _row("block", ROWS, 10.1, 1.09, 19.5)
    assert [goal.passed for goal in judged("remat", slow, rows)] == [False, False, False]
    assert len(judged("remat", slow, rows, device="cpu")) == 1


def test_what_each_policy_computes_again() -> None:
    """Two products a layer, three operands each: plain remat quantizes x and the kernels twice; the activation wants
    the first product again unless y is kept (faults.md 42)."""
    from octavo_bench.remat.block import operands, step
    from octavo_jax.counting import count_runs

    given = operands("current", Shape("own", 2, 32, 32, 48), 2, (20, 28), 1)
    for policy, runs in ((PLAIN, (20, 6)), (KEPT, (12, 6)), (ROWS, (16, 4))):
        counted = count_runs(step("current", policy, "jax-reference", unroll=False), given)
        assert (counted.quantize, counted.fprop) == runs, policy


@pytest.mark.slow
def test_a_run(tmp_path: Path, has_the_schema_of: Any) -> None:
    """Every policy is compiled and timed, and the file says what was run."""
    target = tmp_path / "remat.json"
    line = [*MAIN, "--quick", "--layers", "2", "--shape", "2,32,32,48", "--backend", "jax-reference"]
    line += ["--kinds", "delayed", "--output", str(target)]
    done = subprocess.run(line, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr
    content = json.loads(target.read_text())
    assert [row["policy"] for row in content["rows"]] == list(POLICIES)
    assert all(row["ms"] > 0 and row["compile_s"] > 0 for row in content["rows"])
    assert (content["layers"], content["unrolled"], content["failures"]) == (2, False, [])
    assert "2 layers: forward + backward in jax" in done.stdout
    has_the_schema_of(content, "remat-h200-2026-11-30.json")
