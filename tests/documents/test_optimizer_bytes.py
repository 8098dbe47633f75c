"""The guide's table of AdamW's bytes per parameter is that of the tensors."""

from __future__ import annotations

import re

import pytest
import torch
from torch import nn
from workspace import ROOT

import octavo_torch

ROW = re.compile(
    r"^\| (codes|bf16|fp32)(?:,| or bf16)?[^|]*\| `(\w+)` \| (\d+) \| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \|$", re.M
)
ROWS = ROW.findall((ROOT / "docs" / "guide" / "optimizers.md").read_text())


def test_every_row_is_read() -> None:
    assert len(ROWS) == 8


@pytest.mark.parametrize(("kind", "master_dtype", "bits", "master", "moments", "together"), ROWS)
def test_bytes_are_those_of_the_table(
    kind: str, master_dtype: str, bits: str, master: str, moments: str, together: str
) -> None:
    """Every tensor of the state counts, but for the count of steps; nothing is kept elsewhere."""
    with octavo_torch.quantized_parameters("fp8-block"):
        layer = octavo_torch.GroupedLinear(2, 256, 128, dtype=torch.bfloat16, backend="torch-reference")
    parameter: torch.Tensor = layer.weight
    if kind != "codes":
        parameter = nn.Parameter(torch.zeros(2, 128, 256, dtype={"bf16": torch.bfloat16, "fp32": torch.float32}[kind]))
    how = {"master_dtype": getattr(torch, master_dtype), "state_bits": int(bits)}
    state = octavo_torch.AdamW([parameter], **how).state[parameter]
    sizes = {name: value.untyped_storage().nbytes() / parameter.numel() for name, value in state.items()}
    assert sizes.get("master", 0) == float(master)
    found = sum(size for name, size in sizes.items() if name.startswith("exp_avg"))
    assert round(found, 2) == float(moments)
    assert round(found + sizes.get("master", 0), 2) == float(together)
