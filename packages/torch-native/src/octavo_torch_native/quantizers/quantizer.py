"""Quantizer: the bound function of a "quantize" request, and the launch that every function of this package makes."""

from __future__ import annotations

from torch import Tensor

from octavo import QuantizerSpec
from octavo.grouped_tensor import PLAIN
from octavo.quantizer import Operand
from octavo_torch.plugin_api import GroupedTensor, seed_tensor
from octavo_torch_native.arrays.group_index import GroupIndex, group_index_of
from octavo_torch_native.quantizers import operators
from octavo_torch_native.quantizers.buffers import planes_of, write_sizes
from octavo_torch_native.quantizers.dequantizer import converted
from octavo_torch_native.quantizers.kernel import Frame, Kernel, kernel_of
from octavo_torch_native.quantizers.work import Work, text_of

_OPERANDS: tuple[Operand, ...] = ("x", "w", "dy")


Inputs = tuple[Tensor, Tensor | None, int, str, Tensor | None, int, Tensor | None]
"""The first arguments of the operators that quantize."""


class Quantizer:
    """One spec, in the layouts of its request, as octavo_registry.contract.quantize has it.

    Sizes may also be a GroupIndex.
    """

    def __init__(self, spec: QuantizerSpec, layouts: tuple[str, str] = (PLAIN, PLAIN)) -> None:
        self._stochastic = spec.stochastic
        self._layouts = layouts
        self._by_operand: dict[str | None, tuple[str, Kernel]] = {}
        self._with_amax: dict[str | None, tuple[str, Kernel]] = {}
        for operand in _OPERANDS:
            text = text_of(Work(spec, operand, layouts))
            self._by_operand[operand] = text, kernel_of(text)
            text = text_of(Work(spec, operand, layouts, amax=True))
            self._with_amax[operand] = text, kernel_of(text)
        self._by_operand[None] = self._by_operand[spec.role]
        self._with_amax[None] = self._with_amax[spec.role]

    def __call__(
        self,
        x: Tensor,
        group_sizes: Tensor | GroupIndex | None = None,
        *,
        seed: Tensor | int | None = None,
        operand: str | None = None,
        group_offset: int = 0,
        scale: Tensor | None = None,
    ) -> GroupedTensor:
        """`x` in the planes of the spec; `seed`, `operand` and `group_offset` tell where random bits come from."""
        text, kernel = self._by_operand[operand]
        inputs, frame, sizes = self._launch(text, kernel, x, group_sizes, seed, group_offset, scale)
        return kernel.tensor(frame, sizes, operators.quantize(*inputs, None, None, None, None))

    def with_amax(
        self,
        x: Tensor,
        group_sizes: Tensor | GroupIndex | None = None,
        *,
        seed: Tensor | int | None = None,
        operand: str | None = None,
        group_offset: int = 0,
        scale: Tensor | None = None,
    ) -> tuple[GroupedTensor, Tensor]:
        """The same in one launch with x's amax by group, fp32 [G]."""
        text, kernel = self._with_amax[operand]
        inputs, frame, sizes = self._launch(text, kernel, x, group_sizes, seed, group_offset, scale)
        outputs = operators.quantize(*inputs, None, None, None, None)
        return kernel.tensor(frame, sizes, outputs), outputs[-1]

    def into(
        self,
        x: Tensor,
        group_sizes: Tensor | GroupIndex | None = None,
        *,
        out: GroupedTensor,
        amax: Tensor | None = None,
        unchanged: Tensor | None = None,
        seed: Tensor | int | None = None,
        operand: str | None = None,
        group_offset: int = 0,
        scale: Tensor | None = None,
    ) -> None:
        """The same, written into the planes of `out`, and x's amax into `amax`, unless `unchanged` is not 0."""
        text, kernel = (self._by_operand if amax is None else self._with_amax)[operand]
        inputs, frame, sizes = self._launch(text, kernel, x, group_sizes, seed, group_offset, scale)
        planes = planes_of(out, kernel, frame, x.device)
        operators.quantize_into(*inputs, unchanged, planes if amax is None else [*planes, amax])
        write_sizes(out, sizes)

    def from_plain(self, q: GroupedTensor) -> GroupedTensor:
        """Plain planes, which may be another's, in the layouts of the request; planes of equal bytes are shared."""
        return converted(q, self._layouts)

    def to_plain(self, q: GroupedTensor) -> GroupedTensor:
        """The way back: plain planes, the same codes and scales."""
        return converted(q, (PLAIN, PLAIN))

    def _launch(
        self,
        text: str,
        kernel: Kernel,
        x: Tensor,
        group_sizes: Tensor | GroupIndex | None,
        seed: Tensor | int | None,
        group_offset: int,
        scale: Tensor | None,
    ) -> tuple[Inputs, Frame, Tensor | None]:
        """The operator's arguments, the frame and int64 sizes."""
        plan = group_index_of(x.shape, group_sizes, x)
        if plan is None:
            groups, words, sizes = x.shape[0], None, None
        else:
            groups, words, sizes = plan.groups, plan.words, plan.group_sizes
        key = seed_tensor(seed, x.device) if self._stochastic else None
        inputs = (x, words, groups, text, key, group_offset, scale)
        return inputs, kernel.frame(x, groups), sizes
