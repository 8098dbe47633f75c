"""What a grouped layer keeps for backward, measured against the table of docs/guide/torch-layers.md."""

from __future__ import annotations

import re
from collections.abc import Iterator
from fractions import Fraction

import pytest
import torch
from torch import Tensor
from workspace import ROOT

from octavo import MXFP8, NVFP4, BlockScaling, CurrentScaling, DelayedScaling, HighPrecision, Recipe, RowScaling
from octavo_torch import DelayedState, grouped_linear

M, K, N = 512, 256, 384
PAGE = ROOT / "docs" / "guide" / "torch-layers.md"
ROWS: dict[str, tuple[Recipe, ...]] = {
    "`high_precision`": (HighPrecision(),),
    "`delayed`, `current`": (DelayedScaling(), CurrentScaling()),
    "`row`": (RowScaling(),),
    "`block`, `mxfp8-folded`": (BlockScaling(), MXFP8(products="folded")),
    "`mxfp8`": (MXFP8(),),
    "`mxfp8` with `square_weights`": (MXFP8(square_weights=True),),
    "`nvfp4`": (NVFP4(),),
}


def table() -> Iterator[tuple[str, str, str]]:
    """Recipe, bytes of x, bytes of the weight."""
    for line in PAGE.read_text().splitlines():
        if match := re.fullmatch(r"\| (`.*`(?: with `\w+`)?) \| ([^|]*) \| ([^|]*) \|", line):
            yield match[1], match[2], match[3]


def value_of(formula: str, rows: int) -> Fraction:
    """A sum of numbers and of fractions whose parts are numbers or the letters of the table."""
    letters = {"m": rows, "N": N, "K": K}
    total = Fraction(0)
    for term in formula.split(" + "):
        top, _, bottom = term.partition("/")
        divisor = 1
        for part in bottom.strip("()").split():
            divisor *= letters.get(part) or int(part)
        total += Fraction(int(top), divisor)
    return total


def kept(recipe: Recipe, sizes: Tensor, wanted: str, backend: str) -> int:
    """Bytes that autograd holds for the gradient of "x" or "w", group sizes aside."""
    x = torch.randn(M, K).bfloat16().requires_grad_(wanted == "x")
    w = torch.randn(sizes.shape[0], N, K).bfloat16().requires_grad_(wanted == "w")
    state = DelayedState.create(recipe, sizes.shape[0]) if isinstance(recipe, DelayedScaling) else None
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (saved.append(t), t)[1], lambda t: t):
        grouped_linear(x, w, sizes, recipe=recipe, seed=1, state=state, backend=backend)
    pieces = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in saved if t.dtype is not torch.int64}
    return sum(pieces.values())


def test_the_table_has_every_recipe() -> None:
    """No row is missing, and none is of something else."""
    assert [name for name, _, _ in table()] == list(ROWS)


@pytest.mark.parametrize("backend", ["torch-reference", "torch-native"])
def test_what_is_kept_is_what_the_page_says(backend: str) -> None:
    """To the byte with one group; with several at most a panel of 128 rows a group beyond it."""
    torch.manual_seed(0)
    for name, x_bytes, w_bytes in table():
        for recipe in ROWS[name]:
            unpacked = Fraction(1, 2) if recipe.kind == "nvfp4" and backend == "torch-reference" else 0
            x_share, w_share = value_of(x_bytes, M) + unpacked, value_of(w_bytes, M) + unpacked
            assert kept(recipe, torch.tensor([M]), "w", backend) == x_share * M * K, name
            assert kept(recipe, torch.tensor([M]), "x", backend) == w_share * N * K, name
            several = torch.tensor([100, 0, 300, 90])
            share = value_of(x_bytes, min(several.tolist()) or 90) + unpacked
            assert kept(recipe, several, "w", backend) <= share * (M + 128 * len(several)) * K, name


@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device")
def test_allocated_on_a_gpu() -> None:
    """What the allocator has handed out after a forward, y and x and the weight aside, is what the page says."""
    for name, x_bytes, _ in table():
        for recipe in ROWS[name]:
            sizes = torch.tensor([M], device="cuda")
            x, w = torch.randn(M, K, device="cuda").bfloat16(), torch.randn(1, N, K, device="cuda").bfloat16()
            w.requires_grad_()
            state = DelayedState.create(recipe, 1, "cuda") if isinstance(recipe, DelayedScaling) else None
            grouped_linear(x, w, sizes, recipe=recipe, seed=1, state=state)
            before = torch.cuda.memory_allocated()
            y = grouped_linear(x, w, sizes, recipe=recipe, seed=1, state=state)
            held = torch.cuda.memory_allocated() - before - y.numel() * y.element_size()
            expected = 0 if name == "`high_precision`" else value_of(x_bytes, M) * M * K
            # sizes, the plan of them, and the allocator's granule of 512 bytes
            assert expected <= held <= expected + 8192, name
            del y
