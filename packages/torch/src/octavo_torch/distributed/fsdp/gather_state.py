"""What a weight's shard knows beside its values: how it is gathered, and codes kept from one gather to the next."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from octavo import GroupedTensorSpec
from octavo_torch.dispatch.layer import Layer
from octavo_torch.distributed.fsdp.route import Route


@dataclass
class Gathered:
    """What goes from before the gather to after it: the whole's spec, its layer, scales that FSDP did not gather."""

    spec: GroupedTensorSpec
    layer: Layer
    scales: list[Tensor]


Given = tuple[tuple[Tensor, ...], Gathered]
"""What is gathered, and what goes with it."""


@dataclass
class _Kept:
    given: Given
    version: tuple[int, int]
    stream: torch.cuda.Stream | None


@dataclass
class Notes:
    """What a shard and its copies know together.

    name     of the parameter in its module
    number   which of the module's layers the weight belongs to
    route    how it was gathered last
    keeps    codes are kept from one gather to the next: the weight does not change
    """

    name: str
    number: int
    route: Route | None = None
    keeps: bool = False
    _kept: _Kept | None = None

    def keep(self, keeps: bool) -> None:
        """Begin or end a block of unchanged weights."""
        self.keeps, self._kept = keeps, self._kept if keeps else None

    def codes(self, values: Tensor, module: nn.Module, layer: Layer, make: Callable[[], Given]) -> Given:
        """What `make` returns for a shard's `values`, or has returned for them in this block of unchanged weights."""
        if not self.keeps:
            return make()
        here = torch.cuda.current_stream(values.device) if values.is_cuda else None
        kept = self._kept
        if kept is None or kept.given[1].layer is not layer:
            self._kept = kept = _Kept(make(), self._version(values, module), here)
        if self._version(values, module) != kept.version:
            raise ValueError(
                f"a weight's shard of shape {list(values.shape)} has changed inside unchanged_weights; leave the block "
                "before weights are written"
            )
        if here is not None and kept.stream is not None and here != kept.stream:
            here.wait_stream(kept.stream)
            for tensor in kept.given[0]:
                tensor.record_stream(here)
        return kept.given

    def _version(self, values: Tensor, module: nn.Module) -> tuple[int, int]:
        """Grows where the values are written, and where an optimizer writes the parameter that wraps them."""
        parameter = module._parameters[self.name]
        return values._version, 0 if parameter is None else parameter._version
