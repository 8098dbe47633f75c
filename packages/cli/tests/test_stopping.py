"""Ctrl-C during `octavo train`: what has finished is kept, and nothing is half-written."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from octavo_cli.train.config import TrainConfig, parse_recipes
from octavo_cli.train.report.results import Run
from octavo_cli.train.stopping import Trained, until_stopped

RECIPES = parse_recipes("bf16,mxfp8,nvfp4")


def stopped_after(count: int, seeds: int) -> Trained:
    """Training that Ctrl-C ends after `count` runs."""

    def runs() -> Iterator[Run]:
        order = ((seed, name) for seed in range(seeds) for name in RECIPES)
        for _, (seed, name) in zip(range(count), order, strict=False):
            yield Run(name, seed)
        raise KeyboardInterrupt

    return until_stopped(TrainConfig(seeds=seeds), RECIPES, runs())


@pytest.mark.parametrize("count", range(1, 9))
def test_what_is_kept_has_every_recipe_from_every_seed(count: int) -> None:
    """Gaps are paired over seeds: a recipe with fewer of them than the baseline would be compared with others."""
    kept = stopped_after(count, seeds=3)
    assert kept.stopped
    pairs = [(run.seed, run.recipe) for run in kept.runs]
    assert pairs == [(seed, name) for seed in kept.config.all_seeds for name in kept.recipes]
    assert len(pairs) == (count if count < 3 else count - count % 3)
    assert [*kept.recipes, *kept.missing] == list(RECIPES)


def test_nothing_is_kept_where_nothing_has_finished(tmp_path: Path) -> None:
    """Ctrl-C in the first recipe ends the command, as everywhere."""
    with pytest.raises(KeyboardInterrupt):
        stopped_after(0, seeds=1)


@pytest.mark.skipif(sys.platform == "win32", reason="no SIGINT for another process")
def test_finished_recipes_survive_ctrl_c(tmp_path: Path) -> None:
    """A real process, stopped in its second recipe of three: exit code 130, the first recipe in every file of the
    output, and no temporary folder."""
    out = tmp_path / "out"
    # a shell starts what it runs in the background with SIGINT ignored, and so would this process be
    listen = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)"
    command = f"{listen}; from octavo_registry.cli import main; main()"
    recipes = ("--recipes", ",".join(RECIPES), "--framework", "torch", "--out", str(out))
    process = subprocess.Popen(
        [sys.executable, "-c", command, "train", "--quick", *recipes],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("mxfp8"):
            process.send_signal(signal.SIGINT)
            break
    told, error = process.communicate(timeout=300)
    assert process.returncode == 130, error
    assert error.strip().splitlines()[-1] == "octavo: stopped"
    assert "Stopped: keeping bf16" in told
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert sorted(path.name for path in out.iterdir()) == ["curves.json", "expert_load.png", "index.html", "loss.png"]
    curves = json.loads((out / "curves.json").read_text())
    assert curves["stopped"]
    assert "nvfp4" in curves["missing"]
    assert [run["recipe"] for run in curves["runs"]] == list(curves["recipes"])
    assert "bf16" in curves["recipes"]
    assert "stopped before" in (out / "index.html").read_text()
