"""`octavo bench ep` on virtual devices and the reference backend; its goals."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from octavo_bench.ep.nvlink import received_in_a_step
from octavo_bench.ep.rows import EpRow, Gathered
from octavo_bench.errors import RunError
from octavo_bench.harness.shapes import EXPERTS
from octavo_bench.harness.timing import Times

MAIN = [sys.executable, "-c", "from octavo_registry.cli import main; main()", "bench", "ep", "--device", "cpu"]


ONCE = ["--backend", "jax-reference", "--repeats", "1"]


def _process(line: list[str]) -> subprocess.CompletedProcess[str]:
    """A process in which JAX has two devices."""
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=2".strip()
    environment = {**os.environ, "XLA_FLAGS": flags}
    return subprocess.run(line, env=environment, capture_output=True, text=True, check=False, timeout=300)


def test_one_device_and_two(tmp_path: Path, goals_file: Path, has_the_schema_of: Any) -> None:
    """A row on one device and one on two, nothing dropped; what moves is counted in the program: T tokens gathered and
    their gradients, two sums sent home, and the kernel that FSDP cuts."""
    target = tmp_path / "ep.json"
    options = ["--kinds", "bf16", "--shape", "4,64,32,64", "--slack", "2", "--goals", str(goals_file)]
    result = _process([*MAIN, *ONCE, *options, "--output", str(target)])
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr
    content = json.loads(target.read_text())
    assert [(row["devices"], row["way"], row["dropped"]) for row in content["rows"]] == [(1, "", 0), (2, "gather", 0)]
    tokens, width = 64 // 2, 64
    # XLA:CPU moves bf16 as fp32; of choices and weights, 8 bytes for each of 2, half comes from the other device
    assert content["rows"][1]["received_bytes"] >= 4 * tokens * width * 4 / 2
    assert content["rows"][1]["received_bytes"] <= (4 * tokens * width * 4 + 4 * tokens * 2 * 8) / 2
    assert [row["gathered_bytes"] for row in content["gathered"]] == [2 * 4 * 64 * 64 * 4]  # for fprop and dgrad
    assert content["failures"] == []
    assert content["goals"] == {"reached": 0, "of": 0}
    has_the_schema_of(content, "ep-h200-2026-11-22.json")


@pytest.mark.slow
def test_one_process_and_two_in_torch(tmp_path: Path, has_the_schema_of: Any) -> None:
    """A row in one process and four over two: rows and sums, tokens as they are and as codes. Nothing is dropped, codes
    are fewer bytes, and so are sums."""
    target = tmp_path / "ep.json"
    options = ["--framework", "torch", "--kinds", "mxfp8", "--shape", "4,64,32,64", "--repeats", "1"]
    line = [*MAIN, "--backend", "torch-reference", "--output", str(target), *options]
    result = subprocess.run(line, capture_output=True, text=True, check=False, timeout=300)
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr
    content = json.loads(target.read_text())
    rows = {(row["devices"], row["way"], row["payload"]): row for row in content["rows"]}
    assert [*rows] == [(1, "", False), *((2, way, codes) for way in ("rows", "sums") for codes in (False, True))]
    assert {row["dropped"] for row in content["rows"]} == {0}
    received = {case: row["received_bytes"] for case, row in rows.items()}
    for way in ("rows", "sums"):
        assert 0 < received[2, way, True] < received[2, way, False]
        assert received[2, "sums", way == "sums"] < received[2, "rows", way == "sums"]
    assert "forward + backward in torch" in result.stdout
    has_the_schema_of(content, "ep-h200-2026-11-22.json")


_EACH = """
import json, sys
from typer.testing import CliRunner
from octavo_registry.cli import app
results = [CliRunner().invoke(app, line) for line in json.loads(sys.argv[1])]
print(json.dumps([(result.exit_code, result.stderr) for result in results]))
"""


def test_what_does_not_fit_is_told_before_the_work() -> None:
    """More devices than there are; rows that are not cut evenly. All in one process of two devices."""
    table = (
        (["--devices", "4"], "--devices is 4 and JAX sees 2 here; on a CPU XLA_FLAGS="),
        (["--shape", "3,64,32,64"], "is not cut evenly among 2 devices"),
        (["--framework", "torch", "--devices", "9"], "--devices is 9 and torch has at most 8 here"),
        (["--framework", "torch", "--ways", "gather"], "--ways names 'gather'"),
        (["--framework", "flax"], "--framework is 'flax'"),
        (["--slack", "0.5"], "--slack is 0.5; a device needs at least an even share"),
    )
    lines = [[*MAIN[3:], *ONCE, *options] for options, _ in table]
    process = _process([sys.executable, "-c", _EACH, json.dumps(lines)])
    assert process.returncode == 0, process.stderr
    for (options, sentence), (code, told) in zip(table, json.loads(process.stdout), strict=True):
        assert code == 2, options
        assert sentence in " ".join(told.split())


def _row(devices: int, way: str, payload: bool, ms: float) -> EpRow:
    times = Times(1e3 * ms, 1e3 * ms, 1e3 * ms)
    return EpRow(EXPERTS[1], "block", devices, way, payload, ("jax-native",), 0, None, 0, times)


def test_the_faster_way_is_held_against_one_device(judged: Any) -> None:
    """2.8 of one device, 3.2 with tokens as codes; other numbers of devices have no goal. Kernels are gathered in half
    of bf16's bytes."""
    rows = [_row(1, "", False, 10.0), _row(4, "gather", False, 3.5), _row(4, "ragged", False, 4.0)]
    rows += [_row(4, "gather", True, 3.2), _row(2, "gather", True, 5.0)]
    passed = [[goal.passed for goal in judged("ep", row, rows)] for row in rows]
    assert passed == [[], [True], [], [False], []]
    kinds = (("bf16", 1000, 750), ("block", 510, 400), ("mxfp8", 600, None))
    kernels = [Gathered(EXPERTS[1], kind, 4, held, moved) for kind, held, moved in kinds]
    gathered = [[goal.passed for goal in judged("ep", row, kernels)] for row in kernels]
    assert gathered == [[], [True, False], [False]]


def test_what_took_turns_is_compared() -> None:
    """A step over several devices is held against the same layer alone at the same clocks, where that took turns with
    it, and not against the row of another minute."""
    cold = _row(1, "", False, 10.0)
    spread = replace(_row(2, "sums", False, 12.0), alone=Times(11.4e3, 11.4e3, 11.4e3))
    assert spread.measures([cold, spread])["over one"] == pytest.approx(11.4 / 12)
    assert spread.as_dict()["alone_us"]["median"] == 11400
    alone_elsewhere = replace(spread, alone=None)
    assert alone_elsewhere.measures([cold, alone_elsewhere])["over one"] == pytest.approx(10 / 12)


def test_bytes_by_the_counters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What every link of every GPU has received, by nvidia-smi's own words; nothing where there is no such command."""
    counter = tmp_path / "count"
    counter.write_text("100")
    fake = tmp_path / "nvidia-smi"
    link = r'printf "GPU 0: NVIDIA H200\n\t Link 0: Data Tx: 7 KiB\n\t Link 0: Data Rx: %s KiB\n" $(cat COUNT)'
    fake.write_text("#!/bin/sh\n" + link.replace("COUNT", str(counter)) + "\n" + link.replace("COUNT", str(counter)))
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")

    def run(steps: int) -> None:
        counter.write_text(str(int(counter.read_text()) + 8 * steps))

    assert received_in_a_step(run, devices=2) == 2 * 8 * 1024 // 2
    fake.write_text("#!/bin/sh\nexit 1\n")
    assert received_in_a_step(run, devices=2) is None


def test_processes_that_do_not_end_are_killed_and_noted() -> None:
    """A library whose runtime hangs when it is shut down holds no GPU beside the rows that follow."""
    multiprocessing = pytest.importorskip("torch.multiprocessing")
    from octavo_bench.ep.processes import end

    for seconds, count in ((0.0, 0), (600.0, 2)):
        notes: list[str] = []
        processes = multiprocessing.start_processes(_sleep, (seconds,), nprocs=2, join=False, start_method="fork")
        end(processes, notes, within=0.5 if seconds else 60.0)
        assert not any(process.is_alive() for process in processes.processes)
        assert len(notes) == bool(count)
        assert all(note.startswith("2 processes had not ended 0.5 s") for note in notes)


def _sleep(rank: int, seconds: float) -> None:
    time.sleep(seconds)


def test_rows_after_a_process_that_died_say_so() -> None:
    """Its own row has what it raised."""
    ep = pytest.importorskip("octavo_bench.ep.torch")
    with pytest.raises(RunError, match="the processes had ended at an earlier row"):
        ep._row(None, None, ep.Case("bf16", 2), iter(()))


@pytest.mark.parametrize("captured", [True, False])
def test_nothing_is_measured_beside_processes_that_measure(captured: bool) -> None:
    """LigerCute in processes of its own came between two recipes once, and ran beside the second one's rows."""
    cases = pytest.importorskip("octavo_bench.ep.torch_cases")
    kinds = [("bf16", 1, ""), ("bf16", 2, ""), ("bf16", 2, cases.LIGER), ("block", 1, ""), ("block", 2, "")]
    order = cases.in_order((cases.Case(kind, ranks, peer=peer) for kind, ranks, peer in kinds), captured)
    assert order[-1].peer == cases.LIGER
    if not captured:  # rows of one device are this process's
        assert [case.ranks for case in order] == [1, 1, 2, 2, 2]
