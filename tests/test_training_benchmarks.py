"""The measurements that train whole models do at tiny sizes, on a CPU, what their records claim of them."""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from workspace import ROOT

BENCHMARKS = ROOT / "benchmarks"
sys.path[:0] = [str(BENCHMARKS), str(BENCHMARKS / "training"), str(BENCHMARKS / "whole_models")]

import decoder  # noqa: E402
from library_text import library, read_text  # noqa: E402
from spans import Spans  # noqa: E402

import octavo  # noqa: E402
from octavo_cli.train.config import TrainConfig  # noqa: E402

CPU = torch.device("cpu")


def train(output: Path, *arguments: str) -> dict[str, Any]:
    """`python benchmarks/training --quick` on a CPU, in this process."""
    command = [str(BENCHMARKS / "training"), "--quick", "--device", "cpu", "--output", str(output), *arguments]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", command)
        runpy.run_path(command[0], run_name="__main__")
    record: dict[str, Any] = json.loads(output.read_text())
    return record


@pytest.fixture
def text(tmp_path: Path) -> Path:
    """A text that is long enough to be split, is the same in every checkout, and is learned in a few steps."""
    path = tmp_path / "text.py"
    functions = (f"def add_{number}(value: int) -> int:\n    return value + {number}\n\n" for number in range(900))
    path.write_text("".join(functions))
    return path


def test_a_run_goes_on_where_it_was_left(tmp_path: Path, text: Path) -> None:
    """What the file has is not trained again, whatever was interrupted, and gaps appear with what they need."""
    output, given = tmp_path / "training.json", ("--text", str(text), "--seeds", "2")
    first = train(output, *given, "--recipes", "bf16")
    assert [(row["recipe"], row["seed"]) for row in first["runs"]] == [("bf16", 0), ("bf16", 1)]
    assert first["gaps"] == []
    both = train(output, *given, "--recipes", "bf16,nvfp4")
    assert both["runs"][:2] == first["runs"]
    (gap,) = both["gaps"]
    assert (gap["recipe"], gap["spread_over"], len(gap["per_seed_percent"])) == ("nvfp4", "2 paired seeds", 2)
    for row in both["runs"]:
        assert row["held_out"][-1]["step"] == both["config"]["steps"]
        assert row["held_out"][-1]["loss"] < row["train_loss"][0]
    with pytest.raises(SystemExit):
        train(output, *given, "--steps", "9")  # another run's file


def test_no_run_starts_that_would_end_too_late(tmp_path: Path, text: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A machine that is lent for some seconds is not held longer, and what is left is said."""
    output = tmp_path / "training.json"
    with pytest.raises(FileNotFoundError):
        train(output, "--text", str(text), "--recipes", "bf16,fp8-row", "--seconds", "0")
    assert "2 runs are left" in capsys.readouterr().out


def test_recipes_of_a_seed_start_alike() -> None:
    """A recipe that rounds stochastically draws a seed of its own; the parameters must not depend on that."""
    config = TrainConfig(experts=4, top_k=2, width=64, hidden=32, context=8)
    made = [decoder.Trainer(config, octavo.recipe(name), 16, 3, CPU).model for name in ("bf16", "fp8-delayed", "nvfp4")]
    other = decoder.Trainer(config, octavo.recipe("bf16"), 16, 4, CPU).model
    for one, *rest in zip(*(dict(model.named_parameters()).items() for model in made), strict=True):
        assert all(torch.equal(one[1], each[1]) for each in rest), one[0]
    assert not torch.equal(made[0].embedding.weight, other.embedding.weight)


def test_the_library_is_read_in_order_and_without_its_tests(tmp_path: Path) -> None:
    """The text depends on the Python alone, not on a file system's order or on what a distribution leaves out."""
    for name in ("b.py", "a/z.py", "test/t.py", "a/tests/u.py", "site-packages/s.py", "c.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    assert library(tmp_path) == b"a/z.py\n\nb.py"
    corpus = read_text(None, 512)
    assert len(corpus.train) > 4_000_000
    assert len(corpus.vocabulary) <= 256


@pytest.mark.parametrize(
    "path", sorted((BENCHMARKS / "results").glob("whole-losses-*.json")), ids=lambda path: path.stem
)
def test_gaps_of_a_record_follow_from_its_rows(path: Path) -> None:
    """A gap without the run behind it cannot be checked: a record names those that it has lost."""
    record = json.loads(path.read_text())
    held_out = {(row["way"], row["seed"]): row["held_out_loss"] for row in record["rows"]}
    lost = {(way, seed) for way, seed in record.get("gaps_without_rows", [])}
    assert not lost & held_out.keys()
    for gap in record["gaps"]:
        for seed, percent in enumerate(gap["per_seed_percent"]):
            if (gap["way"], seed) not in lost:
                ratio = held_out[gap["way"], seed] / held_out["grouped_mm", seed]
                assert percent == pytest.approx(100 * (ratio - 1), abs=1e-3), (gap["way"], seed)


class _Clock:
    """Milliseconds that operations take, and no others."""

    now = 0.0

    def perf_counter(self) -> float:
        return self.now / 1e3


class _Slow(torch.autograd.Function):
    """20 ms forward and 30 ms backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, clock: _Clock) -> Tensor:
        ctx.clock = clock
        clock.now += 20
        return x.clone()

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        ctx.clock.now += 30
        return dy, None


class _Block(nn.Module):
    def forward(self, x: Tensor, clock: _Clock) -> Tensor:
        y: Tensor = _Slow.apply(x, clock)  # type: ignore[no-untyped-call]
        return y * 2


def test_spans_hold_a_modules_forward_and_backward_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    """The share of experts in a step is theirs: what runs before, between and behind them is not in it."""
    clock, blocks = _Clock(), [_Block(), _Block()]
    monkeypatch.setattr("spans.time", clock)
    spans = Spans(blocks, CPU)
    x = torch.ones(3, requires_grad=True)
    y = blocks[1](_Slow.apply(blocks[0](x, clock), clock), clock)  # type: ignore[no-untyped-call]
    y.sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [4.0] * 3
    assert clock.now == 3 * (20 + 30)
    assert spans.take() == pytest.approx(2 * (20 + 30))
    assert spans.take() == 0.0
