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

    spec        of the codes; built when it is first read, because recorded launches never read it
    outputs     the shape and dtype of every output
    constants   fields of octavo_native.InputArgs that follow from the shape
    workspace   bytes of scratch
    """

    __slots__ = ("_make_spec", "_spec", "constants", "outputs", "workspace")

    def __init__(
        self,
        make_spec: Callable[[], GroupedTensorSpec],
        outputs: tuple[Output, ...],
        constants: dict[str, int],
        workspace: int,
    ) -> None:
        self._make_spec, self.outputs, self.constants, self.workspace = make_spec, outputs, constants, workspace
        self._spec: GroupedTensorSpec | None = None

    @property
    def spec(self) -> GroupedTensorSpec:
        spec = self._spec
        if spec is None:
            spec = self._spec = self._make_spec()
        return spec
