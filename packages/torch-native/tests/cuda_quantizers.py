"""What CUDA tests of quantizers share: drawn rows, calls of every kind, and what is defined in two results compared."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import native_calls as native
import torch
from torch import Tensor

import octavo_numerics
import octavo_torch
from octavo import QuantizerSpec
from octavo_conformance.cards.variants import RAGGED
from octavo_torch import GroupedTensor
from octavo_torch.arrays.grouped_tensor import PLANES
from octavo_torch.bridge import BRIDGE

G, M, K = 6, 700, 272
LAYOUTS = (("plain", "plain"), ("rows", "panels"))
Arguments = dict[str, Any]


def given(spec: QuantizerSpec, device: str = "cuda", groups: int = G) -> Arguments:
    arguments: Arguments = {}
    if spec.stochastic:
        arguments |= {"seed": torch.tensor(1234567890123456789, device=device), "group_offset": 3}
    if spec.scaling == "delayed":
        arguments["scale"] = torch.exp2(torch.arange(groups, dtype=torch.float32) - 2).to(device)
    return arguments


def every(value: native.Quantized | GroupedTensor) -> dict[str, Tensor]:
    """Every tensor of a result by name."""
    codes = value.codes if isinstance(value, native.Quantized) else value
    found = {name: getattr(codes, name) for name in (*PLANES, "group_sizes")}
    if isinstance(value, native.Quantized):
        found |= {name: item for name, item in vars(value).items() if name != "codes"}
    return {name: item for name, item in found.items() if item is not None}


def raw(tensor: Tensor) -> Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def assert_valid(a: native.Quantized, b: native.Quantized, used: int, what: object = "") -> None:
    """What is defined is the same, on whatever device: codes and scales of used rows, extras."""
    for direction in a.codes.spec.quantizer.directions:
        plain = [native.convert(value.codes, ("plain", "plain")) for value in (a, b)]
        ours, theirs = (octavo_torch.dequantize(q, direction).cpu() for q in plain)
        assert torch.equal(ours.view(torch.int32), theirs.view(torch.int32)), f"{what}: {direction} values"
    assert_planes(a.codes, b.codes, what)
    for name in ("amax", "dbias"):
        ours, theirs = getattr(a, name), getattr(b, name)
        assert (ours is None) == (theirs is None)
        if ours is not None:
            assert torch.equal(raw(ours.cpu()), raw(theirs.cpu())), f"{what}: {name}"
    for name in ("dequantized", "activated", "mean", "rstd"):
        ours, theirs = getattr(a, name), getattr(b, name)
        if ours is not None and theirs is not None:
            flat = [value.reshape(-1, value.shape[-1] if value.dim() > 1 else 1)[:used] for value in (ours, theirs)]
            assert torch.equal(raw(flat[0].cpu()), raw(flat[1].cpu())), f"{what}: {name}"


def assert_planes(a: GroupedTensor, b: GroupedTensor, what: object = "") -> None:
    """Valid codes and scales, byte for byte."""
    arrays = []
    for value in (a, b):
        plain = native.convert(value, ("plain", "plain"))
        sizes = None if plain.group_sizes is None else plain.group_sizes.cpu().numpy()
        planes = {name: getattr(plain, name) for name in PLANES}
        made = {name: None if plane is None else BRIDGE.to_numpy(plane) for name, plane in planes.items()}
        arrays.append(octavo_numerics.valid(octavo_numerics.QuantizedArray(plain.spec, sizes, **made)))
    assert arrays[0].keys() == arrays[1].keys()
    for name, plane in arrays[0].items():
        assert plane.tobytes() == arrays[1][name].tobytes(), f"{what}: {name}"


def rows(dtype: torch.dtype = torch.bfloat16, sizes: list[int] | None = None, columns: int = K) -> Tensor:
    x = torch.randn(M, columns, dtype=torch.float32, device="cuda").to(dtype)
    if sizes is not None:
        x[sum(sizes) :] = torch.nan
    return x


def launches(name: str, layouts: tuple[str, str]) -> dict[str, Callable[[Tensor, Tensor, Tensor], native.Quantized]]:
    """Calls of (x [M, K], dy [M, K / 2], sizes): plain and fused."""
    spec = RAGGED[name]
    options: Arguments = {"layouts": layouts, "amax": True, "dequantized": True, **given(spec)}
    gamma = torch.randn(K, device="cuda").bfloat16()
    probs = torch.rand(M, device="cuda")
    return {
        "quantize": lambda x, dy, s: native.quantize(x, spec, s, **options),
        "act": lambda x, dy, s: native.act_quantize(x, spec, s, probs=probs, activated=True, **options),
        "dact": lambda x, dy, s: native.dact_quantize(dy, x, spec, s, probs=probs, dbias=True, **options),
        "norm": lambda x, dy, s: native.norm_quantize(x, gamma, gamma, spec, s, norm="layer", **options),
    }
