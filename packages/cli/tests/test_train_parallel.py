"""Training with experts on several devices: `python -m octavo_cli.train.parallel`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from octavo_cli.train.parallel import Pairs, main
from octavo_registry.cli.errors import BadInput

MAIN = [sys.executable, "-m", "octavo_cli.train.parallel", "--device", "cpu", "--quick"]


def _run(*options: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=2"}
    return subprocess.run([*MAIN, *options], env=environment, capture_output=True, text=True, check=False, timeout=300)


@pytest.mark.slow
def test_two_devices_train_as_one(tmp_path: Path) -> None:
    """The same losses over a few steps, far within what another seed changes; where they may differ is the order of
    sums. The file says what ran."""
    target = tmp_path / "parallel.json"
    result = _run("--devices", "2", "--recipe", "bf16", "--steps", "3", "--seeds", "2", "--out", str(target))
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr
    content = json.loads(target.read_text())
    assert content["within"]
    assert content["held_out_many"] == pytest.approx(content["held_out_one"], rel=1e-3)
    assert len(set(content["held_out_one"])) == 2
    assert (content["devices"], content["recipe"], content["payload"]) == (2, "bf16", None)


def test_the_file_is_checked_before_the_work(tmp_path: Path) -> None:
    """What takes minutes to train would be lost where its file cannot be written."""
    with pytest.raises(BadInput, match=r"--out .*: there is no folder .*; create it or name another"):
        main(tmp_path / "missing" / "parallel.json")


def test_a_gap_beyond_the_seeds_is_seen() -> None:
    """The verdict: a mean gap against the standard deviation over seeds, both in per cent of one device's loss."""
    pairs = Pairs(one=(2.0, 2.02, 1.98), many=(2.01, 2.03, 1.99))
    assert pairs.spread_percent == pytest.approx(1.0)
    assert pairs.gap_percent == pytest.approx(0.5)
    assert pairs.within
    assert not Pairs(one=pairs.one, many=(2.03, 2.05, 2.01)).within
