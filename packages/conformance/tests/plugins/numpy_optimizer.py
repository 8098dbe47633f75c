"""A backend's step of AdamW by the definition, honest or with one fault."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy_around import write_around

from octavo_numerics import AdamWRule, AdamWState, BlockState, adamw_step
from octavo_registry.contract import AdamWArrays, AdamWStepRule


def step_in_place(fault: str | None, arrays: AdamWArrays[Any], how: AdamWStepRule[Any], out: Any) -> None:
    """Writes the master, the moments and the values. Rows of a larger tensor stand under as many zeros."""
    if how.skip is not None and how.skip[0] and fault != "never-skips":
        return
    scale = np.float32(1) if how.inverse_scale is None else how.inverse_scale[0]
    grad = arrays.grad.astype(np.float32) * scale
    above = 0 if fault == "all-from-row-0" else how.first_row

    def moment(values: Any, tops: Any, signed: bool) -> Any:
        return _under(values, above) if tops is None else BlockState(_under(values, above), _under(tops, above), signed)

    state = AdamWState(
        int(how.step) - 1,
        moment(arrays.exp_avg, arrays.exp_avg_tops, True),
        moment(arrays.exp_avg_sq, arrays.exp_avg_sq_tops, False),
    )
    rule = AdamWRule(float(how.lr), how.betas, how.eps, how.weight_decay)
    seed = how.seed % 2**32 if fault == "short-seed" else how.seed
    master, after = adamw_step(
        _under(arrays.master, above), _under(grad, above), state, rule, seed=seed, tensor=how.tensor
    )
    arrays.master[...] = master[above:]
    for name in ("exp_avg", "exp_avg_sq"):
        made = getattr(after, name)
        if isinstance(made, BlockState):
            getattr(arrays, f"{name}_tops")[...] = made.tops[above:]
            made = made.codes
        getattr(arrays, name)[...] = made[above:]
        write_around(fault, getattr(arrays, name))
    if out is not None:
        out[...] = master[above:].astype(out.dtype)


def _under(values: Any, rows: int) -> Any:
    return np.concatenate([np.zeros((rows, *values.shape[1:]), values.dtype), values])
