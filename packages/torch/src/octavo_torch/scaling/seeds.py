"""Seeds of stochastic rounding: the caller's, or a module's own base seed and counter."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from octavo_torch.arrays.checks import brief

_STRIDE = 0x1E3779B97F4A7C15  # odd, so that counters give distinct seeds modulo 2^64


@dataclass(eq=False)
class SeedCounter:
    """A base seed and a counter, both 0-dimensional int64 tensors on the device of the data.

    The counter advances when gradients are rounded, not in forward, so activation recomputation changes no bit.
    """

    base: Tensor
    counter: Tensor

    def current(self) -> Tensor:
        """The seed for the present counter."""
        return torch.add(self.base, self.counter, alpha=_STRIDE)

    def take(self) -> Tensor:
        """The seed for the present counter, which then advances by one."""
        seed = self.current()
        self.counter.add_(1)
        return seed


Seed = int | Tensor | SeedCounter | None

DrawnSeed = int | Tensor | None
"""A seed as quantizers take it: a SeedCounter has given its tensor."""


def second_stream(seed: DrawnSeed) -> DrawnSeed:
    """The seed of the second layer in a function with one seed for two layers: seed XOR 2^63.

    The seed is Philox's key, so two layers with one key would draw the same bits at the same positions.
    """
    if isinstance(seed, Tensor):
        return seed.to(torch.int64) ^ -(1 << 63)
    return None if seed is None else seed ^ (1 << 63)


def for_backward(seed: Seed) -> Seed:
    """`seed` as a call keeps it until its backward: a copy of a tensor, which the caller may change before that."""
    return seed.clone() if isinstance(seed, Tensor) else seed


def check_seed(seed: object) -> None:
    """Raises ValueError unless `seed` is None, an integer, an integer scalar tensor or a SeedCounter."""
    if seed is None or isinstance(seed, SeedCounter) or (isinstance(seed, int) and not isinstance(seed, bool)):
        return
    if isinstance(seed, Tensor):
        if seed.is_meta:
            raise ValueError("seed is on the meta device and has no value; give an integer or a scalar that has one")
        if seed.numel() == 1 and not seed.is_floating_point() and not seed.is_complex():
            return
        raise ValueError(
            f"seed is a {str(seed.dtype).removeprefix('torch.')} tensor of shape {list(seed.shape)}; "
            "give an integer or a scalar integer tensor"
        )
    raise ValueError(f"seed is {brief(seed)}; give an integer (taken modulo 2^64) or a scalar integer tensor")


def check_base_seed(seed: object) -> None:
    """Raises ValueError unless `seed`, a module's, is None or an integer."""
    if seed is not None and (isinstance(seed, bool) or not isinstance(seed, int)):
        raise ValueError(f"seed is {brief(seed)}; give an integer (taken modulo 2^64), or None to draw one")


def seed_tensor(seed: Tensor | int | None, device: torch.device) -> Tensor | None:
    """A seed as a 0-dimensional int64 tensor on `device`, its bits those of the seed modulo 2^64."""
    if seed is None:
        return None
    if isinstance(seed, Tensor):
        return seed.reshape(()).to(device, torch.int64)
    wrapped = (seed + (1 << 63)) % (1 << 64) - (1 << 63)
    return torch.full((), wrapped, dtype=torch.int64, device=device)


def _flatten(seed: SeedCounter) -> tuple[list[Tensor], None]:
    return [seed.base, seed.counter], None


def _unflatten(tensors: Iterable[Tensor], _: None) -> SeedCounter:
    base, counter = tensors
    return SeedCounter(base, counter)


pytree.register_pytree_node(SeedCounter, _flatten, _unflatten, serialized_type_name="octavo_torch.SeedCounter")
