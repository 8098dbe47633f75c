"""What the Megatron-LM adapter reads of Megatron's objects, as types."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import Enum
from typing import Protocol

import torch
from torch.distributed import ProcessGroup

Offsets = tuple[tuple[int, int, int], ...]
"""The place in a distributed checkpoint of each enclosing layer: (axis, index, count)."""


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


class MoeConfig(Config, Protocol):
    """The further fields that a whole MoE layer reads."""

    activation_func: Callable[..., torch.Tensor]
    activation_func_clamp_value: float | None
    glu_linear_offset: float
    gated_linear_unit: bool
    moe_router_topk: int
    moe_token_dispatcher_type: str
    moe_shared_expert_overlap: bool
    overlap_moe_expert_parallel_comm: bool
    moe_pad_expert_input_to_capacity: bool
    moe_apply_probs_on_input: bool
    cuda_graph_impl: str
    cuda_graph_scope: Sequence[Enum]


class ProcessGroups(Protocol):
    """The groups of Megatron's ProcessGroupCollection that are used."""

    ep: ProcessGroup
    expt_tp: ProcessGroup | None
    expt_dp: ProcessGroup
