"""What the Megatron-LM adapter reads of Megatron's objects, as types."""

from __future__ import annotations

from typing import Protocol

import torch
from torch.distributed import ProcessGroup

Offsets = tuple[tuple[int, int, int], ...]
"""Of the layers around one in a distributed checkpoint: (axis, index, count) each."""


class Config(Protocol):
    """The fields of Megatron's TransformerConfig that are read."""

    fp8: object
    fp4: object
    params_dtype: torch.dtype
    use_cpu_initialization: bool
    init_model_with_meta_device: bool
    perform_initialization: bool
    gradient_accumulation_fusion: bool
    delay_wgrad_compute: bool
    expert_model_parallel_size: int


class ProcessGroups(Protocol):
    """The groups of Megatron's ProcessGroupCollection that are used."""

    ep: ProcessGroup
    expt_tp: ProcessGroup | None
    expt_dp: ProcessGroup
