"""Group sizes of a graph-safe plan: on the device, always."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from octavo_torch_native.arrays.group_index import GroupIndex, index_groups


def check_sizes(group_sizes: Tensor, like: Any) -> None:
    """ValueError for sizes in host memory."""
    if group_sizes.is_cpu:
        raise ValueError(
            f"group_sizes is on the CPU and torch-cudagraph's plans take nothing from the host; give a tensor on "
            f"{like.device}, which a replay reads anew, or use torch-native"
        )


def device_plan(group_sizes: Tensor, rows: int, like: Tensor) -> GroupIndex:
    """The plan of device sizes [G] for `rows` rows on `like`'s device; sizes are cut to bounds and never read back."""
    check_sizes(group_sizes, like)
    return index_groups(group_sizes, rows, like)
