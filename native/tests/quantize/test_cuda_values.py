"""SwiGLU and its gradient where nobody reads codes have kernels of their own, and the bits of those that quantize.

Skipped where there is no device.
"""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from devices import needs_device

import octavo_native as native

torch = pytest.importorskip("torch", reason="torch holds the memory of the device")

from problems import ACTIVATIONS, CUDA, DTYPES, EDGE_SIZES, NATIVE_LAYOUT, POISON, Extras, Shape, drawn_values, quantize  # noqa: E402

pytestmark = needs_device

SPEC = {"scaling": "block", "format": "e4m3", "power_of_two": True}
FEATURES = (8, 72, 128, 200, 256, 768, 1032)
KINDS = ("normal", "every bit", "wide", "not finite")
"""Gates of the last three lie beyond the range of the shorter path to silu."""


@pytest.mark.parametrize("name", ["swiglu", "clamped_swiglu"])
@pytest.mark.parametrize("kind", ["activation", "activation_grad"])
def test_values_alone_have_the_bits_of_those_beside_codes(rng: np.random.Generator, kind: str, name: str) -> None:
    """Values, the probabilities' gradients and the forward's values beside the gradient, which the general kernels make
    where codes are asked for, too; of groups of odd sizes and of few and many columns. Rows past the last group hold
    NaN in every input, and are written by nobody."""
    prologue = {"prologue": native.PROLOGUES[kind], "activation": native.ACTIVATIONS[name]}
    gradient = kind == "activation_grad"
    wanted = ("activated", "dprobs", "forward") if gradient else ("activated",)
    for features, values in itertools.product(FEATURES, KINDS):
        cols = 2 * features if gradient else features
        shape = Shape((0, *(int(size) for size in rng.choice(EDGE_SIZES, 5)), 130, 0), cols)
        x, dy = (drawn_values(rng, shape.rows, width, "bfloat16", values).cuda() for width in (2 * features, features))
        probs = torch.from_numpy(rng.random(shape.rows, dtype=np.float32))
        for array in (x, dy, probs):
            array[shape.used :] = torch.nan
        for given in ({}, {"probs": probs}):
            tensors: dict[str, Any] = given | ({"dy": dy} if gradient else {})
            made = [
                quantize(SPEC, shape, x, "bfloat16", planes, CUDA, Extras(prologue, tensors, wanted))[1]
                for planes in ({}, {"rowwise": NATIVE_LAYOUT["rowwise"]})
            ]
            what = f"{features} features, {values}, probabilities: {bool(given)}"
            alone, beside = (extra["activated"].view(shape.rows, -1) for extra in made)
            assert torch.equal(alone[: shape.used], beside[: shape.used]), what
            assert (alone[shape.used :] == POISON).all(), f"{what}: the tail"
            if gradient:
                assert torch.equal(made[0]["dprobs"], made[1]["dprobs"]), f"{what}: dprobs"
                forward, general = (extra["forward"].view(shape.rows, -1) for extra in made)
                assert torch.equal(forward[: shape.used], general[: shape.used]), f"{what}: the forward's values"
                assert (forward[shape.used :] == POISON).all(), f"{what}: the tail of the forward's values"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_the_forward_beside_a_gradient_is_the_forward(rng: np.random.Generator, name: str, dtype: str) -> None:
    """Of every activation, with codes and without, with sums of columns and without, aligned and not."""
    number, gated = native.ACTIVATIONS[name], name in native.GATED
    for features in (200, 37):
        sizes = (0, *(int(size) for size in rng.choice(EDGE_SIZES, 4)), 130)
        shape, wide = Shape(sizes, features), Shape(sizes, 2 * features if gated else features)
        x, dy = (drawn_values(rng, shape.rows, cols, dtype, "normal").cuda() for cols in (wide.cols, features))
        probs = torch.from_numpy(rng.random(shape.rows, dtype=np.float32))
        act, dact = ({"prologue": native.PROLOGUES[f"activation{end}"], "activation": number} for end in ("", "_grad"))
        forward = quantize(SPEC, shape, x, dtype, {}, CUDA, Extras(act, {"probs": probs}, ("activated",)))[1]
        used = forward["activated"].numel() // shape.rows * shape.used
        for planes, more in (({}, ()), ({}, ("dbias",)), (NATIVE_LAYOUT, ("amax",))):
            extras = Extras(dact, {"probs": probs, "dy": dy}, ("activated", "forward", *more))
            made = quantize(SPEC, wide, x, dtype, planes, CUDA, extras)[1]
            assert torch.equal(made["forward"][:used], forward["activated"][:used]), (features, more)
