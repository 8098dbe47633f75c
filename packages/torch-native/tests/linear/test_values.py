"""Recorded layers whose planes hold the values that emulated products multiply, against those that hold codes.

The CPU's kernels multiply what codes stand for, so a layer there asks for codes; here it is made to ask for values,
which its kernels write and read, too. MXFP8 has the same bits then, but for numbers among bf16's subnormals, which
these problems do not have.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from emulated_recipes import CASES, RECIPES
from torch import Tensor

import octavo_native
import octavo_native.values
from octavo import MXFP8, NVFP4, BlockScaling, Recipe
from octavo.quantizer import Operand
from octavo.recipe_base import GEMMS
from octavo_native.layouts import VALUES
from octavo_torch import grouped_linear
from octavo_torch.dispatch.layers import layer_for
from octavo_torch_native.linear.recorded_layer import RecordedLayer

M, K, N = 420, 144, 272
SPLIT = [33, 0, 1, 70, 16, 257]
SEED = 3


def again(recipe: Recipe) -> Recipe:
    """An equal recipe whose layers are resolved anew."""
    return type(recipe).model_validate(dict(recipe))


def step(
    recipe: Recipe, device: str, needs: tuple[bool, bool], dtype: torch.dtype = torch.bfloat16
) -> list[Tensor | None]:
    """y, dx and dw of operands that are the same in each call, with a tail of NaN."""
    drawn = torch.Generator().manual_seed(SEED)
    x, dy = (torch.randn(M, side, generator=drawn).to(device, dtype) for side in (K, N))
    x[sum(SPLIT) :], dy[sum(SPLIT) :] = torch.nan, torch.nan
    w = torch.randn(len(SPLIT), N, K, generator=drawn).to(device, dtype)
    x, w = x.requires_grad_(needs[0]), w.requires_grad_(needs[1])
    sizes = torch.tensor(SPLIT, device=device)
    y = grouped_linear(x, w, sizes, recipe=recipe, seed=SEED, backend="torch-native")
    if any(needs):
        y.backward(dy)
    return [y.detach(), x.grad, w.grad]


def emulated(monkeypatch: pytest.MonkeyPatch, yes: bool) -> None:
    monkeypatch.setattr(octavo_native.values, "multiplies_values", lambda device: yes)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("name", "device"), CASES)
def test_bits_of_codes(name: str, device: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """y, dx and dw, for every set of wanted gradients, of ragged groups and an empty one."""
    if device == "cuda" and dtype is torch.float32 and not all(map(RECIPES[name].quantizes, GEMMS)):
        pytest.skip("products of fp32 in high precision are none of the CUDA kernels'")
    for needs in ((True, True), (True, False), (False, True), (False, False)):
        emulated(monkeypatch, True)
        made = step(again(RECIPES[name]), device, needs, dtype)
        emulated(monkeypatch, False)
        for one, other in zip(made, step(again(RECIPES[name]), device, needs, dtype), strict=True):
            assert (one is None) == (other is None)
            if one is not None and other is not None:
                assert torch.equal(one.view(torch.uint8), other.view(torch.uint8)), f"{needs}"


def recorded(recipe: Recipe, dtype: torch.dtype = torch.bfloat16) -> RecordedLayer:
    """The layer's recorded passes."""
    x, w = torch.zeros(M, K, dtype=dtype), torch.zeros(len(SPLIT), N, K, dtype=dtype)
    whole = layer_for(recipe, x, w, True, True, True, "torch-native").whole
    assert isinstance(whole, RecordedLayer)
    return whole


def layouts(layer: RecordedLayer) -> dict[Operand, Any]:
    """Of both planes, by operand."""
    return {operand: launch.spec.layouts for operand, launch in layer._kernels.quantizers.items()}


@pytest.mark.parametrize("name", ["mxfp8", "nvfp4"])
def test_no_codes_where_values_are_read(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Planes that are read in the pass that writes them have no codes, and what is kept for backward has nothing else:
    its bytes are those of a layer that asks for codes alone."""
    emulated(monkeypatch, True)
    layer = recorded(again(RECIPES[name]))
    assert layouts(layer) == {"x": (VALUES, "panels"), "w": (VALUES, "panels"), "dy": (VALUES, VALUES)}
    for launch in layer._kernels.quantizers.values():
        assert "row_scales" not in launch.arguments
    kept = layer._new_recording(M).column_bytes
    workspaces = {
        gemm: launch.shapes(M, N, K, len(SPLIT), True).workspace for gemm, launch in layer._kernels.gemms.items()
    }
    emulated(monkeypatch, False)
    codes = recorded(again(RECIPES[name]))
    assert codes._new_recording(M).column_bytes == kept
    assert workspaces["fprop"] == 0, "both operands come as values"
    for gemm, launch in codes._kernels.gemms.items() if octavo_native.HAS_CUDA else ():
        assert launch.shapes(M, N, K, len(SPLIT), True).workspace > workspaces[gemm]


def test_columns_of_fp32_are_codes_in_nvfp4(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels that turn its values into columns hold two bytes per element; rows are values of fp32, too, as they
    are of every operand in MXFP8."""
    emulated(monkeypatch, True)
    both, rows = (VALUES, VALUES), (VALUES, "panels")
    assert layouts(recorded(again(NVFP4()), torch.float32)) == {"x": rows, "w": rows, "dy": rows}
    assert layouts(recorded(again(MXFP8()), torch.float32)) == {"x": rows, "w": rows, "dy": both}


def test_values_are_of_emulated_products(rng: np.random.Generator) -> None:
    """A CPU multiplies what codes stand for, and block scaling's products are of codes on a GPU, too."""
    for recipe in (MXFP8(), BlockScaling()):
        launches = recorded(again(recipe))._kernels.quantizers.values()
        assert all(VALUES not in launch.spec.layouts for launch in launches)
