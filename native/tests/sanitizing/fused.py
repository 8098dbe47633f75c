"""Quantizers behind an activation, its gradient or a norm."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from problems import ACTIVATIONS, DIRECTIONS, DTYPES, NATIVE_LAYOUT, SIZES, SPECS, Extras, Place, Shape, quantize
from sanitizing.comparison import Comparison
from torch import Tensor

import octavo_native as native

BLOCKS = [spec for spec in SPECS if spec["scaling"] == "block" and not spec.get("square")]


def prologues(check: Comparison) -> None:
    """Activations, their derivatives and norms. Codes are compared with those of the rounded values quantized
    alone on the CPU: it is the quantizer that is exact."""
    kinds = [("activation", name) for name in ACTIVATIONS]
    kinds += [("activation_grad", name) for name in ACTIVATIONS]
    kinds += [("norm", name) for name in native.NORMS]
    specs = [SPECS[0], SPECS[2], SPECS[4], SPECS[6], SPECS[9], SPECS[12], SPECS[14]]
    for number, (kind, name) in enumerate(kinds * 2):
        _fused(check, specs[number % len(specs)], kind, name, tuple(DTYPES)[number % 3], number)
    # SwiGLU, plain and clamped, has kernels of its own, of aligned bf16 rows; in block scaling its gradient has two,
    # for blocks that end at F and for others
    names = ("swiglu", "clamped_swiglu")
    for number, (kind, spec, name) in enumerate(itertools.product(("activation", "activation_grad"), specs, names)):
        _fused(check, spec, kind, name, "bfloat16", number, inner=64)
    for number, (spec, name, inner) in enumerate(itertools.product(BLOCKS, names, (72, 256, 200))):
        _fused(check, spec, "activation_grad", name, "bfloat16", number, inner)


def values(check: Comparison) -> None:
    """Activations and their derivatives of which nobody reads codes: those that are made beside codes, and beside the
    derivative the activation, too."""
    for number, (kind, name) in enumerate(itertools.product(("activation", "activation_grad"), ACTIVATIONS)):
        for features, dtype in ((64, "bfloat16"), (200, "bfloat16"), (38, tuple(DTYPES)[number % 3])):
            _without_codes(check, kind, name, features, dtype, with_probs=bool(number % 2))


def _without_codes(check: Comparison, kind: str, name: str, features: int, dtype: str, *, with_probs: bool) -> None:
    gradient = kind == "activation_grad"
    in_cols = 2 * features if name in native.GATED else features
    shape = Shape(SIZES[0], in_cols if gradient else features)
    x = check.rows(shape, in_cols, dtype, check.place, check.values(shape, in_cols, dtype))
    tensors = {"probs": torch.rand(shape.rows, generator=check.draw)} if with_probs else {}
    wanted = ("activated",)
    if gradient:
        tensors["dy"] = check.rows(shape, features, dtype, check.place, check.values(shape, features, dtype))
        wanted = ("activated", "dprobs", "forward")
    prologue = {"prologue": native.PROLOGUES[kind], "activation": native.ACTIVATIONS[name]}
    spec, planes = {"scaling": "mxfp8", "format": "e4m3"}, {"rowwise": NATIVE_LAYOUT["rowwise"]}
    _, alone = quantize(spec, shape, x, dtype, {}, check.place, Extras(prologue, tensors, wanted))
    _, beside = quantize(spec, shape, x, dtype, planes, check.place, Extras(prologue, tensors, wanted))
    for made in wanted:
        used = alone[made].numel() // shape.rows * shape.used
        check.same(
            f"{kind} {name} {features} {dtype} {made}",
            *(extra[made].cpu().numpy()[:used] for extra in (alone, beside)),
        )


def _fused(
    check: Comparison, spec: dict[str, Any], kind: str, name: str, dtype: str, number: int, inner: int = 0
) -> None:
    gated = name in native.GATED
    inner = inner or (64, 38)[number % 2]
    out_cols = 2 * inner if kind == "activation_grad" and gated else inner
    in_cols = 2 * inner if gated and kind != "norm" else inner
    shape = Shape(SIZES[number % 4], out_cols)
    values = check.values(shape, in_cols, dtype)
    prologue = {"prologue": native.PROLOGUES[kind]}
    prologue |= {"norm": native.NORMS[name]} if kind == "norm" else {"activation": native.ACTIVATIONS[name]}
    tensors: dict[str, Tensor] = {}
    wanted = ["amax", "activated"]
    if kind == "norm":
        tensors["gamma"] = torch.randn(in_cols, generator=check.draw).to(DTYPES[dtype])
        wanted += ["rstd"]
        if name == "layer":
            tensors["beta"] = torch.randn(in_cols, generator=check.draw).to(DTYPES[dtype])
            wanted += ["mean"]
    elif number % 2:
        tensors["probs"] = torch.rand(shape.rows, generator=check.draw)
    if kind == "activation_grad":
        tensors["dy"] = check.values(shape, inner, dtype)
        wanted += ["dprobs"]
    directions = (DIRECTIONS, DIRECTIONS, ("rowwise",))[number % 3]
    if kind == "activation_grad" and directions == DIRECTIONS:  # sums of columns have rows made as with both planes
        wanted += ["dbias"]
    planes = {direction: NATIVE_LAYOUT[direction] for direction in directions}
    what = f"{kind} {name} + {spec} {dtype}"

    def run(place: Place) -> Any:
        x = check.rows(shape, in_cols, dtype, place, values)
        held = Extras(prologue, dict(tensors), tuple(wanted), 1e-5)
        if "dy" in tensors:
            held.tensors["dy"] = check.rows(shape, inner, dtype, place, tensors["dy"])
        return quantize(spec, shape, x, dtype, planes, place, held)

    made = check.both(what, run)
    if made is None:
        return
    ours, extra = made[0]
    activated = extra["activated"].cpu().view(DTYPES[dtype]).view(shape.rows, out_cols)
    alone = check.rows(shape, out_cols, dtype, check.reference, activated)
    theirs, other = quantize(spec, shape, alone, dtype, planes, check.reference, Extras(wanted=("amax",)))
    check.planes(what, spec, shape, ours, theirs)
    check.same(f"{what} amax", extra["amax"].cpu().numpy(), other["amax"].numpy())
    for name_of in ("mean", "rstd", "dprobs"):
        if name_of in extra and not extra[name_of].cpu().view(torch.float32)[: shape.used].isfinite().all():
            check.faults.append(f"{what}: {name_of} has values that are not finite")
    if "dbias" in extra:
        check.summed(what, shape, activated.double(), extra["dbias"].cpu().view(torch.float32))
