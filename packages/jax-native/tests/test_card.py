"""The card: plain data that imports nothing heavy, and what it promises."""

from __future__ import annotations

import subprocess
import sys

import pytest

import octavo_native
import octavo_registry
from octavo import NoBackendError, QuantizerSpec
from octavo_jax_native.backend import LAYOUTS
from octavo_jax_native.plugin import CARD
from octavo_registry import Request

HEAVY = ("jax", "jaxlib", "numpy", "octavo_native", "octavo_jax_native.targets")


def test_the_card_imports_nothing_heavy() -> None:
    """Reading the card costs no framework and no kernels, which may not even load on that machine."""
    program = (
        "import sys, octavo_jax_native, octavo_jax_native.plugin as plugin; plugin.octavo_backends();"
        f"print([name for name in {HEAVY} if name in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


def test_every_scaling_on_both_devices() -> None:
    """Six scalings, quantize and dequantize, plain and native layouts; CUDA on sm_90 alone; graph-safe."""
    by_device = {row.device: row for row in CARD.capabilities}
    assert by_device.keys() == {"cpu", "cuda"}
    for row in CARD.capabilities:
        assert row.ops == {"quantize", "dequantize"}
        assert row.recipes == set(octavo_native.SCALINGS)
        assert row.graph_safe
        assert row.layouts == {layout for layouts in LAYOUTS.values() for layout in layouts}
    assert (by_device["cuda"].min_arch, by_device["cuda"].max_arch) == ((9, 0), (9, 0))


def test_layout_names_are_the_kernels() -> None:
    """The card spells them out, because importing octavo_native would load the kernels."""
    names = octavo_native.layouts
    assert LAYOUTS == {"rowwise": (names.PLAIN, names.NATIVE_ROWS), "columnwise": (names.PLAIN, names.NATIVE_COLUMNS)}


@pytest.mark.parametrize("arch", [(8, 9), (10, 0)])
def test_other_gpus_are_refused_with_both_values(arch: tuple[int, int]) -> None:
    """The Hopper kernels run on sm_90a alone."""
    spec = QuantizerSpec(format="e4m3", scaling="block")
    request = Request("quantize", "jax", "cuda", "bfloat16", "bfloat16", quantizer=spec, arch=arch)
    with pytest.raises(NoBackendError, match=rf"sm_90, this device is sm_{arch[0]}{arch[1]}"):
        octavo_registry.plan(request, backend="jax-native")
