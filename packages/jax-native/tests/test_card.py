"""The card: plain data that imports nothing heavy, and what it promises."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest

import octavo
import octavo_native
import octavo_numerics
import octavo_registry
from octavo import BlockScaling, HighPrecision, NoBackendError, QuantizerSpec
from octavo.recipe_base import GEMMS
from octavo_jax_native.arrays.planes import NATIVE
from octavo_jax_native.backend import NativeBackend
from octavo_jax_native.gemm.tiles import kernel_choices
from octavo_jax_native.plugin import CARD
from octavo_native.layouts import LAYOUTS_OF_DIRECTION
from octavo_registry import Request
from octavo_registry.contract.cards import MOVES, QUANTIZERS, ROUTERS, Capability
from octavo_registry.dispatch.match import match

HEAVY = ("jax", "jaxlib", "numpy", "octavo_native._native", "octavo_jax_native.ffi.targets")


def test_the_card_imports_nothing_heavy() -> None:
    """Reading the card costs no framework and no kernels, which may not even load on that machine."""
    program = (
        "import sys, octavo_jax_native, octavo_jax_native.plugin as plugin; plugin.octavo_backends();"
        f"print([name for name in {HEAVY} if name in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_every_recipe_on_both_devices(device: str) -> None:
    """Six scalings quantized, after a function too, and dequantized, plain and native; three GEMMs of these and of
    unquantized operands; routers, and rows that move with their choices; CUDA on sm_90 alone; all of it graph-safe."""
    rows = [row for row in CARD.capabilities if row.device == device]
    served = {(op, recipe) for row in rows for op in row.ops for recipe in row.recipes}
    scalings = set(octavo_native.SCALINGS)
    assert served == {(op, kind) for op in QUANTIZERS | {"dequantize"} for kind in scalings} | {
        (op, kind) for op in GEMMS for kind in scalings | {"high_precision"}
    } | {(op, "high_precision") for op in MOVES | ROUTERS}
    for row in rows:
        assert row.graph_safe
        assert (row.min_arch, row.max_arch) == (((9, 0), (9, 0)) if device == "cuda" else (None, None))
        if "quantize" in row.ops:
            assert row.layouts == {"plain", "rows", "panels"}


def test_what_decides_the_error_bounds() -> None:
    """fp32 sums on the CPU; on Hopper the tensor cores', of FP8 or of bf16 copies, and that is no secret."""
    for kind in {*octavo_native.SCALINGS, "high_precision"}:
        rows = {row.device: row for row in CARD.capabilities if "fprop" in row.ops and kind in row.recipes}
        assert rows["cpu"].accumulation == "fp32"
        assert rows["cpu"].emulated == (None if kind == "high_precision" else octavo_native.support.EMULATED_ON_CPU)
        wide = kind in ("mxfp8", "nvfp4", "high_precision")
        assert rows["cuda"].accumulation == ("hopper_bf16" if wide else "hopper_fp8")
        assert rows["cuda"].emulated == octavo_native.support.EMULATED_ON_CUDA.get(kind)
        for gemm in GEMMS:
            recipe = octavo.recipe({"high_precision": "bf16"}.get(kind, kind))
            octavo_numerics.error_bound(recipe, 512, gemm=gemm, accumulation=rows["cuda"].accumulation)


def test_layout_names_are_the_kernels() -> None:
    """A quantizer writes, and a GEMM reads, each direction in the plain layout or in the one that Hopper wants."""
    names = octavo_native.layouts
    assert {direction: (names.PLAIN, native) for direction, native in NATIVE.items()} == LAYOUTS_OF_DIRECTION
    assert NATIVE == {"rowwise": names.NATIVE_ROWS, "columnwise": names.NATIVE_COLUMNS}
    assert CARD.capabilities[0].layouts == {names.PLAIN, "rows", "panels"}


@pytest.mark.parametrize("arch", [(8, 9), (10, 0)])
def test_other_gpus_are_refused_with_both_values(arch: tuple[int, int]) -> None:
    """The Hopper kernels run on sm_90a alone."""
    spec = QuantizerSpec(format="e4m3", scaling="block")
    request = Request("quantize", "jax", "cuda", "bfloat16", "bfloat16", quantizer=spec, arch=arch)
    with pytest.raises(NoBackendError, match=rf"sm_90, this device is sm_{arch[0]}{arch[1]}"):
        octavo_registry.plan(request, backend="jax-native")


@pytest.mark.parametrize(("kind", "served"), [("high_precision", False), ("block", True)])
def test_fp32_operands_on_cuda(kind: str, served: bool) -> None:
    """The tensor cores multiply 16-bit operands; fp32 ones are for another backend, unless they are quantized."""
    recipe = HighPrecision() if kind == "high_precision" else BlockScaling()
    request = Request("fprop", "jax", "cuda", "float32", "float32", recipe=recipe, arch=(9, 0), k=64, n=64)
    verdict = match(CARD, request)
    assert isinstance(verdict, Capability) if served else verdict == "takes bfloat16, float16, the input is float32"


@pytest.mark.parametrize("kind", ["bf16", "fp8-current", "fp8-block", "mxfp8", "nvfp4"])
@pytest.mark.parametrize("gemm", GEMMS)
def test_tiles_are_told_without_a_gpu(kind: str, gemm: Any) -> None:
    """What `octavo why --kernels` shows: every tile, the chosen one first; nothing where K, N or G is not named, on a
    CPU, for a quantizer."""
    recipe = octavo.recipe(kind).for_gemm(gemm)
    request = Request(gemm, "jax", "cuda", "bfloat16", "bfloat16", recipe=recipe, arch=(9, 0), k=4096, n=2048, groups=8)
    choices = kernel_choices(request, 8192)
    assert [choice.chosen for choice in choices] == [True] + [False] * (len(choices) - 1)
    assert len({choice.name for choice in choices}) == len(choices)
    assert all(choice.tiles >= 1 and 0 < choice.filled <= 1 and choice.microseconds > 0 for choice in choices)
    assert kernel_choices(replace(request, groups=None), 8192) == ()
    backend = NativeBackend()
    assert backend.kernels(replace(request, device="cpu", arch=None), 8192) == ()
    spec = QuantizerSpec(format="e4m3", scaling="block")
    quantize = Request("quantize", "jax", "cuda", "bfloat16", "bfloat16", quantizer=spec, arch=(9, 0), k=4096, groups=8)
    assert backend.kernels(quantize, 8192) == ()
