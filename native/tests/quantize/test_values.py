"""Planes of values: the bf16 numbers that a GEMM multiplies, straight from the quantizer.

They have the bits of codes that are dequantized to bf16 without NVFP4's second level, which is what the CUDA GEMMs make
of codes; codes are compared with the definition elsewhere.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from devices import PLACES

import octavo_native as native
from octavo_native import layouts
from octavo_native.support import EMULATED_RECIPES
from octavo_native.values import writes_values

torch = pytest.importorskip("torch", reason="torch holds the memory of both devices")

from problems import (  # noqa: E402  it imports torch
    DTYPES,
    NATIVE_LAYOUT,
    POISON,
    SPECS,
    Extras,
    Place,
    Plane,
    Shape,
    address,
    assert_same,
    drawn_values,
    filled,
    quantize,
    quantizer,
    valid,
)

EMULATED = [spec for spec in SPECS if spec["scaling"] in EMULATED_RECIPES]
NAMES = ["-".join(str(value) for value in spec.values()) for spec in EMULATED]
EDGE_SIZES = (0, 1, 7, 8, 9, 15, 16, 17, 31, 33, 127, 128, 129, 300)
COLUMNS = (16, 32, 112, 128, 144, 272, 528, 1040)
KINDS = ("normal", "wide", "sparse", "subnormal", "huge", "not finite")
BOTH = {"rowwise": layouts.VALUES, "columnwise": layouts.VALUES}


def expanded(spec: dict[str, Any], shape: Shape, plane: Plane, place: Place) -> Plane:
    """The bf16 values of a native plane, without the second level."""
    columnwise = plane.direction == "columnwise"
    size = layouts.values_shape(direction=plane.direction, cols=shape.cols, **shape.arguments)
    out, ones = filled(size, 2, place), torch.ones(len(shape.sizes), device=place.device)
    plan = shape.plan(place)
    quantizer(spec).dequantize(
        **place.common,
        direction=native.DIRECTIONS[plane.direction],
        codes=address(plane.codes),
        scales=address(plane.scales),
        global_=0 if plane.factor is None else address(ones),
        layout=native.LAYOUTS["native"],
        cols=shape.cols,
        **shape.arguments,
        plan=address(plan),
        out=address(out),
        out_dtype=native.DTYPES["bfloat16"],
        out_layout=native.LAYOUTS["native" if columnwise else "plain"],
    )
    if place.cuda:
        torch.cuda.synchronize()
    return Plane(plane.direction, layouts.VALUES, out, plane.scales, plane.factor)


def served(spec: dict[str, Any], dtype: str, planes: dict[str, str], place: Place) -> bool:
    """Whether the CUDA kernels have it: columnwise values of NVFP4 come from those that hold two-byte values."""
    named = SimpleNamespace(**{"square": False, "stochastic": False, "mxfp4": None, **spec})
    valued = [way for way, layout in planes.items() if layout == layouts.VALUES]
    return not place.cuda or all(writes_values(named, way, dtype) for way in valued)


@pytest.mark.parametrize("on", PLACES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("spec", EMULATED, ids=NAMES)
def test_values_are_those_of_the_codes(rng: np.random.Generator, spec: dict[str, Any], dtype: str, on: str) -> None:
    """Every kind of number, ragged groups around every edge, matrices; beside codes and alone; no stray write."""
    place = Place(cuda=on == "cuda")
    for kind in KINDS * 2:
        cols = int(rng.choice(COLUMNS))
        shape = Shape(tuple(int(size) for size in rng.choice(EDGE_SIZES, 7)), cols)
        if not spec.get("hadamard") and rng.random() < 0.5:
            shape = Shape((0,) * 3, cols, matrix_rows=int(rng.choice(EDGE_SIZES[1:])))
        x = drawn_values(rng, shape.rows, cols, dtype, kind).to(place.device)
        wanted = {way: layouts.VALUES if rng.random() < 0.7 else layout for way, layout in NATIVE_LAYOUT.items()}
        if rng.random() < 0.3:
            wanted.pop(("rowwise", "columnwise")[int(rng.integers(2))])
        if not served(spec, dtype, wanted, place):
            with pytest.raises(ValueError, match="columnwise values of nvfp4"):
                quantize(spec, shape, x, dtype, wanted, place, Extras())
            continue
        made, _ = quantize(spec, shape, x, dtype, wanted, place, Extras())
        codes, _ = quantize(spec, shape, x, dtype, dict(NATIVE_LAYOUT), place, Extras())
        what = f"{kind} {shape.sizes} x {cols} {shape.matrix_rows} {wanted}"
        for plane in made:
            other = next(one for one in codes if one.direction == plane.direction)
            if plane.layout == layouts.VALUES:
                other = expanded(spec, shape, other, place)
                used = valid(spec, shape, plane)[0].size
                assert (plane.codes[used:] == POISON).all(), f"{what}: {plane.direction} past what is used"
            assert_same(spec, shape, [plane], [other], what)


def read_through(rng: np.random.Generator, shape: Shape) -> dict[str, tuple[Any, Extras]]:
    """Inputs that something stands before: an activation, its gradient, a normalization, and a router's choices."""
    swiglu = {"activation": native.ACTIVATIONS["swiglu"]}
    activation, gradient = (
        {"prologue": native.PROLOGUES[kind], **swiglu} for kind in ("activation", "activation_grad")
    )
    wide, x, dy = (
        drawn_values(rng, shape.rows, cols, "bfloat16", "normal")
        for cols in (2 * shape.cols, shape.cols, shape.cols // 2)
    )
    norm = {"prologue": native.PROLOGUES["norm"], "norm": native.NORMS["rms"]}
    each, count = 2, shape.rows // 2 + 1
    index = torch.from_numpy(rng.permutation(each * count)[: shape.rows])
    tokens = Extras(tensors={"index": index}, source={"each": each, "count": count})
    return {
        "activation": (wide, Extras(activation)),
        "gradient": (x, Extras(gradient, {"dy": dy})),
        "normalization": (x, Extras(norm, {"gamma": torch.ones(shape.cols, dtype=torch.bfloat16)}, epsilon=1e-6)),
        "tokens": (x[:count], tokens),
    }


@pytest.mark.parametrize("on", PLACES)
@pytest.mark.parametrize("spec", EMULATED, ids=NAMES)
def test_values_of_computed_rows(rng: np.random.Generator, spec: dict[str, Any], on: str) -> None:
    """The planes that `writes_values` names of what a prologue computes, or of rows of tokens, beside other codes."""
    sizes = (*(int(size) for size in rng.choice(EDGE_SIZES, 7)), 5)
    place, shape = Place(cuda=on == "cuda"), Shape(sizes, 144)
    named = SimpleNamespace(**{"square": False, "stochastic": False, "mxfp4": None, **spec})
    wanted = {
        way: layouts.VALUES if writes_values(named, way, "bfloat16", of_array=False) else layout
        for way, layout in NATIVE_LAYOUT.items()
    }
    assert wanted["rowwise"] == layouts.VALUES
    for what, (x, extras) in read_through(rng, shape).items():
        given = x.to(place.device)
        made, _ = quantize(spec, shape, given, "bfloat16", wanted, place, extras)
        codes, _ = quantize(spec, shape, given, "bfloat16", dict(NATIVE_LAYOUT), place, extras)
        for one, other in zip(made, codes, strict=True):
            same = expanded(spec, shape, other, place) if one.layout == layouts.VALUES else other
            assert_same(spec, shape, [one], [same], f"{what} {shape.sizes}")


@pytest.mark.parametrize("on", PLACES)
def test_values_are_of_blocks_alone(on: str) -> None:
    """A scale of a row or of a group stays out of the product until its end, so nothing is multiplied as values."""
    place, shape = Place(cuda=on == "cuda"), Shape((5, 3), 32)
    x = torch.zeros(shape.rows, 32, dtype=torch.bfloat16, device=place.device)
    with pytest.raises(ValueError, match="values, which are made of mxfp8 and nvfp4"):
        quantize({"scaling": "current", "format": "e4m3"}, shape, x, "bfloat16", BOTH, place, Extras())
