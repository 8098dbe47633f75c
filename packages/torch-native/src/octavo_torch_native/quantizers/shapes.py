"""QuantizeShapes: what quantizing launches on inputs of one shape write and need."""

from __future__ import annotations

from collections.abc import Callable

import torch

from octavo import GroupedTensorSpec
from octavo_torch_native.quantizers.planes import Shape

Output = tuple[Shape, torch.dtype]
"""The shape and dtype of an output."""


class QuantizeShapes:
    """What launches on inputs of one shape write and need.

    layout      the spec of the codes; built when it is first read, because recorded launches never read it
    outputs     the shape and dtype of every output
    constants   fields of octavo_native.InputArgs that follow from the shape
    workspace   bytes of scratch
    """

    __slots__ = ("_layout", "_make_layout", "constants", "outputs", "workspace")

    def __init__(
        self,
        make_layout: Callable[[], GroupedTensorSpec],
        outputs: tuple[Output, ...],
        constants: dict[str, int],
        workspace: int,
    ) -> None:
        self._make_layout, self.outputs, self.constants, self.workspace = make_layout, outputs, constants, workspace
        self._layout: GroupedTensorSpec | None = None

    @property
    def layout(self) -> GroupedTensorSpec:
        layout = self._layout
        if layout is None:
            layout = self._layout = self._make_layout()
        return layout
