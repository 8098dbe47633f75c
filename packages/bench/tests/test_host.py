"""`octavo bench host` on the reference backend: its tables in every kind of recipe, and its goals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from octavo_bench.harness.recipes import FRAMEWORK as PEER
from octavo_bench.harness.shapes import MODELS, Shape
from octavo_bench.harness.timing import Times
from octavo_bench.host.benchmark import ApiRow, Graph, HostRow


def test_python_and_the_api_beside_the_kernels(
    tmp_path: Path, run: Any, goals_file: Path, has_the_schema_of: Any
) -> None:
    """A row a recipe in each table; graphs and goals are a GPU's."""
    target, kinds = tmp_path / "host.json", ("bf16", "delayed")
    line = ["bench", "host", "--device", "cpu", "--backend", "torch-reference", "--kinds", ",".join(kinds), "--quick"]
    result = run(
        *line, "--shape", "3,48,80,150", "--sizes", "skewed", "--output", str(target), "--goals", str(goals_file)
    )
    assert result.code == 0, result.out[-3000:] + result.err
    content = json.loads(target.read_text())
    # torch's own grouped GEMM, where this torch has it, then ours
    assert [row["kind"] for row in content["host"] if row["kind"] != PEER] == list(kinds)
    blocks = [row for row in content["blocks"] if row["kind"] != PEER]
    assert [(row["kind"], row["tokens"], row["replay_us"]) for row in blocks] == [(kind, 16, None) for kind in kinds]
    assert all(row[time]["median"] > 0 for row in content["blocks"] for time in ("host_us", "host_one_thread_us"))
    assert [(row["kind"], row["sizes"], row["replay_us"]) for row in content["layers"]] == [
        (kind, "skewed", None) for kind in kinds
    ]
    assert content["failures"] == []
    assert content["goals"] == {"reached": 0, "of": 0}
    assert "API / KERNELS" in result.out
    has_the_schema_of(content, "host-h200-2026-11-30.json")


def _times(us: float) -> Times:
    return Times(us, us, us)


@pytest.mark.parametrize(
    ("api", "raw", "replay", "kernels", "passed"),
    [(1029, 1000, 1019, 1000, [True, True]), (1031, 1000, 1021, 1000, [False, False])],
)
def test_goals(api: float, raw: float, replay: float, kernels: float, passed: list[bool], judged: Any) -> None:
    """3 % over the kernels, 2 % over those of a replay, 100 microseconds of the host; on a GPU alone."""
    graph = Graph(_times(1.0), _times(replay), kernels)
    row = ApiRow(MODELS[1], "even", "block", ("torch-native",), _times(api), _times(raw), graph)
    assert [goal.passed for goal in judged("host", row, [row])] == passed
    shape = Shape("host", 512, 256, 256, 4096)
    for us in (99.0, 101.0):
        (goal,) = judged("host", HostRow("block", shape, ("torch-native",), _times(us)), [])
        assert goal.passed is (us < 100)
    assert judged("host", HostRow("block", shape, ("torch-native",), _times(9.0)), [], device="cpu") == []
    assert judged("host", HostRow(PEER, shape, (), _times(9.0)), []) == []
