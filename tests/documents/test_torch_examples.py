"""The examples of docs/ that need PyTorch do what their pages say."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest
from workspace import ROOT

ABORTED_AT_EXIT = "terminate called without an active exception"
"""What a process of torch's gloo says where it aborts after its work, once in dozens of runs: see field-notes.md."""


def test_adapters_over_frozen_codes() -> None:
    """The adapters learn what they can, and are stored and loaded alone."""
    command = [sys.executable, str(ROOT / "docs" / "examples" / "torch_lora.py")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    (told,) = re.findall(r"^loss ([\d. ]+)$", done.stdout, flags=re.MULTILINE)
    losses = [float(loss) for loss in told.split()]
    assert losses[-1] < losses[0] / 2
    assert re.search(r"^stored \d+ bytes of adapters$", done.stdout, flags=re.MULTILINE)


@pytest.mark.parametrize("example", ["torch_expert_parallel.py", "torch_moe_over_ranks.py"])
def test_experts_on_two_ranks(example: str) -> None:
    """Both ranks train, on one loss, and it falls."""
    command = [sys.executable, str(ROOT / "docs" / "examples" / example)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    if ABORTED_AT_EXIT in done.stderr:
        done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    told = dict(re.findall(r"rank (\d) of 2: loss ([\d. ]+)", done.stdout))
    assert told.keys() == {"0", "1"}
    assert told["0"] == told["1"]
    losses = [float(loss) for loss in told["0"].split()]
    assert losses[-1] < losses[0]
