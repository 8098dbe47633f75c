"""This package's namespace of custom operators, and the first of them, `octavo_torch_native::plan`."""

from __future__ import annotations

import torch
from torch import Tensor

import octavo_native
from octavo import check_group_sizes
from octavo_native import layouts as native_layouts
from octavo_torch.plugin_api import Operators, check_not_captured, dtype_text, status_word
from octavo_torch_native.arrays.launch import address, submit

define = Operators("octavo_torch_native").define
"""Defines an operator of this package's namespace; one object, which lives as long as the operators."""

ROW_START = 16
"""Words of a plan before row_start[G + 1]: octavo/plan.h, ABI level 2."""


_INTEGERS = (torch.int64, torch.int32)


def _plan(sizes: Tensor, rows: int, like: Tensor) -> tuple[Tensor, Tensor]:
    device, checked = like.device, sizes.is_cpu
    if sizes.dtype not in _INTEGERS or sizes.dim() != 1 or not (checked or sizes.device == device):
        raise ValueError(
            f"group_sizes is {dtype_text(sizes.dtype)} {list(sizes.shape)} on {sizes.device}; give int32 or int64 "
            f"[G] on {device} or on the CPU"
        )
    groups = sizes.shape[0]
    if checked:
        host = sizes.tolist()
        if sum(host) > rows or min(host, default=0) < 0:
            check_group_sizes(host, rows)
        if not like.is_cpu:
            check_not_captured("group_sizes", like)
            sizes = sizes.to(device, non_blocking=True)
    sizes = sizes.contiguous()
    words = torch.empty(octavo_native.plan_words(rows, groups), dtype=torch.int64, device=device)
    bounded = torch.empty(groups, dtype=torch.int64, device=device)
    arguments = {
        "sizes": address(sizes),
        "sizes_are_64": sizes.dtype is torch.int64,
        "groups": groups,
        "rows": rows,
        "plan": words.data_ptr(),
        "bounded": bounded.data_ptr(),
    }
    if not checked:
        arguments["status"] = status_word(device).data_ptr()
    submit(octavo_native.plan, words, arguments, threaded=False)
    return words, bounded


def _plan_fake(sizes: Tensor, rows: int, like: Tensor) -> tuple[Tensor, Tensor]:
    words = native_layouts.plan_words(rows, sizes.shape[0])
    return like.new_empty((words,), dtype=torch.int64), like.new_empty(sizes.shape, dtype=torch.int64)


plan = define("plan(Tensor sizes, SymInt rows, Tensor like) -> (Tensor, Tensor)", _plan, _plan_fake)
"""octavo_native's plan of `rows` rows on `like`'s device, and int64 sizes that fit into them: see GroupIndex."""
