"""What the cards promise: who comes first, where nobody has run the kernels, what a machine without a GPU is told."""

from __future__ import annotations

import sys
from dataclasses import replace
from importlib import metadata
from typing import Any

import pytest

import octavo_registry
from octavo import BlockScaling
from octavo_jax_triton import backend
from octavo_jax_triton.backend import TritonBackend
from octavo_jax_triton.launch import compiled
from octavo_jax_triton.plugin import CARD, INTERPRETER_CARD
from octavo_registry.contract import GemmRequest, QuantizeRequest
from octavo_triton.layouts import MOST_GROUPS

CHIPS = {"a100": (8, 0), "l40s": (8, 9), "h100": (9, 0), "b200": (10, 0), "rtx5090": (12, 0)}


def _request(arch: tuple[int, int] | None, groups: int = 8) -> GemmRequest:
    return GemmRequest(
        *("fprop", "jax", "cuda" if arch else "cpu", "bfloat16", "bfloat16"),
        recipe=BlockScaling(), arch=arch, k=256, n=256, groups=groups,
    )  # fmt: skip


def test_every_chip_is_served_before_the_reference() -> None:
    """Before the reference backend and behind jax-native; chips older than sm_80 are refused."""
    assert -100 < CARD.priority < 100
    spans = {(row.min_arch, row.max_arch) for row in CARD.capabilities}
    for arch in CHIPS.values():
        assert any(least <= arch <= most for least, most in spans if least and most)
    assert all(least and least >= (8, 0) for least, _ in spans)
    assert INTERPRETER_CARD.priority < -100


def test_chips_that_nobody_has_run_are_told() -> None:
    """What has been done in the place of running, on every row of a chip where the suite has not passed."""
    for row in CARD.capabilities:
        assert row.min_arch is not None
        if row.untried is not None:
            assert f"compiled for sm_{row.min_arch[0]}{row.min_arch[1]}" in row.untried


def test_weights_of_both_orders_are_served() -> None:
    """Kernels of JAX are [G, K, N]: a transposed copy of them would cost more than the product of a few rows."""
    gemms = [row for row in CARD.capabilities if "fprop" in row.ops]
    assert gemms
    assert all(row.weights == {"nk", "kn"} for row in gemms)


def test_groups_have_a_limit() -> None:
    """Both numbers, and no launch."""
    reason = TritonBackend().refuses_everywhere(_request((9, 0), MOST_GROUPS + 1))
    assert reason is not None
    assert str(MOST_GROUPS) in reason
    assert str(MOST_GROUPS + 1) in reason


def test_layouts_that_quantizers_do_not_make_are_refused() -> None:
    """Rows are plain, and MXFP8 has no turned columns: the sentence names what there is."""
    spec = BlockScaling().quantizer("x")
    for layouts, said in ((("turned", "plain"), "rowwise"), (("plain", "panels"), "plain and turned")):
        request = QuantizeRequest("quantize", "jax", "cuda", "bfloat16", "bfloat16", quantizer=spec, layouts=layouts)
        assert said in (TritonBackend().refuses_everywhere(request) or "")


def test_square_columns_are_refused_whoever_asks() -> None:
    """The card says so, and the suite asks past it: kernels for a scale of each column would write past the array."""
    recipe = BlockScaling(square_columns=True)
    forward = _request((9, 0))
    products = {op: replace(forward, op=op, recipe=recipe) for op in ("fprop", "dgrad", "wgrad")}
    spec = recipe.quantizer("x")
    quantize = QuantizeRequest("quantize", "jax", "cuda", "bfloat16", "bfloat16", quantizer=spec)
    for request in (quantize, products["wgrad"]):
        assert "square_columns" in (TritonBackend().refuses_everywhere(request) or "")
    assert all(TritonBackend().refuses_everywhere(products[op]) is None for op in ("fprop", "dgrad"))


def test_a_cpu_is_served_by_the_interpreter_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where Triton compiles, the CPU's backend says what would switch its interpreter on; where it interprets, a GPU
    is refused."""
    monkeypatch.setattr(backend, "INTERPRETED", False)
    assert "TRITON_INTERPRET=1" in (TritonBackend().refuses(_request(None)) or "")
    monkeypatch.setattr(backend, "INTERPRETED", True)
    assert TritonBackend().refuses(_request(None)) is None
    assert "unset it" in (TritonBackend().refuses(_request((9, 0))) or "")


def test_a_triton_that_jax_triton_cannot_compile_with_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Found by pip where it resolves both, and by nobody where torch has pinned its own Triton: jax-triton would then
    fail deep inside a lowering."""
    versions = {"jax-triton": "0.4.1", "triton": "3.6.0"}
    monkeypatch.setattr(metadata, "version", lambda name: versions[name])
    monkeypatch.setattr(metadata, "requires", lambda name: ["jax>=0.11.0", "triton>=3.7"])
    monkeypatch.setattr(backend, "INTERPRETED", False)
    reason = TritonBackend().refuses(_request((9, 0)))
    assert reason is not None
    for word in ("jax-triton 0.4.1", "triton>=3.7", "3.6.0", "pip install"):
        assert word in reason
    versions["triton"] = "3.7.1"
    assert "triton>=3.8" in (compiled.refusal() or "")
    versions["triton"] = "3.8.0"
    assert compiled.refusal() is None
    assert TritonBackend().refuses(_request((9, 0))) is None


def test_without_jax_triton_the_reason_is_what_to_install() -> None:
    """`octavo why` says what is missing and does not fail: a newer Python on 3.11, for which there is no jax-triton."""
    decisions = octavo_registry.hypothesize(_request((8, 0)), backend=["jax-triton"])
    mine: Any = next(one for one in decisions if one.backend == "jax-triton")
    try:
        metadata.version("jax-triton")
    except metadata.PackageNotFoundError:
        assert mine.verdict == "refused"
        assert ("jax-triton>=0.4.1" if sys.version_info >= (3, 12) else "needs python>=3.12") in mine.reason
    else:
        assert mine.verdict == "chosen"
