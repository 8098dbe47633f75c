"""`octavo bench mlp` on the reference backend: every recipe fused and in a row, and the goal between the two."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from octavo_bench.harness.recipes import FRAMEWORK as PEER
from octavo_bench.harness.shapes import EXPERTS
from octavo_bench.harness.timing import Times
from octavo_bench.mlp.benchmark import FUSED, IN_A_ROW, MlpRow, Way


def test_recipes_both_ways(tmp_path: Path, run: Any, goals_file: Path, has_the_schema_of: Any) -> None:
    """A row each, a stateful and a stochastic recipe among them; what is fused is told; no goals on a CPU."""
    target, kinds = tmp_path / "mlp.json", ("bf16", "delayed", "nvfp4")
    line = ["bench", "mlp", "--device", "cpu", "--backend", "torch-reference", "--kinds", ",".join(kinds)]
    result = run(*line, "--shape", "3,48,80,150", "--repeats", "1", "--output", str(target), "--goals", str(goals_file))
    assert result.code == 0, result.out[-3000:] + result.err
    content = json.loads(target.read_text())
    # torch's wgrad wants aligned groups: with others it is a note
    rows = [(row["kind"], row["way"]) for row in content["rows"] if row["kind"] != PEER]
    assert rows == [(kind, way) for kind in kinds for way in (IN_A_ROW, FUSED)]
    assert content["failures"] == []
    assert content["goals"] == {"reached": 0, "of": 0}
    assert all(row["ms"] > 0 for row in content["rows"])
    fused = {row["kind"]: row["fused"] for row in content["rows"] if row["way"] == FUSED}
    assert "activation composed: no backend serves act_quantize" in fused["nvfp4"]
    assert "weighted rows" in result.out
    has_the_schema_of(content, "mlp-h200-2026-11-30.json")


def test_both_ways_have_the_same_gradients(seed: int) -> None:
    """What is timed is the same work: gradients close to each other, in the leaves' dtypes."""
    import torch

    from octavo_bench.harness.engine.torch import TorchEngine
    from octavo_bench.harness.shapes import Shape
    from octavo_bench.mlp.torch import draw_experts, mlp_calls

    experts = draw_experts(TorchEngine("cpu"), Shape("tiny", 3, 48, 80, 152), (64, 0, 88), seed, probs=True)
    for kind in ("bf16", "delayed"):
        fused, plain = (mlp_calls(experts, kind, "torch-reference", fused=way)[0]() for way in (True, False))
        for ours, theirs, leaf in zip(fused, plain, experts.sets[0], strict=False):
            assert (ours.shape, ours.dtype) == (leaf.shape, leaf.dtype)
            # in a row the activation is rounded to bf16 up to four times, and delayed scaling's E5M2 once, by 2^-3
            limit = 2.0**-6 if kind == "bf16" else 2.0**-3
            assert torch.linalg.vector_norm((ours - theirs).float()) <= limit * torch.linalg.vector_norm(theirs.float())


def _row(kind: str, way: Way, ms: float) -> MlpRow:
    return MlpRow(EXPERTS[1], "even", kind, way, ("torch-native",), "", Times(1e3 * ms, 1e3 * ms, 1e3 * ms))


def test_the_goal_is_held_against_the_same_recipe(judged: Any) -> None:
    """1.15 of the operations in a row; bf16 fuses nothing and has none."""
    rows = [_row("block", IN_A_ROW, 11.6), _row("block", FUSED, 10.0), _row("bf16", IN_A_ROW, 9.0)]
    rows.append(_row("bf16", FUSED, 10.0))
    assert [[goal.passed for goal in judged("mlp", row, rows)] for row in rows] == [[], [True], [], []]
    assert not judged("mlp", _row("block", FUSED, 10.2), rows)[0].passed
