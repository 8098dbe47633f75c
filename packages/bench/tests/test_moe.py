"""`octavo bench moe` on the reference backend: the same layer in every recipe and as torch has it, and the goal."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from octavo_bench.harness.shapes import EXPERTS
from octavo_bench.harness.timing import Times
from octavo_bench.moe.benchmark import ADDED, GATHERED, TORCHS, MoeRow

MOE = ["bench", "moe", "--device", "cpu"]


def test_a_row_per_recipe_and_two_of_torchs_own(
    tmp_path: Path, run: Any, goals_file: Path, has_the_schema_of: Any
) -> None:
    """A stateful and a stochastic recipe among them; no goals on a CPU; choices that do not fit are refused."""
    target = tmp_path / "moe.json"
    line = [*MOE, "--backend", "torch-reference", "--kinds", "delayed,nvfp4", "--quick", "--output", str(target)]
    line += ["--goals", str(goals_file)]
    result = run(*line)
    assert result.code == 0, result.out[-3000:] + result.err
    content = json.loads(target.read_text())
    assert [row["kind"] for row in content["rows"]] == [*TORCHS, "delayed", "nvfp4"]
    assert [bool(row["match"]) for row in content["rows"]] == [True, False, True, True]  # the second is compared with
    assert content["failures"] == []
    assert content["goals"] == {"reached": 0, "of": 0}
    assert "2 per token" in result.out
    has_the_schema_of(content, "moe-h200-2026-11-30.json")
    result = run(*MOE, "--choices", "3")
    assert result.code == 2
    assert "--choices is 3" in result.err


def test_what_is_timed_is_one_layer(seed: int) -> None:
    """torch's two ways and ours have the same gradients, of tokens, router and weights."""
    import torch

    from octavo_bench.harness.engine.torch import TorchEngine
    from octavo_bench.harness.shapes import Shape
    from octavo_bench.moe.peers import own_calls
    from octavo_bench.moe.torch import moe_calls
    from octavo_bench.training.moe import draw_layer

    layer = draw_layer(TorchEngine("cpu"), Shape("tiny", 4, 48, 80, 128), 2, seed)
    made = {kind: moe_calls(layer, kind, "torch-reference")[0]() for kind in ("bf16", "block")}
    added, gathered = (own_calls(layer, way)[0]() for way in (ADDED, GATHERED))
    for kind, gradients in {**made, GATHERED: gathered}.items():
        for ours, theirs, leaf in zip(gradients, added, layer.sets[0].leaves, strict=True):
            assert (ours.shape, ours.dtype) == (leaf.shape, leaf.dtype)
            if kind == "block" and leaf is layer.sets[0].leaves[1]:
                continue  # the router's: a difference of sums, of which E4M3's 2^-4 may leave anything
            limit = 2.0**-2 if kind == "block" else 2.0**-4
            assert torch.linalg.vector_norm((ours - theirs).float()) <= limit * torch.linalg.vector_norm(theirs.float())


def _row(kind: str, ms: float, *, at: int = 1) -> MoeRow:
    return MoeRow(EXPERTS[at], 8, kind, (), Times(1e3 * ms, 1e3 * ms, 1e3 * ms))


@pytest.mark.parametrize(("ms", "passed"), [(10.0, True), (10.5, False)])
def test_the_goal_is_held_against_torchs_faster_way(ms: float, passed: bool, judged: Any) -> None:
    """1.45 of it, for FP8 recipes at DeepSeek-V3's sizes."""
    rows = [_row(ADDED, 20.0), _row(GATHERED, 15.0), _row(ADDED, 1.0, at=0)]
    assert [goal.passed for goal in judged("moe", _row("block", ms), rows)] == [passed]
    assert judged("moe", _row("mxfp8", ms), rows) == judged("moe", _row("block", ms, at=0), rows) == []
