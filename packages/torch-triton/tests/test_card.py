"""What the cards promise: who comes first, where nobody has run the kernels, what a machine without a GPU is told."""

from __future__ import annotations

from dataclasses import replace

import pytest

import octavo_registry
from octavo import BlockScaling
from octavo_registry.contract import GemmRequest, QuantizeRequest
from octavo_torch_triton import backend
from octavo_torch_triton.backend import TritonBackend
from octavo_torch_triton.plugin import CARD, INTERPRETER_CARD
from octavo_triton.layouts import MOST_GROUPS

CHIPS = {"a100": (8, 0), "l40s": (8, 9), "h100": (9, 0), "b200": (10, 0), "rtx5090": (12, 0)}


def _request(arch: tuple[int, int] | None, groups: int = 8) -> GemmRequest:
    return GemmRequest(
        *("fprop", "torch", "cuda" if arch else "cpu", "bfloat16", "bfloat16"),
        recipe=BlockScaling(), arch=arch, k=256, n=256, groups=groups,
    )  # fmt: skip


def test_chips_that_nobody_has_run_are_told() -> None:
    """The reason names the chip and the command that would tell, except on Hopper, where the suite has passed."""
    for arch in CHIPS.values():
        (mine,) = [
            one
            for one in octavo_registry.hypothesize(_request(arch), backend=["torch-triton"])
            if one.verdict == "chosen"
        ]
        run = arch == CHIPS["h100"]
        assert (f"compiled for sm_{arch[0]}{arch[1]}" in mine.reason) is not run
        assert ("octavo conform torch-triton --report" in mine.reason) is not run
    assert {row.min_arch for row in CARD.capabilities if row.untried is None} == {CHIPS["h100"]}


def test_moved_rows_are_served_on_every_chip() -> None:
    """Each that has products, in graphs, too; sorting is not."""
    rows = [row for row in CARD.capabilities if "permute_rows" in row.ops]
    assert {row.min_arch for row in rows} == set(CHIPS.values())
    assert all(row.graph_safe for row in rows)
    assert not any("route" in row.ops for row in CARD.capabilities)


def test_kernels_for_one_chip_come_first() -> None:
    """torch-native on Hopper: a portable backend replaces the reference, never what is tuned for a chip."""
    verdicts = {one.backend: one for one in octavo_registry.hypothesize(_request((9, 0)))}
    others = [name for name, one in verdicts.items() if one.verdict == "chosen"]
    assert others == ["torch-native"] or "torch-native" not in verdicts
    reference = {one.backend: one.verdict for one in octavo_registry.hypothesize(_request((8, 0)))}
    assert (reference["torch-triton"], reference["torch-reference"]) == ("chosen", "eligible")


def test_older_chips_are_refused() -> None:
    """A V100 has no bf16 products, and Triton no FP8 codes for it."""
    (mine,) = [one for one in octavo_registry.hypothesize(_request((7, 0))) if one.backend == "torch-triton"]
    assert mine.verdict == "refused"
    assert "sm_80" in mine.reason
    assert "sm_70" in mine.reason


def test_groups_have_a_limit() -> None:
    """Both numbers, and no launch."""
    reason = TritonBackend("torch-triton").refuses_everywhere(_request((9, 0), MOST_GROUPS + 1))
    assert reason is not None
    assert str(MOST_GROUPS) in reason
    assert str(MOST_GROUPS + 1) in reason


def test_square_columns_are_refused_whoever_asks() -> None:
    """The card says so, and the suite asks past it: kernels for a scale of each column would write past the array."""
    recipe = BlockScaling(square_columns=True)
    forward = _request((9, 0))
    products = {op: replace(forward, op=op, recipe=recipe) for op in ("fprop", "dgrad", "wgrad")}
    spec = recipe.quantizer("x")
    quantize = QuantizeRequest("quantize", "torch", "cuda", "bfloat16", "bfloat16", quantizer=spec)
    for request in (quantize, products["wgrad"]):
        assert "square_columns" in (TritonBackend("torch-triton").refuses_everywhere(request) or "")
    assert all(TritonBackend("torch-triton").refuses_everywhere(products[op]) is None for op in ("fprop", "dgrad"))


def test_a_cpu_is_served_by_the_interpreter_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where Triton compiles, the CPU's backend says what would switch its interpreter on; where it interprets, a GPU
    is refused."""
    interpreter, compiled = TritonBackend("torch-triton-interpreter"), TritonBackend("torch-triton")
    monkeypatch.setattr(backend, "INTERPRETED", False)
    assert "TRITON_INTERPRET=1" in (interpreter.refuses(_request(None)) or "")
    monkeypatch.setattr(backend, "INTERPRETED", True)
    assert interpreter.refuses(_request(None)) is None
    assert "unset it" in (compiled.refuses(_request((9, 0))) or "")
    assert INTERPRETER_CARD.priority < -100
