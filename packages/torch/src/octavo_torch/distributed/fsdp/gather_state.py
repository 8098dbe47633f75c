"""GatherState: how a weight's shard is gathered, and the codes that later gathers of a block of microbatches reuse."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from octavo import GroupedTensorSpec
from octavo_torch.dispatch.layer import Layer
from octavo_torch.distributed.fsdp.route import Route
from octavo_torch.linear.contexts import autocast_dtype


@dataclass
class Gathered:
    """Passed along the all-gather: the whole weight's spec, its layer, and scales that FSDP does not gather."""

    spec: GroupedTensorSpec
    layer: Layer
    scales: list[Tensor]


GatherInput = tuple[tuple[Tensor, ...], Gathered]
"""The tensors that are gathered, and what accompanies them."""


@dataclass
class _ReusableCodes:
    gather_input: GatherInput
    version: tuple[int, int]
    stream: torch.cuda.Stream | None


@dataclass
class GatherState:
    """Shared by a shard and its copies.

    name           of the parameter in its module
    number         of the weight's layer in its module
    route          how the weight was gathered last
    reuses_codes   the weight does not change, so codes of one gather serve the next
    dtype          the dtype to which torch.autocast cast the values in the last forward; None outside of it
    """

    name: str
    number: int
    route: Route | None = None
    reuses_codes: bool = False
    dtype: torch.dtype | None = None
    _codes: _ReusableCodes | None = None

    def reuse_codes(self, reuses: bool) -> None:
        """Begin or end a block of unchanged weights."""
        self.reuses_codes, self._codes = reuses, self._codes if reuses else None

    def as_read(self, values: Tensor) -> Tensor:
        """`values` in the dtype in which the forward reads them; a backward, outside of autocast, gathers the same."""
        if torch._C._current_graph_task_id() == -1:
            self.dtype = autocast_dtype(values.device)
        return values if self.dtype is None else values.to(self.dtype)

    def codes(
        self, values: Tensor, module: nn.Module, layer: Layer, quantize: Callable[[], GatherInput]
    ) -> GatherInput:
        """The result of `quantize` for a shard's `values`, called once per block of unchanged weights.

        Raises ValueError where the values have changed in such a block.
        """
        if not self.reuses_codes:
            return quantize()
        here = torch.cuda.current_stream(values.device) if values.is_cuda else None
        codes = self._codes
        if codes is None or codes.gather_input[1].layer is not layer:
            self._codes = codes = _ReusableCodes(quantize(), self._version(values, module), here)
        if self._version(values, module) != codes.version:
            raise ValueError(
                f"a weight's shard of shape {list(values.shape)} has changed inside unchanged_weights; leave the block "
                "before weights are written"
            )
        if here is not None and codes.stream is not None and here != codes.stream:
            here.wait_stream(codes.stream)
            for tensor in codes.gather_input[0]:
                tensor.record_stream(here)
        return codes.gather_input

    def _version(self, values: Tensor, module: nn.Module) -> tuple[int, int]:
        """Grows when the values are written, and when an optimizer writes the parameter that wraps them."""
        parameter = module._parameters[self.name]
        return values._version, 0 if parameter is None else parameter._version
