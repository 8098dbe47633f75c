"""The gradient of SwiGLU, plain and clamped, in block scaling where F is no multiple of 128.

A block of the joined row [2 F] then holds the last gradients of gates and the first of up projections. Codes and scales
are those that the CPU makes of the values that the device has quantized, and every other output is that of the general
kernels, which take rows that are not aligned: test_fused.py of the frameworks holds those to float64. Skipped where
there is no device.
"""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from devices import needs_device

import octavo_native as native

torch = pytest.importorskip("torch", reason="torch holds the memory of the device")

from problems import (  # noqa: E402  it imports torch
    CPU,
    CUDA,
    EDGE_SIZES,
    NATIVE_LAYOUT,
    POISON,
    SPECS,
    Extras,
    Shape,
    assert_same,
    drawn_values,
    quantize,
)

pytestmark = needs_device

BLOCK = [spec for spec in SPECS if spec["scaling"] == "block" and not spec.get("square")]
NAMES = ["-".join(str(value) for value in spec.values()) for spec in BLOCK]
WAYS = (tuple(NATIVE_LAYOUT), ("rowwise",), ("columnwise",))


def unaligned(x: Any) -> Any:
    """A copy whose rows begin between multiples of 16 bytes."""
    return torch.empty(x.numel() + 1, dtype=x.dtype, device="cuda")[1:].view_as(x).copy_(x)


def compare(rng: np.random.Generator, spec: dict[str, Any], name: str, features: int, kind: str) -> None:
    """Both planes and each alone, with probabilities and without, of groups of odd sizes, some empty; rows past the
    last one hold NaN in every input, and outputs are poisoned."""
    shape = Shape((0, *(int(size) for size in rng.choice(EDGE_SIZES, 5)), 130, 0, 257), 2 * features)
    x, dy = (drawn_values(rng, shape.rows, cols, "bfloat16", kind).cuda() for cols in (2 * features, features))
    probs = torch.from_numpy(rng.random(shape.rows, dtype=np.float32))
    for array in (x, dy, probs):
        array[shape.used :] = torch.nan
    prologue = {"prologue": native.PROLOGUES["activation_grad"], "activation": native.ACTIVATIONS[name]}
    for ways, given in itertools.product(WAYS, ({"dy": dy}, {"dy": dy, "probs": probs})):
        planes = {way: NATIVE_LAYOUT[way] for way in ways}
        # rows alone, with no sums of groups, are made in tiles that know no groups
        wanted = ("activated", "dprobs", *(("amax", "dbias") if "columnwise" in ways else ()))
        held = Extras(prologue, given, wanted)
        what = f"{name} F={features} {kind} {ways} {'with' if 'probs' in given else 'without'} probabilities"
        ours, extra = quantize(spec, shape, x, "bfloat16", planes, CUDA, held)
        _, general = quantize(spec, shape, unaligned(x), "bfloat16", planes, CUDA, held)
        for side in wanted:
            assert torch.equal(extra[side], general[side]), f"{what}: {side}"
        assert (extra["activated"].view(shape.rows, -1)[shape.used :] == POISON).all(), what
        assert not extra["dprobs"].view(torch.float32)[shape.used :].any(), what
        values = extra["activated"].view(torch.bfloat16).view(shape.rows, -1).cpu()
        values[shape.used :] = torch.nan
        theirs, other = quantize(spec, shape, values, "bfloat16", planes, CPU, Extras(wanted=("amax",)))
        assert "amax" not in extra or torch.equal(extra["amax"].cpu(), other["amax"]), what
        assert_same(spec, shape, ours, theirs, what)


@pytest.mark.parametrize("name", ["swiglu", "clamped_swiglu"])
@pytest.mark.parametrize("spec", BLOCK, ids=NAMES)
def test_blocks_that_hold_both_gradients_have_their_bits(
    rng: np.random.Generator, spec: dict[str, Any], name: str
) -> None:
    """Half a block past a multiple of 128, as gpt-oss has; any other multiple of eight; fewer than a block; and more
    than the 1024 columns of a tile that makes rows alone."""
    for features in (64, 8, 320, 8 * int(rng.integers(17, 64)), 1096, 8 * int(rng.integers(129, 200))):
        if features % 128:
            compare(rng, spec, name, features, "normal")


@pytest.mark.parametrize("kind", ["every bit", "wide", "huge", "not finite"])
@pytest.mark.parametrize("name", ["swiglu", "clamped_swiglu"])
def test_gates_of_every_size_have_their_bits(rng: np.random.Generator, name: str, kind: str) -> None:
    """Gates for which the exponential needs the long path, in warps of gates, of up projections and of both."""
    for features in (72, 192):
        compare(rng, BLOCK[0], name, features, kind)
