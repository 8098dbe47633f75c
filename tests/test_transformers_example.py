"""The example of docs/ that trains models of transformers does what its page says, with tiny models on a CPU."""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path

import pytest
from workspace import ROOT

EXAMPLE = ROOT / "docs" / "examples" / "transformers_moe.py"
pytestmark = pytest.mark.filterwarnings("default")  # those of transformers and PEFT are not ours to judge


def run(script: Path, *arguments: str) -> None:
    """A script as the command line runs it, in this process: transformers takes longer to import than to train."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", [str(script), *arguments])
        runpy.run_path(str(script), run_name="__main__")


@pytest.mark.parametrize("model", ["qwen3-moe", "gpt-oss"])
def test_tiny_models_learn_in_every_way(model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Losses fall, those of bf16 begin as grouped_mm's do and those of a recipe near them, and the JSON has what is
    printed. The first loss is before any update: it differs by roundings of bf16 alone, of which each way has its own
    at a few hundred places of a sum that is averaged over the tokens."""
    pytest.importorskip("transformers", reason="it is not installed; `nox -s adapters` installs it")
    output = tmp_path / "result.json"
    run(EXAMPLE, model, "--device", "cpu", "--layers", "1", "--output", str(output))
    record = json.loads(output.read_text())
    rows = {row["way"]: row for row in record["rows"]}
    assert list(rows) == ["grouped_mm", "octavo bf16", "octavo mxfp8"]
    assert all(row["losses"][-1] < row["losses"][0] for row in rows.values())
    first = {way: row["losses"][0] for way, row in rows.items()}
    assert abs(first["octavo bf16"] - first["grouped_mm"]) <= 2.0**-8 * first["grouped_mm"]
    assert rows["octavo mxfp8"]["losses"] != rows["octavo bf16"]["losses"]
    assert all(row["tokens_per_second"] > 0 and row["experts_ms"] > 0 for row in rows.values())
    assert all(row["peak_bytes"] is None for row in rows.values())
    printed = capsys.readouterr().out
    assert all(way in printed for way in rows)


def test_lora_is_measured_in_every_way(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A tiny model trains in each way from the same weights, every adapter receives a gradient, and the JSON has what
    is printed. The first loss has no adapter's part yet: it differs by the recipe's rounding of the experts alone."""
    pytest.importorskip("peft", reason="it is not installed; `nox -s adapters` installs it")
    output = tmp_path / "result.json"
    small = ("--steps", "3", "--layers", "1")
    run(ROOT / "benchmarks" / "lora.py", "--device", "cpu", "--output", str(output), *small)
    printed = capsys.readouterr().out
    rows = {row["way"]: row for row in json.loads(output.read_text())["rows"]}
    assert list(rows) == ["grouped_mm", "octavo fp8-block", "octavo packed"]
    for way, row in rows.items():
        assert way in printed
        assert row["parameters_without_gradient"] == 0
        assert row["losses"][-1] != row["losses"][0]
    first = rows["grouped_mm"]["losses"][0]
    assert abs(rows["octavo fp8-block"]["losses"][0] - first) <= 2.0**-8 * first
    assert len({row["trained_parameters"] for row in rows.values()}) == 1
