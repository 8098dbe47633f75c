"""A limit of CTAs changes no bit of a quantizer whose kernels stay on their multiprocessors; others refuse one."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import octavo_native as native

torch = pytest.importorskip("torch", reason="torch holds the memory of the device")

from devices import PLACES  # noqa: E402  torch is there
from problems import DIRECTIONS, DTYPES, NATIVE_LAYOUT, SPECS, Place, Shape, address, new_plane, quantizer  # noqa: E402
from quantize_call import run_quantizer  # noqa: E402

SIZES = (130, 0, 17, 301)
COLUMNS = 264

STAY: tuple[dict[str, Any], ...] = (
    {"kind": "activation", "activation": "gelu"},
    {"kind": "activation_grad", "activation": "silu"},
    {"kind": "norm", "norm": "rms"},
)
PASS: tuple[dict[str, Any], ...] = (
    {"kind": "none"},
    {"kind": "activation", "activation": "swiglu"},
    {"kind": "activation_grad", "activation": "swiglu"},
)


class Call:
    """One quantizer of random bf16 rows, after a prologue, into both planes."""

    def __init__(self, spec: dict[str, Any], prologue: dict[str, Any], place: Place, rng: np.random.Generator) -> None:
        self.place, self.quantizer = place, quantizer(spec)
        gated = prologue.get("activation") in native.GATED
        cols = COLUMNS * (2 if gated else 1)
        shape = Shape(SIZES, cols if prologue["kind"] == "activation_grad" else COLUMNS)
        draw = torch.Generator().manual_seed(int(rng.integers(1 << 62)))

        def values(*sides: int) -> torch.Tensor:
            return torch.randn(sides, generator=draw).to(place.device, DTYPES["bfloat16"])

        self.kept = {"x": values(shape.rows, cols), "dy": values(shape.rows, COLUMNS), "gamma": values(cols)}
        self.kept |= {"rstd": torch.empty(shape.rows, device=place.device), "plan": shape.plan(place)}
        self.kept["encode"] = torch.full((len(SIZES),), 16.0, device=place.device)
        numbers = {"prologue": native.PROLOGUES[prologue["kind"]]}
        if "activation" in prologue:
            numbers["activation"] = native.ACTIVATIONS[prologue["activation"]]
        if "norm" in prologue:
            numbers["norm"] = native.NORMS[prologue["norm"]]
        sides = {"cuda": place.cuda, "dtype": native.DTYPES["bfloat16"], "cols": cols, **shape.arguments}
        self.planes = {name: new_plane(spec, shape, name, NATIVE_LAYOUT[name], place) for name in DIRECTIONS}
        size = self.quantizer.workspace_bytes(**sides, **numbers, rowwise=True, columnwise=True)
        self.kept["workspace"] = torch.empty(size, dtype=torch.uint8, device=place.device)
        self.arguments: dict[str, Any] = {
            **sides,
            **(numbers if prologue["kind"] != "none" else {}),
            "x": address(self.kept["x"]),
            "row_stride": cols,
            "plan": address(self.kept["plan"]),
            "encode_scales": address(self.kept["encode"]) if spec["scaling"] == "delayed" else 0,
            "workspace": address(self.kept["workspace"]),
            "workspace_bytes": size,
        }
        if prologue["kind"] == "activation_grad":
            self.arguments |= {"dy": address(self.kept["dy"]), "dy_stride": COLUMNS}
        if prologue["kind"] == "norm":
            self.arguments |= {"gamma": address(self.kept["gamma"]), "rstd": address(self.kept["rstd"])}

    def bits(self, ctas: int) -> list[np.ndarray]:
        """Codes and scales of both planes, poisoned before."""
        planes: dict[str, int] = dict.fromkeys(("row_layout", "col_layout"), native.LAYOUTS["native"])
        for name, plane in self.planes.items():
            plane.codes.fill_(0xA5)
            plane.scales.fill_(0xA5)
            parts = {"codes": plane.codes, "scales": plane.scales, "global": plane.factor}
            planes |= {f"{name[:3]}_{part}": address(array) for part, array in parts.items()}
        stream = torch.cuda.current_stream().cuda_stream if self.place.cuda else 0
        run_quantizer(self.quantizer, **self.arguments, **planes, ctas=ctas, stream=stream)
        if self.place.cuda:
            torch.cuda.synchronize()
        arrays = [part for plane in self.planes.values() for part in (plane.codes, plane.scales)]
        return [array.cpu().numpy().copy() for array in arrays]


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("prologue", STAY, ids=lambda prologue: prologue["kind"])
@pytest.mark.parametrize("scaling", ["delayed", "current", "row", "block", "mxfp8"])
def test_every_limit_has_the_same_bits(
    place: str, prologue: dict[str, Any], scaling: str, rng: np.random.Generator
) -> None:
    """A tile's CTA is a matter of the grid alone: one, an odd few, and more than the device holds at once."""
    spec = next(spec for spec in SPECS if spec["scaling"] == scaling and not spec.get("square"))
    call = Call(spec, prologue, Place(cuda=place == "cuda"), rng)
    free = call.bits(0)
    for ctas in (1, 2, int(rng.integers(3, 40)), 100_000):
        for ours, theirs in zip(call.bits(ctas), free, strict=True):
            assert np.array_equal(ours, theirs), ctas


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("prologue", PASS, ids=lambda prologue: prologue["kind"])
def test_kernels_with_a_cta_for_each_tile_refuse_a_limit(
    place: str, prologue: dict[str, Any], rng: np.random.Generator
) -> None:
    """Such a limit could only be ignored: the sentence says what to do instead. The CPU has no CTAs, and takes any."""
    spec = next(spec for spec in SPECS if spec["scaling"] == "block" and not spec.get("square"))
    call = Call(spec, prologue, Place(cuda=place == "cuda"), rng)
    free = call.bits(0)
    if call.place.cuda:
        with pytest.raises(ValueError, match="has a CTA for each tile, which ends within microseconds"):
            call.bits(16)
        return
    for ours, theirs in zip(call.bits(16), free, strict=True):
        assert np.array_equal(ours, theirs)
