"""Products of planes of values beside products of codes: the CUDA kernels make the same bf16 values of codes, and so
have the same bits.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from devices import PLACES

import octavo_native as native
from octavo_native import layouts
from octavo_native.gemms import OPERANDS_OF_GEMM, gemm_named

torch = pytest.importorskip("torch", reason="torch holds the memory of both devices")

from problems import NATIVE_LAYOUT, Extras, Place, Plane, Shape, address, filled, quantize  # noqa: E402  it has torch

SIZES, N, K = (0, 1, 17, 130, 0, 96, 300), 272, 400
FACTOR_OF_TWO = 2.625
"""2688 / 1024: a group with this amax has a power of two for NVFP4's second level, so that the CPU, which multiplies
codes by both levels at once, has the same products, too."""

MXFP8: dict[str, Any] = {"scaling": "mxfp8", "format": "e4m3"}
NVFP4: dict[str, Any] = {"scaling": "nvfp4", "format": "e2m1"}
RECIPES: dict[str, dict[str, dict[str, Any]]] = {
    "mxfp8": {"x": MXFP8, "w": MXFP8, "dy": MXFP8},
    "mxfp8 e5m2": {"x": MXFP8, "w": MXFP8, "dy": {**MXFP8, "format": "e5m2"}},
    "mxfp8 square": {"x": MXFP8, "w": {**MXFP8, "square": True}, "dy": MXFP8},
    "nvfp4": {
        "x": {**NVFP4, "hadamard": True},
        "w": {**NVFP4, "square": True, "operand": "w"},
        "dy": {**NVFP4, "hadamard": True, "stochastic": True, "operand": "dy"},
    },
    "nvfp4 without a transform": {"x": NVFP4, "w": NVFP4, "dy": NVFP4},
}
"""How each operand is quantized."""

SIDES = ((True, True), (True, False), (False, True))


def operand(rng: np.random.Generator, shape: Shape, place: Place) -> Any:
    """Normal numbers, below FACTOR_OF_TWO, which stands once in each group; NaN past the sum."""
    x = torch.from_numpy(rng.standard_normal((shape.rows, shape.cols))).clamp(-2.5, 2.5).to(torch.bfloat16)
    x[:, 0] = FACTOR_OF_TWO
    x[shape.used :] = float("nan")
    return x.to(place.device)


def slots(side: str, plane: Plane) -> dict[str, int]:
    """A GEMM's arguments of one operand."""
    scales = 0 if plane.layout == layouts.VALUES else address(plane.scales)
    return {side: address(plane.codes), f"{side}_scales": scales, f"{side}_global": address(plane.factor)}


def product(gemm: Any, specs: dict[str, Any], planes: dict[str, Plane], ragged: Shape, place: Place) -> Any:
    """The result's bytes."""
    left, right = OPERANDS_OF_GEMM[gemm]
    values = {f"{side}_values": planes[side].layout == layouts.VALUES for side in ("left", "right")}
    made = gemm_named(
        gemm=gemm,
        scaling=specs[left]["scaling"],
        left_format=specs[left]["format"],
        right_format=specs[right]["format"],
        right_square=specs[right].get("square", False),
        hadamard=gemm == "wgrad" and specs[left].get("hadamard", False),
        **values,
    )
    groups = len(SIZES)
    sides = {"rows": ragged.rows, "n": N, "k": K, "groups": groups}
    count = groups * N * K if gemm == "wgrad" else ragged.rows * (N if gemm == "fprop" else K)
    out = filled((count,), 2, place)
    size = made.workspace_bytes(cuda=place.cuda, **sides)
    assert not (all(values.values()) and size), "values need no workspace"
    workspace = torch.full((size,), 0xFF, dtype=torch.uint8, device=place.device)
    made.run(
        **place.common,
        **sides,
        plan=address(ragged.plan(place)),
        out=address(out),
        workspace=address(workspace),
        workspace_bytes=size,
        **slots("left", planes["left"]),
        **slots("right", planes["right"]),
    )
    if place.cuda:
        torch.cuda.synchronize()
    return out


@pytest.mark.parametrize("on", PLACES)
@pytest.mark.parametrize("gemm", OPERANDS_OF_GEMM)
@pytest.mark.parametrize("recipe", RECIPES)
def test_products_of_values_are_those_of_codes(rng: np.random.Generator, recipe: str, gemm: Any, on: str) -> None:
    """Either side as values or as codes, ragged groups, empty ones, a tail of NaN."""
    place, specs = Place(cuda=on == "cuda"), RECIPES[recipe]
    if not place.cuda and gemm == "wgrad" and specs["x"].get("hadamard"):
        pytest.skip("the transform's amaxes are no powers of two, so that the CPU rounds products of codes once more")
    columns = {"x": K, "w": K, "dy": N}
    shapes = {name: Shape(SIZES, cols, matrix_rows=N if name == "w" else 0) for name, cols in columns.items()}
    way = {"fprop": ("rowwise", "rowwise"), "dgrad": ("rowwise", "columnwise"), "wgrad": ("columnwise", "columnwise")}
    planes: dict[tuple[str, bool], Plane] = {}
    for side, name, direction in zip(("left", "right"), OPERANDS_OF_GEMM[gemm], way[gemm], strict=True):
        x = operand(rng, shapes[name], place)
        for valued in (True, False):
            layout = layouts.VALUES if valued else NATIVE_LAYOUT[direction]
            made, _ = quantize(specs[name], shapes[name], x, "bfloat16", {direction: layout}, place, Extras())
            planes[side, valued] = made[0]
    ragged = shapes["x"]
    expected = product(gemm, specs, {side: planes[side, False] for side in ("left", "right")}, ragged, place)
    for left, right in SIDES:
        given = {"left": planes["left", left], "right": planes["right", right]}
        assert torch.equal(product(gemm, specs, given, ragged, place), expected), f"values: {left}, {right}"


def test_values_are_of_emulated_scalings() -> None:
    """The other scalings are multiplied as codes, and a scale beside values would be dropped."""
    sides = {"rows": 4, "n": 16, "k": 16, "groups": 1}
    with pytest.raises(ValueError, match="scaling is not mxfp8 or nvfp4"):
        gemm_named(gemm="fprop", scaling="block", left_values=True).workspace_bytes(cuda=False, **sides)
    made = gemm_named(gemm="fprop", scaling="mxfp8", left_values=True)
    with pytest.raises(ValueError, match="values has scales"):
        made.run(cuda=False, **sides, plan=256, left=256, left_scales=256, right=256, right_scales=256, out=256)
    assert native.LAYOUTS["values"] == 2
