"""The card, and what the backend refuses beside it: a sentence with both values each."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch

import octavo_native
import octavo_registry
import octavo_torch_native
from octavo import MXFP8, PRESETS, CurrentScaling, HighPrecision, NoBackendError, QuantizerSpec, Recipe
from octavo.recipe_base import GEMMS, Gemm
from octavo_native import layouts
from octavo_registry.contract.request import Request
from octavo_registry.dispatch.match import match
from octavo_torch_native import plugin
from octavo_torch_native.backend import ABI_LEVEL, NativeBackend

SPEC = QuantizerSpec(scaling="block", format="e4m3")


def request(**fields: Any) -> Request:
    base: dict[str, Any] = {
        "op": "quantize",
        "framework": "torch",
        "device": "cpu",
        "in_dtype": "bfloat16",
        "out_dtype": "bfloat16",
        "quantizer": SPEC,
    }
    return Request(**(base | fields))


HOPPER: dict[str, Any] = {"device": "cuda", "arch": (9, 0)}


def gemm(op: Gemm, recipe: Recipe, **fields: Any) -> Request:
    return request(op=op, recipe=recipe.for_gemm(op), quantizer=None, **fields)


def on_hopper(**fields: Any) -> Request:
    return request(device="cuda", arch=(9, 0), **fields)


def test_the_card_imports_neither_torch_nor_the_kernels() -> None:
    """Discovery reads every card (architecture.md), in a fresh interpreter; public names are there all the same."""
    code = (
        "import sys, octavo_torch_native.plugin as plugin;"
        "loaded = [name in sys.modules for name in ('torch', 'octavo_native._native', 'numpy')];"
        "print(plugin.CARD.name, *loaded)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["torch-native", "False", "False", "False"]
    assert all(callable(getattr(octavo_torch_native, name)) for name in octavo_torch_native.__all__)


def test_the_registry_finds_it_before_the_reference() -> None:
    """Tuned for one architecture, so first in line wherever it serves; the CPU included."""
    record = next(record for record in octavo_registry.backends() if record.name == "torch-native")
    assert record.card == plugin.CARD
    assert record.verdict is None, record.reason
    assert octavo_registry.plan(request()).backend == "torch-native"


def test_layouts_have_the_names_of_the_kernels() -> None:
    """octavo_native.layouts names them; a plan, a file and another plugin do so by these words."""
    assert plugin.CARD.capabilities[0].layouts == {layouts.PLAIN, "rows", "panels"}


@pytest.mark.parametrize(
    ("asked", "reason"),
    [
        (request(device="cuda", arch=(8, 0)), "needs sm_90, this device is sm_80"),
        (request(device="cuda", arch=(10, 0)), "needs sm_90, this device is sm_100"),
        (request(graph_safe=True), "graph_safe=True was asked for"),
        (on_hopper(graph_safe=True, sizes="host"), "sizes are on the host"),
        (request(framework="jax"), "serves torch, the framework is jax"),
        (request(layouts=("swizzled", "plain")), "makes layouts panels, plain, rows"),
        (gemm("fprop", HighPrecision(), in_dtype="float32", **HOPPER), "takes bfloat16, float16, the input is float32"),
        (gemm("fprop", MXFP8(), graph_safe=True, sizes="host", **HOPPER), "sizes are on the host"),
        (gemm("fprop", MXFP8(), device="cuda", arch=(8, 0)), "needs sm_90, this device is sm_80"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_the_card_refuses(asked: Request, reason: str) -> None:
    """What no row covers."""
    verdict = match(plugin.CARD, asked)
    assert isinstance(verdict, str)
    assert reason in verdict


def test_device_sizes_may_be_captured() -> None:
    """Device sizes on Hopper are graph-safe in every recipe."""
    for scaling in ("delayed", "current", "row", "block", "mxfp8"):
        spec = QuantizerSpec(scaling=scaling, format="e4m3")  # type: ignore[arg-type]
        assert not isinstance(match(plugin.CARD, on_hopper(quantizer=spec, graph_safe=True)), str)
    nvfp4 = QuantizerSpec(scaling="nvfp4", format="e2m1", hadamard=True, rounding="stochastic")
    assert not isinstance(match(plugin.CARD, on_hopper(quantizer=nvfp4, graph_safe=True)), str)


def test_a_build_without_cuda_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """CPU-only kernels serve CPUs, and say what to install for more."""
    monkeypatch.setattr(octavo_native, "HAS_CUDA", False)
    assert "without CUDA kernels; install" in (NativeBackend().refuses(on_hopper()) or "")
    assert NativeBackend().refuses(request()) is None


def test_no_device_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CUDA request in a process whose torch sees no device."""
    monkeypatch.setattr(octavo_native, "HAS_CUDA", True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "sees no CUDA device" in (NativeBackend().refuses(on_hopper()) or "")


def test_another_abi_level_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A refusal with both levels, never an ImportError (architecture.md, "Versions")."""
    monkeypatch.setattr(octavo_native, "ABI_LEVEL", ABI_LEVEL + 1)
    sentence = NativeBackend().refuses(request()) or ""
    assert f"level {ABI_LEVEL + 1} and octavo-torch-native calls level {ABI_LEVEL}" in sentence


def test_a_layout_of_the_other_direction_is_refused() -> None:
    """The card has one set of layouts for both directions; panels hold columns and nothing else."""
    refuses = NativeBackend().refuses
    assert refuses(request(layouts=("rows", "panels"))) is None
    assert "rowwise data in layouts plain or rows; panels was" in (refuses(request(layouts=("panels", "plain"))) or "")
    assert "columnwise data in layouts plain or panels" in (refuses(request(layouts=("plain", "rows"))) or "")
    only_rows = QuantizerSpec(scaling="block", format="e4m3", orientation="rowwise")
    assert refuses(request(quantizer=only_rows, layouts=("rows", "rows"))) is None
    with pytest.raises(NoBackendError, match="produces rowwise data in layouts plain or rows; panels was requested"):
        octavo_registry.plan(request(layouts=("panels", "plain")), backend="torch-native")


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the kernels and a device were there."""
    monkeypatch.setattr(octavo_native, "HAS_CUDA", True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)


@pytest.mark.parametrize("op", GEMMS)
@pytest.mark.parametrize("recipe", PRESETS.values(), ids=PRESETS)
def test_gemms_of_every_recipe_may_be_captured(op: Gemm, recipe: Recipe, hopper: None) -> None:
    """Admitted on both devices, graph-safe on Hopper; what sums in which way follows from the recipe."""
    row = match(plugin.CARD, gemm(op, recipe, sizes="device", graph_safe=True, k=64, n=32, **HOPPER))
    assert not isinstance(row, str)
    kind = recipe.for_gemm(op).kind
    eights = kind in ("delayed", "current", "row", "block")
    assert row.accumulation == ("hopper_fp8" if eights else "hopper_bf16")
    assert (row.emulated is not None) == (kind in ("mxfp8", "nvfp4"))
    assert NativeBackend().refuses(gemm(op, recipe, k=64, n=32, groups=3, **HOPPER)) is None
    row = match(plugin.CARD, gemm(op, recipe))
    assert not isinstance(row, str)
    assert row.accumulation == "fp32"
    assert NativeBackend().refuses(gemm(op, recipe, k=33, n=7)) is None


@pytest.mark.parametrize(
    ("asked", "reason"),
    [
        (gemm("fprop", MXFP8(), k=40, n=32, **HOPPER), "k is 40, and its cuda GEMMs take multiples of 16"),
        (gemm("wgrad", HighPrecision(), k=64, n=8, **HOPPER), "n is 8, and its cuda GEMMs take multiples of 16"),
        (gemm("dgrad", MXFP8(), k=0), "k is 0, and its cpu GEMMs take a side of 1 or more"),
        (
            gemm("wgrad", HighPrecision(output_dtype="float32"), other_dtype="float32", **HOPPER),
            "x is bfloat16 and dy float32; its cuda GEMMs multiply unquantized operands of one dtype",
        ),
        (
            gemm("dgrad", HighPrecision(output_dtype="bfloat16"), other_dtype="float16", **HOPPER),
            "dy is bfloat16 and w float16; its cuda GEMMs multiply unquantized operands of one dtype",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_gemms_are_refused(asked: Request, reason: str, hopper: None) -> None:
    """What the card cannot say."""
    assert reason in (NativeBackend().refuses(asked) or "")


def test_emulation_is_told() -> None:
    """A plan says in a clause how its recipe is computed where the device has no instructions for it."""
    plan = octavo_registry.plan(gemm("fprop", MXFP8()), backend="torch-native")
    assert plan.note == "emulated: fp32 products of dequantized operands"
    assert octavo_registry.plan(gemm("fprop", HighPrecision()), backend="torch-native").note == ""


def test_kernels_of_a_gemm() -> None:
    """The tiles of the CUDA kernels and what the model expects of each; nothing where nothing is chosen."""
    backend = NativeBackend()
    for recipe in (HighPrecision(), CurrentScaling(), MXFP8()):
        choices = backend.kernels(gemm("fprop", recipe, k=7168, n=2048, groups=32, **HOPPER), 16384)
        assert [choice.chosen for choice in choices] == [True] + [False] * (len(choices) - 1)
        assert all(choice.tiles > 0 and choice.microseconds > 0 and 0 < choice.filled <= 1 for choice in choices)
    assert backend.kernels(gemm("fprop", MXFP8(), k=64, n=32, groups=3), 64) == ()
    assert backend.kernels(gemm("fprop", MXFP8(), **HOPPER), 64) == ()
    assert backend.kernels(on_hopper(), 64) == ()
