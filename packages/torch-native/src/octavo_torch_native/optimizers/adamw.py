"""AdamW: the bound function of octavo_registry.contract.optimizers, one launch."""

from __future__ import annotations

from torch import Tensor

import octavo_native
from octavo import QuantizerSpec
from octavo_native import AdamWCodes, AdamWDraws, PlaneArgs
from octavo_registry.contract import AdamWArrays, AdamWStepRule
from octavo_torch.plugin_api import Bounded, GroupedTensor
from octavo_torch_native.arrays.launch import address, submit
from octavo_torch_native.quantizers.planes import DTYPE_NUMBERS, layout_number

_WORDS = 1 << 64
_NO_PLANE = PlaneArgs(0, 0)


class AdamWStep:
    """A step on arrays of CUDA memory; with a spec, one that writes codes in these layouts."""

    def __init__(self, spec: QuantizerSpec | None, layouts: tuple[str, str]) -> None:
        self._spec, self._layouts = spec, tuple(layout_number(layout) for layout in layouts)
        self._rules: Bounded[tuple[object, ...], octavo_native.AdamWRule] = Bounded()

    def __call__(
        self, arrays: AdamWArrays[Tensor], rule: AdamWStepRule[Tensor], out: Tensor | GroupedTensor | None, /
    ) -> None:
        """Steps the arrays in place, and writes `out`."""
        master = arrays.master
        on_device = rule.step.is_cuda
        values = out if isinstance(out, Tensor) else None
        columns = master.shape[-1] if master.dim() else 1
        held = {
            "shape": (master.numel() // columns if columns else 0, columns),
            "master": (address(master), DTYPE_NUMBERS[master.dtype]),
            "grad": (address(arrays.grad), DTYPE_NUMBERS[arrays.grad.dtype]),
            "moments": (address(arrays.exp_avg), address(arrays.exp_avg_sq)),
            "tops": (address(arrays.exp_avg_tops), address(arrays.exp_avg_sq_tops)),
        }
        if values is not None:
            held["values"] = address(values), DTYPE_NUMBERS[values.dtype]
        draws = AdamWDraws(
            seed=rule.seed % _WORDS,
            tensor=rule.tensor,
            step=1 if on_device else int(rule.step),
            step_device=rule.step.data_ptr() if on_device else 0,
            first_row=rule.first_row,
        )
        arguments = {
            "arrays": octavo_native.AdamWArrays(**held),
            "rule": self._rule(rule),
            "draws": draws,
            "codes": self._codes(out, master.shape[-2]) if isinstance(out, GroupedTensor) else None,
            "inverse_scale": address(rule.inverse_scale),
            "skip": address(rule.skip),
        }
        submit(octavo_native.adamw_step, master, arguments, threaded=False, recordable=False)

    def _rule(self, rule: AdamWStepRule[Tensor]) -> octavo_native.AdamWRule:
        """Remembered, since it holds tables that are worked out from the betas."""
        at = rule.lr.data_ptr() if isinstance(rule.lr, Tensor) else 0
        rate = 0.0 if isinstance(rule.lr, Tensor) else rule.lr
        key = rate, at, rule.betas, rule.eps, rule.weight_decay
        known = self._rules.get(key)
        if known is None:
            known = self._rules[key] = octavo_native.AdamWRule(
                lr=rate, betas=rule.betas, eps=rule.eps, weight_decay=rule.weight_decay, lr_device=at
            )
        return known

    def _codes(self, out: GroupedTensor, matrix_rows: int) -> AdamWCodes:
        assert self._spec is not None  # codes are asked for with a spec
        row, column = self._layouts
        return AdamWCodes(
            matrix_rows=matrix_rows,
            rowwise=_plane(out.rowwise, out.rowwise_scale, row),
            columnwise=_plane(out.columnwise, out.columnwise_scale, column),
            amax_epsilon=self._spec.amax_epsilon,
            power_of_two=self._spec.power_of_two,
        )


def _plane(codes: Tensor | None, scales: Tensor | None, layout: int) -> PlaneArgs:
    return _NO_PLANE if codes is None else PlaneArgs(address(codes), address(scales), 0, layout)
