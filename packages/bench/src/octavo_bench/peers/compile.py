"""The same recipes in plain torch under torch.compile: what a user gets without kernels of ours.

Even groups only, sizes and columns multiples of 128, the rule for non-finite input left out; the scales follow
docs/numerics, so codes can be counted that equal ours.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

E4M3_MAX = 448.0
FP32_MAX = torch.finfo(torch.float32).max

Peer = Callable[..., Any]


def block_row(x: Tensor) -> tuple[Tensor, Tensor]:
    """1x128 blocks, power-of-two fp32 scales stored [C / 128, M]."""
    rows, cols = x.shape
    blocks = x.float().view(rows, cols // 128, 128)
    encode = power_of_two(blocks.abs().amax(-1))
    codes = e4m3(blocks * encode[..., None]).view(rows, cols)
    return codes, (1 / encode).t().contiguous()


def block_both(x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """1x128 rows, and 128x1 columns as panels [M / 128, C, 128] with scales [M / 128, C]."""
    rows, cols = x.shape
    panels = x.float().view(rows // 128, 128, cols)
    encode = power_of_two(panels.abs().amax(1))
    codes = e4m3(panels * encode[:, None, :]).transpose(1, 2).contiguous()
    return *block_row(x), codes, 1 / encode


def mxfp8_row(x: Tensor) -> tuple[Tensor, Tensor]:
    """1x32 blocks, E8M0 exponent bytes rounded up."""
    rows, cols = x.shape
    blocks = x.float().view(rows, cols // 32, 32)
    bits = (blocks.abs().amax(-1) * (1 / E4M3_MAX)).view(torch.int32)
    exponent, mantissa = bits >> 23, bits & 0x7FFFFF
    byte = torch.where(exponent == 0, (mantissa > 0x400000).int(), exponent + (mantissa > 0).int()).clamp(max=254)
    encode = torch.where(byte == 254, 0x400000, (254 - byte) << 23).view(torch.float32)
    return e4m3(blocks * encode[..., None]).view(rows, cols), byte.to(torch.uint8)


def tensor_row(x: Tensor, encode: Tensor) -> Tensor:
    """One known scale per group, [G], of M / G rows each."""
    rows, cols = x.shape
    groups = x.float().view(encode.shape[0], rows // encode.shape[0], cols)
    return e4m3(groups * encode[:, None, None]).view(rows, cols)


def swiglu_block_row(x: Tensor) -> tuple[Tensor, Tensor]:
    """silu(gate) * up in fp32, rounded once to x's dtype, then 1x128 blocks."""
    gate, up = x.float().chunk(2, dim=1)
    return block_row((functional.silu(gate) * up).to(x.dtype))


_PEERS: dict[tuple[str, str, bool], Peer] = {
    ("block", "row", False): block_row,
    ("block", "both", False): block_both,
    ("block", "row", True): swiglu_block_row,
    ("mxfp8", "row", False): mxfp8_row,
    ("delayed", "row", False): tensor_row,
}


def quantizer_peer(recipe: str, outputs: str, *, swiglu: bool) -> Peer | None:
    """The torch version of a quantizer that writes "row" or "both" planes; None where there is none."""
    return _PEERS.get((recipe, outputs, swiglu))


def compiled(peer: Peer) -> Peer:
    """A peer under torch.compile for static shapes."""
    return torch.compile(peer, dynamic=False)


def row_codes(result: Any) -> Tensor:
    """The row codes of what a peer returned, as bytes."""
    codes: Tensor = result[0] if isinstance(result, tuple) else result
    return codes.view(torch.uint8)


def power_of_two(amax: Tensor) -> Tensor:
    """The encode scale of blocks with these largest magnitudes; 1 for blocks of zeros."""
    scale = (E4M3_MAX / amax).clamp(max=FP32_MAX)
    scale = (scale.view(torch.int32) & 0x7F800000).view(torch.float32)
    return torch.where(amax == 0, 1.0, scale)


def e4m3(values: Tensor) -> Tensor:
    """Codes of values that are scaled already, saturated."""
    return values.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)
