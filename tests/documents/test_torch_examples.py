"""The examples of docs/ that need PyTorch do what their pages say."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest
from workspace import ROOT

ABORTED_AT_EXIT = "terminate called without an active exception"
"""What a process of torch's gloo says where it aborts after its work, once in dozens of runs.

docs/field-notes/torch-distributed.md has what is known of it.
"""

ON_TWO_RANKS = ("torch_expert_parallel.py", "torch_moe_over_ranks.py")
EXAMPLES = (*ON_TWO_RANKS, "torch_lora.py")

# Ranks that `mp.spawn` starts would each import torch and octavo_torch, which is nearly all of an example's time.
ONE_AFTER_ANOTHER = """
import pickle, runpy, sys
import torch.multiprocessing as mp
from octavo_torch import ExpertExchange, GroupedMLP, MoE, bytes_exchanged, permute, unpermute

def fork(function, args, nprocs):
    pickle.dumps(args)  # mp.spawn does
    mp.start_processes(function, args, nprocs, start_method="fork")

mp.spawn = fork
for path in sys.argv[1:]:
    sys.argv = [path]
    print("example", path, flush=True)
    runpy.run_path(path, run_name="__main__")
"""


@pytest.fixture(scope="module")
def printed() -> dict[str, str]:
    """By each example, all of them in one process after another's import of torch."""
    paths = [str(ROOT / "docs" / "examples" / name) for name in EXAMPLES]
    command = [sys.executable, "-c", ONE_AFTER_ANOTHER, *paths]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    if ABORTED_AT_EXIT in done.stderr:
        done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    _, *outputs = re.split(r"^example .*$", done.stdout, flags=re.MULTILINE)
    return dict(zip(EXAMPLES, outputs, strict=True))


def test_adapters_over_frozen_codes(printed: dict[str, str]) -> None:
    """The adapters learn what they can, and are stored and loaded alone."""
    output = printed["torch_lora.py"]
    (told,) = re.findall(r"^loss ([\d. ]+)$", output, flags=re.MULTILINE)
    losses = [float(loss) for loss in told.split()]
    assert losses[-1] < losses[0] / 2
    assert re.search(r"^stored \d+ bytes of adapters$", output, flags=re.MULTILINE)


@pytest.mark.parametrize("example", ON_TWO_RANKS)
def test_experts_on_two_ranks(example: str, printed: dict[str, str]) -> None:
    """Both ranks train, on one loss, and it falls."""
    told = dict(re.findall(r"rank (\d) of 2: loss ([\d. ]+)", printed[example]))
    assert told.keys() == {"0", "1"}
    assert told["0"] == told["1"]
    losses = [float(loss) for loss in told["0"].split()]
    assert losses[-1] < losses[0]
